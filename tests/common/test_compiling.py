"""Compiled kernels are made anew exactly when a source file that is part of them has changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from clustergym.common import compiling
from clustergym.common.compiling import _direct_imports, imported_sources, source_fingerprint
from clustergym.moe_placement import simulator
from clustergym.moe_placement.kernels import cost, episode, streams
from clustergym.moe_placement.launchers import cpu

PACKAGE = Path(compiling.__file__).parents[1]


def names(path: str) -> set[str]:
    return {source.relative_to(PACKAGE).as_posix() for source in imported_sources(PACKAGE / path)}


def test_imported_sources_are_followed_through_other_files() -> None:
    kernels = {f"moe_placement/kernels/{name}.py" for name in ("streams", "replicas", "state")}
    others = {"moe_placement/profiles.py", "common/choices.py", "common/compiling.py"}
    assert names("moe_placement/kernels/streams.py") == kernels | others


def test_a_module_that_is_imported_from_its_package_counts() -> None:
    """The launcher imports ``from clustergym.moe_placement.kernels import episode``."""
    found = names("moe_placement/launchers/cpu.py")
    assert {"common/threads.py", "moe_placement/launchers/prefetch.py"} <= found
    assert {f"moe_placement/kernels/{name}.py" for name in ("episode", "lookahead", "passes", "token_sets")} <= found
    assert "moe_placement/batch.py" not in found


def stamp(function: object) -> str:
    """The hash of its sources, which is part of the name of its machine code on the disk."""
    return function._cache.fingerprint


def test_functions_are_stamped_with_their_sources() -> None:
    for function, path in (
        (cpu._run, "moe_placement/launchers/cpu.py"),
        (episode.step, "moe_placement/kernels/episode.py"),
        (cost.pass_time, "moe_placement/kernels/cost.py"),
        (streams.permuted, "moe_placement/kernels/streams.py"),
        (simulator._count_range, "moe_placement/simulator.py"),
    ):
        assert stamp(function) == source_fingerprint(imported_sources(PACKAGE / path))
    assert stamp(episode.step) == stamp(episode.begin_episode) != stamp(cost.pass_time)


@pytest.mark.parametrize(
    ("changed", "renewed"),
    [
        # Everything counts with these.
        ("moe_placement/kernels/state.py", {"cost", "streams", "episode", "cpu", "simulator"}),
        ("moe_placement/profiles.py", {"cost", "streams", "episode", "cpu", "simulator"}),
        ("moe_placement/kernels/streams.py", {"streams", "episode", "cpu", "simulator"}),
        ("moe_placement/kernels/observation.py", {"episode", "cpu"}),
        ("moe_placement/kernels/lookahead.py", {"cpu"}),
        ("moe_placement/launchers/prefetch.py", {"cpu"}),
        ("moe_placement/batch.py", set()),
        ("plans/planning.py", set()),
        ("gpu_allocation/environment.py", set()),
    ],
)
def test_a_change_renews_what_it_is_part_of_and_nothing_else(
    changed: str, renewed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "clustergym"
    shutil.copytree(PACKAGE, package, ignore=lambda _, files: [f for f in files if "." in f and not f.endswith(".py")])
    monkeypatch.setattr(compiling, "_PACKAGE", package)
    files = {name: package / f"moe_placement/kernels/{name}.py" for name in ("cost", "streams", "episode")}
    files |= {"cpu": package / "moe_placement/launchers/cpu.py", "simulator": package / "moe_placement/simulator.py"}

    def fingerprints() -> dict[str, str]:
        _direct_imports.cache_clear()
        return {name: source_fingerprint(imported_sources(file)) for name, file in files.items()}

    before = fingerprints()
    with open(package / changed, "a") as file:
        file.write("# changed\n")
    after = fingerprints()
    _direct_imports.cache_clear()
    assert {name for name in files if before[name] != after[name]} == renewed
