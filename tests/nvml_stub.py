"""A GPU for machines without one: libnvidia-ml.so.1, compiled from nvml_stub.c, whose load a test sets."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml_stub.c")


class Gpu:
    """The stub's library and the file that it reads."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler to build the stub of libnvidia-ml with")
        library = folder / "libnvidia-ml.so.1"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
        self._state = folder / "gpu"
        self.set()
        self.environment = {"LD_LIBRARY_PATH": str(folder), "NVML_STUB": str(self._state)}

    def set(
        self, util: int = 0, used_mb: int = 0, total_mb: int = 32768, processes: int = 0, mps: int = 0, error: int = 0
    ) -> None:
        """Utilisation in %, memory in MB, processes as the driver lists them, and an error that every query returns."""
        temporary = self._state.with_suffix(".new")
        temporary.write_text(f"{util} {used_mb} {total_mb} {processes} {mps} {error}\n")
        os.replace(temporary, self._state)
