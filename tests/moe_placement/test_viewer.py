"""The placement picture: positions, colours, the description of the last operation, and the window."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from clustergym.common import canvas
from clustergym.common.canvas import BLUE, CELL, MUTED, ORANGE, WHITE, Canvas, pygame
from clustergym.moe_placement.viewer import Frame, Operation, describe, draw, open_window, picture
from clustergym.moe_placement.viewer.layout import layout
from clustergym.moe_placement.viewer.picture import Painter, load_colours

SHAPES = [(1, 8, 9, 64), (4, 4, 5, 64), (4, 8, 3, 64), (4, 16, 5, 256)]  # nodes, GPUs per node, slots per GPU, experts


def make(nodes: int = 2, per_node: int = 4, slots_per_gpu: int = 3, experts: int = 20, **changes: object) -> Frame:
    """Expert e is in slot e. The first experts then repeat as replicas; the last slot is empty."""
    rng = np.random.default_rng(0)
    gpus = nodes * per_node
    experts_in_slots = np.arange(gpus * slots_per_gpu) % experts
    experts_in_slots[-1] = -1
    frame = Frame(
        slots=experts_in_slots.reshape(gpus, slots_per_gpu).astype(np.int16),
        expert_load=np.round(rng.lognormal(5, 1, experts)),
        gpu_pairs=rng.uniform(900, 1100, gpus),
        gpu_compute_us=rng.uniform(60, 90, gpus),
        traffic_bytes=rng.uniform(0, 4e6, (gpus, gpus)),
        gpus_per_node=per_node,
        layer=2,
        n_layers=24,
        layer_id=3,
        interval=1,
        n_intervals=8,
        op=3,
        ops_per_layer=16,
        layer_time_us=700.0,
        start_time_us=750.0,
        static_time_us=800.0,
        migrated=np.zeros((gpus, slots_per_gpu), np.bool_),
        last_op=None,
        saved=[0.05, -0.02],
    )
    return replace(frame, **changes)


def plain_pixel(rect: pygame.Rect) -> tuple[int, int]:
    """Row and column of a pixel of a tile outside its label and dots."""
    return rect.centery, rect.left + 1


def has(picture: np.ndarray, rect: pygame.Rect, colour: tuple[int, int, int]) -> bool:
    return bool((picture[rect.top : rect.bottom, rect.left : rect.right] == colour).all(-1).any())


@pytest.mark.parametrize(("nodes", "per_node", "slots", "experts"), SHAPES)
@pytest.mark.parametrize("size", [(1280, 760), (800, 475), (1920, 1080)])
def test_tiles_have_the_colours_of_their_experts(nodes, per_node, slots, experts, size):
    frame = make(nodes, per_node, slots, experts)
    picture = draw(frame, *size)
    assert picture.shape == (size[1], size[0], 3)
    assert picture.dtype == np.uint8
    where = layout(nodes, per_node, slots, *size)
    colours = load_colours(frame.expert_load)
    for gpu in range(nodes * per_node):
        for slot in range(slots):
            expert = frame.slots[gpu, slot]
            rect = where.tiles[gpu][slot]
            if expert >= 0:
                assert picture[plain_pixel(rect)].tolist() == colours[expert].tolist(), (gpu, slot)
            else:
                assert picture[rect.centery, rect.centerx].tolist() == list(CELL)


@pytest.mark.parametrize(("nodes", "per_node", "slots", "experts"), SHAPES)
@pytest.mark.parametrize("size", [(1280, 760), (800, 475), (1000, 900)])
def test_parts_are_inside_their_parents_and_do_not_overlap(nodes, per_node, slots, experts, size):
    where = layout(nodes, per_node, slots, *size)
    cards = [where.header, where.last_op, where.legend, where.times, where.traffic, where.saved, *where.nodes]
    for group in (cards, where.gpus, *where.tiles):
        assert all(rect.collidelist(group[i + 1 :]) == -1 for i, rect in enumerate(group))
        assert all(rect.w >= 3 and rect.h >= 3 for rect in group)
    screen = pygame.Rect(0, 0, *size)
    assert all(screen.contains(card) for card in cards)
    for gpu, rect in enumerate(where.gpus):
        assert where.nodes[gpu // per_node].contains(rect)
        assert rect.contains(where.bars[gpu])
        assert all(rect.contains(tile) and not tile.colliderect(where.bars[gpu]) for tile in where.tiles[gpu])


@pytest.mark.parametrize(("nodes", "per_node", "slots", "experts"), SHAPES)
def test_every_label_fits_its_tile_at_the_default_size(nodes, per_node, slots, experts, monkeypatch):
    written = []
    real = Canvas.text

    def spy(self, texts, *args, **kwargs):
        wide = real(self, texts, *args, **kwargs)
        written.append((texts, wide))
        return wide

    monkeypatch.setattr(Canvas, "text", spy)
    picture._tile.cache_clear()
    frame = make(nodes, per_node, slots, experts)
    draw(frame)
    labels = [(text, wide) for text, wide in written if text[:1] == "E" and text[1:].isdigit()]
    assert {text for text, _ in labels} == {f"E{e}" for e in frame.slots.ravel() if e >= 0}
    assert all(wide > 0 for _, wide in labels)  # 0 means that the text did not fit


@pytest.mark.parametrize("shape", [*SHAPES, (2, 8, 10, 128), (8, 8, 2, 96)])
@pytest.mark.parametrize("size", [(1280, 760), (800, 475), (1920, 1080)])
def test_texts_are_inside_the_picture_and_do_not_overlap(shape, size, monkeypatch):
    boxes = []
    real = Painter.text

    def spy(self, texts, x, middle, points, *args, **kwargs):
        wide = real(self, texts, x, middle, points, *args, **kwargs)
        if wide:
            high = max(8, self.px(points)) * 0.7
            left = round(x - kwargs.get("align", 0.0) * wide)
            boxes.append(pygame.Rect(left, round(middle - high / 2), wide, round(high)))
        return wide

    monkeypatch.setattr(Painter, "text", spy)
    draw(make(*shape, last_op=Operation("swap", 5, 1, source=0, victim=0)), *size)
    assert len(boxes) > 40
    for i, box in enumerate(boxes):
        assert pygame.Rect(0, 0, *size).contains(box)
        hit = box.collidelist(boxes[i + 1 :])
        assert hit == -1, (box, boxes[i + 1 + hit])


def test_colours_get_brighter_with_the_load():
    colours = load_colours(np.array([0.0, 1.0, 4.0, 16.0])).astype(int)
    assert colours[0].tolist() == [0x44, 0x01, 0x54]
    assert colours[3].tolist() == [0xFD, 0xE7, 0x25]
    assert abs(colours[2] - [0x21, 0x91, 0x8C]).max() <= 1  # the square root of 1/4 is the middle of the scale
    luminance = colours @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(luminance) > 0).all()
    assert load_colours(np.zeros(2)).tolist() == [[0x44, 0x01, 0x54]] * 2


def test_equal_frames_give_equal_pictures_in_another_process():
    frame = make(last_op=Operation("add", 4, 2))
    first = draw(frame)
    assert (first == draw(frame)).all()
    code = (
        "import sys; sys.path[:0] = ['tests/moe_placement', 'tests/support']; import hashlib, test_viewer as t;"
        "print(hashlib.sha256(t.draw(t.make(last_op=t.Operation('add', 4, 2))).tobytes()).hexdigest())"
    )
    root = str(Path(__file__).parents[2])
    output = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert output.strip().splitlines()[-1] == hashlib.sha256(first.tobytes()).hexdigest()


def test_only_the_busiest_gpu_is_orange():
    pairs = np.full(8, 1000.0)
    pairs[5] = 1300.0
    picture = draw(make(gpu_pairs=pairs))
    where = layout(2, 4, 3)
    assert [gpu for gpu in range(8) if has(picture, where.gpus[gpu], ORANGE)] == [5]


def test_load_bar_length_is_proportional_to_pairs():
    pairs = np.array([500.0, 1000, 1000, 1000, 1000, 1000, 1000, 1500])  # mean 1000; 1.5 times the mean fills the bar
    picture = draw(make(gpu_pairs=pairs))
    where = layout(2, 4, 3)
    for gpu, share in ((0, 1 / 3), (7, 1.0)):
        bar = where.bars[gpu]
        row = picture[bar.centery, bar.left : bar.right]
        filled = (row == (ORANGE if gpu == 7 else MUTED)).all(-1).sum() + (
            gpu == 7
        ) * 2  # the mean line covers 2 pixels
        assert abs(filled - share * bar.w) <= 3


def test_only_the_migrated_tile_gets_an_outline():
    migrated = np.zeros((8, 3), np.bool_)
    migrated[6, 1] = True
    before, after = draw(make()), draw(make(migrated=migrated))
    changed = (before != after).any(-1)
    where = layout(2, 4, 3)
    tile = where.tiles[6][1]
    assert tuple(after[tile.centery, tile.left]) == WHITE
    changed[where.last_op.top : where.last_op.bottom] = False  # shows the number of replicas to fetch
    changed[tile.top : tile.bottom, tile.left : tile.right] = False
    assert not changed.any()


def test_tiles_of_replicas_have_dots():
    """The tile of expert 0 changes when a second replica of it appears on the other GPU."""
    once = make(1, 2, 2, 4)
    once = replace(once, slots=np.array([[0, 1], [2, 3]], np.int16))
    twice = replace(once, slots=np.array([[0, 1], [0, 3]], np.int16))
    tile = layout(1, 2, 2).tiles[0][0]
    a, b = (draw(f)[tile.top : tile.bottom, tile.left : tile.right] for f in (once, twice))
    assert (a != b).any()


@pytest.mark.parametrize("kind", ["place", "swap", "add", "delete"])
def test_an_operation_marks_only_its_gpus(kind):
    source = 1 if kind in ("place", "swap") else -1
    op = Operation(kind, 18, 6, source=source, victim=3 if kind == "swap" else -1)
    frame = make()
    before, after = draw(frame), draw(replace(frame, last_op=op))
    changed = (before != after).any(-1)
    where = layout(2, 4, 3)
    around = where.gpus[6].inflate(where.gap, where.gap)
    assert has(after, around, BLUE)
    for gpu in range(8):
        inside = where.gpus[gpu].inflate(-6, -6)
        touched = changed[inside.top : inside.bottom, inside.left : inside.right].any()
        assert not touched or gpu in (6, source), gpu
    for card in (where.times, where.traffic, where.saved, where.legend, where.header):
        assert not changed[card.top : card.bottom, card.left : card.right].any()
    assert changed[where.last_op.top : where.last_op.bottom].any()


@pytest.mark.parametrize("kind", ["nothing", "illegal"])
def test_an_operation_without_effect_changes_only_the_description(kind):
    frame = make()
    changed = (draw(frame) != draw(replace(frame, last_op=Operation(kind, 3, 6)))).any(-1)
    area = layout(2, 4, 3).last_op
    assert changed.any()
    changed[area.top : area.bottom, area.left : area.right] = False
    assert not changed.any()


@pytest.mark.parametrize(("nodes", "per_node", "slots", "experts"), [*SHAPES, (2, 4, 4, 24), (8, 8, 2, 64)])
def test_arrows_do_not_cross_gpus(nodes, per_node, slots, experts):
    frame = make(nodes, per_node, slots, experts)
    painter = Painter(frame, 1280, 760)
    gpus = nodes * per_node
    for source, target in np.random.default_rng(0).integers(0, gpus, (200, 2)):
        if source == target:
            continue
        route = painter.route(int(source), int(target))
        for (ax, ay), (bx, by) in pairwise(route):
            assert ax == bx or ay == by
            line = pygame.Rect(min(ax, bx), min(ay, by), max(1, abs(ax - bx)), max(1, abs(ay - by)))
            assert pygame.Rect(0, 0, 1280, 760).contains(line)
            crossed = {g for g in range(gpus) if painter.layout.gpus[g].inflate(-2, -2).colliderect(line)}
            assert not crossed, (source, target, route)


@pytest.mark.parametrize(
    ("op", "sentence"),
    [
        (Operation("swap", 17, 9, source=3, victim=4), "swap: E17 GPU 3 → GPU 9, E4 back"),
        (Operation("place", 17, 9, source=3), "place: E17 GPU 3 → GPU 9"),
        (Operation("place", 17, 9), "place: E17 → GPU 9"),
        (Operation("add", 17, 9), "add: E17 replica on GPU 9"),
        (Operation("delete", 17, 9), "delete: E17 replica from GPU 9"),
        (Operation("nothing", 17, 9), "nothing: E17 stays on GPU 9"),
        (Operation("illegal", 17, 9), "illegal: E17, GPU 9 (nothing changed)"),
    ],
)
def test_describe(op, sentence):
    assert describe(op) == sentence


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": np.zeros(8, np.int16)}, r"slots has shape \(8,\)"),
        ({"expert_load": np.zeros((2, 2))}, r"expert_load has shape \(2, 2\)"),
        ({"gpu_pairs": np.zeros(7)}, r"gpu_pairs has shape \(7,\), but slots has shape \(8, 3\): expected \(8,\)"),
        ({"gpu_compute_us": np.zeros(9)}, r"gpu_compute_us has shape \(9,\)"),
        ({"traffic_bytes": np.zeros((8, 4))}, r"traffic_bytes has shape \(8, 4\).*expected \(8, 8\)"),
        ({"migrated": np.zeros((3, 8), np.bool_)}, r"migrated has shape \(3, 8\)"),
        ({"gpus_per_node": 3}, "gpus_per_node is 3, which does not divide the 8 GPUs"),
        ({"slots": np.full((8, 3), 20, np.int16)}, "slots holds experts 20 to 20, expected -1 to 19"),
        ({"gpu_pairs": np.full(8, np.nan)}, "gpu_pairs holds nan"),
        ({"layer_time_us": float("inf")}, "layer_time_us is inf"),
        ({"last_op": Operation("add", 0, 8)}, "last_op.gpu is 8, expected 0 to 7"),
        ({"saved": [float("nan")]}, "saved holds"),
    ],
)
def test_an_invalid_frame_raises_and_names_the_field(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_an_invalid_kind_or_size_raises():
    with pytest.raises(ValueError, match="kind is 'move', expected one of place, swap"):
        Operation("move", 0, 0)
    with pytest.raises(ValueError, match="picture is 300 x 200, expected at least 800 x 475"):
        draw(make(), 300, 200)


def test_smoke_empty_cluster_and_long_history():
    zeros = {name: np.zeros_like(getattr(make(), name)) for name in ("expert_load", "gpu_pairs", "traffic_bytes")}
    empty = make(**zeros, slots=np.full((8, 3), -1, np.int16), saved=[], static_time_us=0.0, start_time_us=0.0)
    assert not has(draw(empty), layout(2, 4, 3).gpus[0], ORANGE)
    draw(make(saved=[0.01 * (i % 7 - 3) for i in range(1000)], n_intervals=1000))


def test_window_shows_frames_and_stays_closed_after_quit(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    window = open_window()
    window.show(make())
    screen = pygame.display.get_surface()
    assert screen.get_size() == (1280, 760)
    assert pygame.display.get_caption()[0] == "clustergym"
    assert (pygame.surfarray.array3d(screen).swapaxes(0, 1) == draw(make())).all()
    pygame.event.post(pygame.event.Event(pygame.QUIT))
    window.show(make())
    assert window.closed
    assert not pygame.display.get_init()
    window.show(make())  # closed by the user: no error, no new window
    assert not pygame.display.get_init()
    window.close()
    window.close()


def test_pictures_are_equal_after_the_window_is_closed_and_after_pygame_quit(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    window = open_window(900, 600)
    window.show(make())
    window.close()
    assert not pygame.display.get_init()
    expected = draw(make(layer_time_us=612.3))
    pygame.quit()
    canvas._render_text.cache_clear()
    assert (draw(make(layer_time_us=612.3)) == expected).all()


def test_drawing_prints_nothing_and_changes_no_environment_variable():
    code = (
        # PettingZoo sets two environment variables when it is imported.
        "import os, sys; sys.path[:0] = ['tests/moe_placement', 'tests/support'];"
        "import pettingzoo; before = dict(os.environ);"
        "from clustergym.common import canvas; assert dict(os.environ) == before, 'import';"
        "import test_viewer as t; t.draw(t.make()); import pygame;"
        "assert dict(os.environ) == before, 'draw'; assert not pygame.display.get_init()"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SDL", "PYGAME"))} | {"DISPLAY": ":77"}
    root = str(Path(__file__).parents[2])
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environ, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""


def test_without_pygame_only_pictures_fail_and_name_the_extra():
    code = """
import sys
sys.path[:0] = ["tests/moe_placement", "tests/support"]
sys.modules["pygame"] = None  # every import of pygame fails
import gymnasium, clustergym.moe_placement.environment
from clustergym.moe_placement.viewer import draw, open_window
env = gymnasium.make("clustergym:GPUAllocation-v0")
env.reset(seed=1)
env.step(env.action_space.sample())
for call in (
    lambda: draw(None),
    open_window,
    lambda: gymnasium.make("GPUAllocation-v0", render_mode="rgb_array").reset(seed=1),
):
    try:
        call()
    except ImportError as error:
        assert str(error) == "pygame is not installed: pip install 'clustergym[render]'", error
    else:
        raise AssertionError("no error")
"""
    root = str(Path(__file__).parents[2])
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
