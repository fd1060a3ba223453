"""The process of submitted code: ``python -m clustergym.bench.worker TARGET KIND OPTIONS``.

Reads requests from standard input, calls the function, and writes answers to a pipe of its own: what the function
prints goes to standard error. A request is a length and an .npz file, an answer is a header (see ``HEADER``) and an
.npy array or the text of an error. Nothing is pickled. The parent takes the time.
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
from typing import Any

import numpy as np

LENGTH = struct.Struct("<Q")
HEADER = struct.Struct("<BQ")
"""Whether it is an error, and the length of what follows."""
Arrays = dict[str, np.ndarray]
Call = Callable[[Arrays], np.ndarray]


def find_target(target: str) -> Any:
    """The object that ``module:name`` or ``file.py:name`` means."""
    module_name, _, name = target.rpartition(":")
    if not module_name or not name:
        raise ValueError(f"{target!r}: expected module:function or file.py:function")
    if module_name.endswith(".py"):
        path = Path(module_name)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    if not hasattr(module, name):
        raise ValueError(f"{target!r}: {module_name} has no {name!r}")
    return getattr(module, name)


def planner_call(found: Any, options: dict[str, Any]) -> tuple[str, Call]:
    """What a planner sees (loads or tokens), and a function from the arrays of a request to its placement."""
    if not inspect.isclass(found) and next(iter(inspect.signature(found).parameters), "") in ("weight", "weights"):
        return "loads", lambda arrays: _call_deepseek(found, arrays, options)
    return "tokens", _call_ours(found, options)


def _call_deepseek(function: Any, arrays: Arrays, options: dict[str, Any]) -> np.ndarray:
    """Call ``rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus)`` as deepseek-ai/EPLB has it."""
    import torch

    weight = torch.from_numpy(arrays["weight"])
    answer = function(weight, options["num_replicas"], options["num_groups"], options["num_nodes"], options["num_gpus"])
    return np.asarray(answer[0] if isinstance(answer, tuple | list) else answer)


def _call_ours(found: Any, options: dict[str, Any]) -> Call:
    """Call a ``Planner`` class or a function ``plan(history, placement, simulator)``."""
    from clustergym.moe_placement.simulator import Simulator
    from clustergym.moe_placement.specs import get_cluster
    from clustergym.moe_placement.streams import Interval

    cluster = get_cluster(options["cluster"], slots_per_gpu=options["slots_per_gpu"])
    simulator = Simulator(options["model"], cluster, options["profile"], options["passes_per_interval"])
    planner: Any = found(simulator) if isinstance(found, type) else None
    history: list[Interval] = []

    def call(arrays: Arrays) -> np.ndarray:
        if arrays["first"]:
            history.clear()
            if planner is not None:
                planner.reset()
        rows = np.arange(arrays["experts"].shape[1], dtype=np.int32).reshape(len(arrays["rank_start"]), -1)
        history.append(Interval(arrays["experts"], rows, arrays["rank_start"]))
        given = arrays["placement"]
        return np.asarray(found(history, given, simulator) if planner is None else planner.plan(history, given))

    return call


def agent_call(found: Any, options: dict[str, Any]) -> tuple[str, Call]:
    """``obs``, and a function from an observation to an action."""
    agent: Any = found() if inspect.isclass(found) else found
    predict = getattr(agent, "predict", agent)

    def call(arrays: Arrays) -> np.ndarray:
        answer = predict(arrays["obs"] if list(arrays) == ["obs"] else arrays)
        # Stable-Baselines3 returns the action and the state of a recurrent policy.
        return np.asarray(answer[0] if isinstance(answer, tuple) else answer)

    return "obs", call


CALLS = {"planner": planner_call, "agent": agent_call}


def read_exactly(file: Any, n: int) -> bytes:
    data: bytes = file.read(n)
    if len(data) != n:
        raise SystemExit(0)
    return data


def main(target: str, kind: str, options: str) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    # Relative modules are found where the command was started.
    sys.path.insert(0, os.getcwd())

    def answer(error: bool, payload: bytes) -> None:
        answers.write(HEADER.pack(error, len(payload)) + payload)
        answers.flush()

    try:
        sees, call = CALLS[kind](find_target(target), json.loads(options))
    except Exception as error:
        answer(True, f"{type(error).__name__}: {error}".encode())
        return
    answer(False, sees.encode())
    while True:
        (length,) = LENGTH.unpack(read_exactly(requests, LENGTH.size))
        with np.load(io.BytesIO(read_exactly(requests, length)), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        try:
            buffer = io.BytesIO()
            np.save(buffer, np.ascontiguousarray(call(arrays)), allow_pickle=False)
            answer(False, buffer.getvalue())
        except (Exception, SystemExit) as error:
            answer(True, f"{type(error).__name__}: {error}".encode()[:2000])


if __name__ == "__main__":
    main(*sys.argv[1:])
