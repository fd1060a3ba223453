"""Drawing with pygame: colours, text, boxes, and a window. Needs the extra ``[render]``, but no display."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.common.extras import require

# Importing pygame prints a greeting and, under X11, sets SDL_VIDEO_X11_WMCLASS. A library should do neither.
_environ = dict(os.environ)
with contextlib.redirect_stdout(None):
    require("pygame", "render")
    import pygame as pygame  # the alias marks it as an export: pictures import it from here
    import pygame.freetype
for _name in set(os.environ) - set(_environ):
    del os.environ[_name]

Colour = tuple[int, int, int]

BACKGROUND: Colour = (15, 18, 23)
CARD: Colour = (23, 28, 35)
CELL: Colour = (33, 39, 48)
TRACK: Colour = (48, 56, 67)
FAINT: Colour = (92, 102, 116)
MUTED: Colour = (151, 161, 174)
TEXT: Colour = (226, 231, 237)
# People with colour blindness can tell blue from orange. Neither hue occurs in viridis.
BLUE: Colour = (120, 200, 255)
ORANGE: Colour = (255, 140, 80)
WHITE: Colour = (255, 255, 255)
BLACK: Colour = (0, 0, 0)

# Colour scales as evenly spaced hex colours, for `colour_scale`.
VIRIDIS = (
    "440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c "
    "1fa088 28ae80 3fbc73 5ec962 84d44b addc30 d8e219 fde725"
)
ICE = "1d242d 24405a 2d6390 5a9bd0 a9d3f5 f2f9ff"

# Lengths and font sizes are given for a picture of this size, and scaled for others.
REFERENCE_WIDTH, REFERENCE_HEIGHT = 1280, 760


@lru_cache(maxsize=2)
def colour_scale(anchors: str) -> npt.NDArray[np.uint8]:
    """(256, 3) colours, interpolated between evenly spaced anchors such as ``VIRIDIS``."""
    stops = np.array([list(bytes.fromhex(anchor)) for anchor in anchors.split()], dtype=float)
    at = np.linspace(0, len(stops) - 1, 256)
    return np.stack([np.interp(at, np.arange(len(stops)), stops[:, c]) for c in range(3)], 1).round().astype(np.uint8)


def rgb(colour: npt.NDArray[np.uint8]) -> Colour:
    """An array of three values as a tuple of ints."""
    return int(colour[0]), int(colour[1]), int(colour[2])


@lru_cache(maxsize=1024)
def contrast_colour(fill: Colour) -> Colour:
    """Black or white, whichever has more contrast on the fill (WCAG relative luminance)."""
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in fill]
    return BLACK if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 else WHITE


@lru_cache(maxsize=2)
def _font(bold: bool) -> pygame.freetype.Font:
    # Both fonts come with pygame, so pictures do not depend on the fonts of the machine. Some pygame packages leave out
    # the examples and with them the regular font.
    if not pygame.freetype.get_init():
        pygame.freetype.init()
    regular = Path(pygame.__file__).parent / "examples" / "data" / "sans.ttf"
    return pygame.freetype.Font(None if bold or not regular.exists() else str(regular), 12)


@lru_cache(maxsize=4096)
def _render_text(text: str, size: int, colour: Colour, bold: bool) -> tuple[pygame.Surface, int, int, int, int]:
    """The rendered text, its bearing, its ascent, its width, and the height of capitals."""
    if not pygame.freetype.get_init():
        pygame.freetype.init()
        _font.cache_clear()
    font = _font(bold)
    if "→" in text and font.get_metrics("→")[0] is None:
        text = text.replace("→", "to")
    surface, box = font.render(text, colour, size=size)
    return surface, box.x, box.y, box.x + box.w, font.get_rect("E", size=size).h


@lru_cache(maxsize=2048)
def rounded_box(
    w: int, h: int, radius: int, fill: Colour | None, outline: Colour | None = None, thick: int = 0, dash: bool = False
) -> pygame.Surface:
    """A box with rounded corners, antialiased by scaling down a larger one. Cached: a picture has many equal boxes."""
    k = 4 if w * h < 40_000 else 2
    big = pygame.Surface((w * k, h * k), pygame.SRCALPHA, 32)
    big.fill((*(outline or fill or BACKGROUND), 0))  # transparent, but in this colour: else scaling darkens the edge
    whole = big.get_rect()
    if fill is not None:
        pygame.draw.rect(big, fill, whole, border_radius=radius * k)
    if outline is not None:
        pygame.draw.rect(big, outline, whole, thick * k, border_radius=radius * k)
    if dash:
        clear = (*(outline or BACKGROUND), 0)
        step = 4 * k
        for at in range(radius * k + step // 2, whole.w - radius * k, 2 * step):
            big.fill(clear, (at, 0, step, thick * k))
            big.fill(clear, (at, whole.h - thick * k, step, thick * k))
        for at in range(radius * k + step // 2, whole.h - radius * k, 2 * step):
            big.fill(clear, (0, at, thick * k, step))
            big.fill(clear, (whole.w - thick * k, at, thick * k, step))
    small = pygame.transform.smoothscale(big, (w, h))
    if fill is not None and w > 2 * radius and h > 2 * radius and outline is None:
        small.fill(fill, (radius, 0, w - 2 * radius, h))  # smoothscale rounds: keep the colour exact
        small.fill(fill, (0, radius, w, h - 2 * radius))
    return small


class Canvas:
    """A surface with text, boxes and colour bars. ``unit`` is the scale: 1.0 for a picture of the reference size."""

    def __init__(self, surface: pygame.Surface, unit: float = 1.0) -> None:
        self.surface, self.unit = surface, unit

    def px(self, length: float) -> int:
        """A length of the reference picture in pixels of this one."""
        return round(length * self.unit)

    def width(self, text: str, size: float, bold: bool = False) -> int:
        """Width of a text in pixels."""
        return _render_text(text, max(8, self.px(size)), TEXT, bold)[3]

    def text(
        self,
        texts: str | Sequence[str],
        x: int,
        middle: int,
        size: float,
        colour: Colour = TEXT,
        bold: bool = False,
        align: float = 0.0,
        room: int | None = None,
    ) -> int:
        """Write the first of ``texts`` that fits in ``room``, or nothing.

        With align 0 the text starts at x, with 0.5 it is centred there, with 1 it ends there.

        Returns:
            The width of the written text in pixels, 0 if none fits.
        """
        for text in [texts] if isinstance(texts, str) else texts:
            surface, bearing, ascent, wide, capital = _render_text(text, max(8, self.px(size)), colour, bold)
            if room is None or wide <= room:
                self.surface.blit(surface, (round(x - align * wide) + bearing, middle + (capital + 1) // 2 - ascent))
                return wide
        return 0

    def box(
        self,
        rect: pygame.Rect,
        fill: Colour | None,
        radius: float = 6,
        outline: Colour | None = None,
        dash: bool = False,
    ) -> None:
        """Draw a rounded box. An empty rectangle draws nothing."""
        if rect.w > 0 and rect.h > 0:
            thick = max(1, self.px(2 if outline != FAINT else 1))
            corner = min(max(2, self.px(radius)), rect.w // 2, rect.h // 2)
            self.surface.blit(rounded_box(rect.w, rect.h, corner, fill, outline, thick, dash), rect)

    def dots(self, count: int, size: int, x: int, y: int, dx: int, dy: int, colour: Colour) -> None:
        """Draw a row or column of dots."""
        for i in range(count):
            self.surface.blit(rounded_box(size, size, size // 2, colour), (x + i * dx, y + i * dy))

    def colour_bar(self, bar: pygame.Rect, anchors: str) -> None:
        """Fill a rectangle with a colour scale from left to right."""
        strip = colour_scale(anchors)[np.linspace(0, 255, bar.w).astype(int)]
        self.surface.blit(pygame.surfarray.make_surface(np.repeat(strip[:, None], bar.h, 1)), bar)


def to_array(surface: pygame.Surface) -> npt.NDArray[np.uint8]:
    """The surface as (height, width, 3) RGB."""
    width, height = surface.get_size()
    pixels = np.empty((height, width, 3), np.uint8)
    # Drawing into a surface that shares the array's memory takes a fifth of the time of pygame's own conversions.
    pygame.image.frombuffer(pixels.data, (width, height), "RGB").blit(surface, (0, 0))
    return pixels


class Window:
    """A window for ``render_mode="human"``. It opens at the first ``show``; once closed, it stays closed.

    Args:
        width: pixels.
        height: pixels.
        paint: draws what ``show`` is given: ``paint(content, width, height)`` returns a surface.
        fps: the highest number of frames per second; 0 means no limit.
    """

    def __init__(
        self, width: int, height: int, paint: Callable[[Any, int, int], pygame.Surface], fps: float = 0.0
    ) -> None:
        self.width, self.height, self.paint, self.fps = width, height, paint, fps
        self.closed = False
        self._screen: pygame.Surface | None = None
        self._clock = pygame.time.Clock()

    def show(self, content: Any) -> None:
        """Show one frame. Waits if the last one was shown less than 1 / fps seconds ago."""
        if self.closed:
            return
        if self._screen is None:
            pygame.display.init()
            self._screen = pygame.display.set_mode((self.width, self.height))
            pygame.display.set_caption("clustergym")
        # The operating system reports a window as hung if its events are not read.
        if any(event.type == pygame.QUIT for event in pygame.event.get()):
            self.close()
            return
        self._screen.blit(self.paint(content, self.width, self.height), (0, 0))
        pygame.display.flip()
        if self.fps > 0:
            self._clock.tick(self.fps)

    def close(self) -> None:
        """Close the window. Closing it twice is allowed."""
        if self._screen is not None:
            pygame.display.quit()  # not pygame.quit(): the user's program may use pygame too
        self._screen = None
        self.closed = True
