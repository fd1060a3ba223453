"""Atomic file writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FULL = """
import resource, signal, sys
from clustergym import cli
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_disk_that_is_full_is_named(tmp_path: Path) -> None:
    """The system writes no more than 4096 bytes to a file, and its error has no file name."""
    out = tmp_path / "t.npz"
    ran = subprocess.run(
        [sys.executable, "-c", FULL, "trace", "synth", str(out), "--n-tokens", "2000"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr.strip().endswith(f"File too large: '{out}'"), ran.stderr
    assert list(tmp_path.iterdir()) == []
