"""Mutation test of the 37 details: break each detail in a copy of its trainer and report the test that fails.

    python tests/details/mutate.py
    python tests/details/mutate.py --details 5 8 masking

Each mutation runs the tests of its row on a copy of ``cleanrl_ppo`` and ``tests``, in a forked process. The exit code
is 1 if a mutation makes no test fail. The whole run takes about ten minutes.
"""

from __future__ import annotations

import importlib
import io
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import tyro
from rich.console import Console
from rich.table import Table

from ledger import DETAILS, ROOT, Detail

# Imported before forking, so that the children share them. Trainers and tests are not, because they change.
HEAVY = (
    "torch", "torch.distributions", "torch.utils.tensorboard", "torch_geometric.nn", "tyro", "gymnasium",
    "cv2", "ale_py", "tensorboard.backend.event_processing.event_accumulator", "hypothesis", "hypothesis.extra.numpy",
    "clustergym.training", "clustergym.planners.evaluation",
)  # fmt: skip


@dataclass
class Args:
    details: list[str] = field(default_factory=list)
    """Numbers or names of details. Default: all."""
    timeout_s: int = 120
    """A mutation counts as detected if its tests take longer than this."""


class FirstFailure:
    """Pytest plugin that records the first test that failed."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid.split("::")[-1]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.name:
            self.name = "import of the trainer"


def run_tests(detail: Detail, old: str, new: str, timeout_s: int) -> str:
    """Name of the first test of the row that fails on the mutated trainer, or an empty string."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for part in ("cleanrl_ppo", "tests"):
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        for part in ROOT.iterdir():
            if not (root / part.name).exists() and not part.name.startswith("."):
                (root / part.name).symlink_to(part)
        trainer = root / "cleanrl_ppo" / f"{detail.trainer}.py"
        source = trainer.read_text()
        if source.count(old) != 1:
            raise ValueError(
                f"detail {detail.key}: {old!r} occurs {source.count(old)} times in {trainer.name}, expected once"
            )
        trainer.write_text(source.replace(old, new))
        result = root / "result"
        child = os.fork()
        if child == 0:
            signal.alarm(timeout_s)
            os.chdir(root)
            failure = FirstFailure()
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                names = [f"tests/{test}" for test in detail.tests]
                code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *names], plugins=[failure])
            if code not in (0, 1, 2):
                failure.name = ""
            result.write_text(failure.name if code else "")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return result.read_text()


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    chosen = [detail for detail in DETAILS if not args.details or detail.key in args.details]
    if not chosen:
        raise SystemExit(f"no detail matches {args.details}: use {', '.join(detail.key for detail in DETAILS)}")
    for name in HEAVY:
        importlib.import_module(name)
    console, began = Console(), time.perf_counter()
    table = Table("#", "detail", "trainer", "mutation", "detected by")
    survivors = count = 0
    tests = tuple(dict.fromkeys(test for detail in chosen for test in detail.tests))
    unchanged = run_tests(replace(chosen[0], tests=tests), chosen[0].code, chosen[0].code, 10 * args.timeout_s)
    if unchanged:
        raise SystemExit(f"{unchanged} fails on the unchanged trainers")
    for detail in chosen:
        for old, new in detail.mutations:
            detected = run_tests(detail, old, new, args.timeout_s)
            count, survivors = count + 1, survivors + (not detected)
            change = f"{' '.join(old.split())} → {' '.join(new.split()) or 'nothing'}"
            table.add_row(detail.key, detail.name, detail.trainer, change, detected or "[red]no test[/red]")
            console.print(
                f"{detail.key}: {change}: {detected or 'NOT DETECTED'}", markup=False, highlight=False, style="dim"
            )
    console.print(table)
    seconds = time.perf_counter() - began
    console.print(f"{count - survivors} of {count} mutations of {len(chosen)} details detected, {seconds:.0f} s")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
