"""Picture of a placement: the experts on each GPU, load, traffic, and the last operation of the agents.

A :class:`Frame` holds what one picture shows. Drawing needs the extra ``[render]``: pygame is imported when the first
picture is drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.viewer.frame import KINDS, Frame, Operation, describe

if TYPE_CHECKING:
    from clustergym.common.canvas import Window

__all__ = ["KINDS", "Frame", "Operation", "describe", "draw", "open_window"]


def draw(frame: Frame, width: int = 1280, height: int = 760) -> npt.NDArray[np.uint8]:
    """The picture as (height, width, 3) RGB. Equal frames give equal pictures."""
    from clustergym.common.canvas import to_array
    from clustergym.moe_placement.viewer.picture import paint

    return to_array(paint(frame, width, height))


def open_window(width: int = 1280, height: int = 760, fps: float = 0.0) -> Window:
    """A window whose ``show`` takes frames."""
    from clustergym.common.canvas import Window
    from clustergym.moe_placement.viewer.picture import paint

    return Window(width, height, paint, fps)
