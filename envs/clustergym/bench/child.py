"""The process of a submitted function: ``python -m clustergym.bench.child TARGET CALL OPTIONS``.

Reads requests from standard input, calls the function, and writes answers to a pipe of its own: what the function
prints goes to standard error. A request is a length and an .npz file, an answer is a header (see ``HEADER``) and an
.npy array or the text of an error. Nothing is pickled.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

# The function could replace these in their modules.
from time import perf_counter
from typing import Any

import numpy as np

LENGTH = struct.Struct("<Q")
HEADER = struct.Struct("<BdQ")
"""Whether it is an error, seconds that the call took, and the length of what follows."""
Arrays = dict[str, np.ndarray]


def find_target(target: str) -> Any:
    """The object that ``module:name`` or ``file.py:name`` means."""
    module_name, _, name = target.rpartition(":")
    if not module_name or not name:
        raise ValueError(f"{target!r}: expected module:function or file.py:function")
    if module_name.endswith(".py"):
        path = Path(module_name)
        if not path.is_file():
            raise ValueError(f"{target!r}: no file at {path}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{target!r}: {module_name} has no {part!r}")
        found = getattr(found, part)
    return found


Call = Callable[[Arrays], np.ndarray]


def placement_call(found: Any, options: dict[str, Any]) -> tuple[str, Call]:
    """What the function needs, and a function from the arrays of a request to a placement (L, slots)."""
    if not inspect.isclass(found) and next(iter(inspect.signature(found).parameters), "") in ("weight", "weights"):
        return "loads", lambda arrays: _call_deepseek(found, arrays, options)
    from clustergym.bench.submitted import call_ours

    return "tokens", call_ours(found, options)


def _call_deepseek(function: Any, arrays: Arrays, options: dict[str, Any]) -> np.ndarray:
    """Call ``rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus)`` as deepseek-ai/EPLB has it."""
    import torch

    weight = torch.from_numpy(arrays["weight"])
    answer = function(weight, options["num_replicas"], options["num_groups"], options["num_nodes"], options["num_gpus"])
    return np.asarray(answer[0] if isinstance(answer, tuple | list) else answer)


def agent_call(found: Any, options: dict[str, Any]) -> tuple[str, Call]:
    """``obs``, and a function from an observation to an action."""
    agent: Any = found() if inspect.isclass(found) else found
    predict = getattr(agent, "predict", agent)

    def call(arrays: Arrays) -> np.ndarray:
        answer = predict(arrays["obs"] if list(arrays) == ["obs"] else arrays)
        # Stable-Baselines3 returns the action and the state of a recurrent policy.
        return np.asarray(answer[0] if isinstance(answer, tuple) else answer)

    return "obs", call


CALLS = {"placement": placement_call, "agent": agent_call}


def read_exactly(file: Any, n: int) -> bytes:
    data: bytes = file.read(n)
    if len(data) != n:
        raise SystemExit(0)
    return data


def main(target: str, kind: str, options: str) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    given = json.loads(options)
    # Relative modules are found where the command was started.
    sys.path.insert(0, os.getcwd())

    def answer(error: bool, seconds: float, payload: bytes) -> None:
        answers.write(HEADER.pack(error, seconds, len(payload)) + payload)
        answers.flush()

    try:
        needs, call = CALLS[kind](find_target(target), given)
    except Exception as error:
        answer(True, 0.0, f"{type(error).__name__}: {error}".encode())
        return
    answer(False, 0.0, needs.encode())
    while True:
        (length,) = LENGTH.unpack(read_exactly(requests, LENGTH.size))
        with np.load(io.BytesIO(read_exactly(requests, length)), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        began = perf_counter()
        try:
            found = call(arrays)
            seconds = perf_counter() - began
            buffer = io.BytesIO()
            np.save(buffer, np.ascontiguousarray(found), allow_pickle=False)
            answer(False, seconds, buffer.getvalue())
        except (Exception, SystemExit) as error:
            answer(True, perf_counter() - began, f"{type(error).__name__}: {error}".encode()[:2000])


if __name__ == "__main__":
    main(*sys.argv[1:])
