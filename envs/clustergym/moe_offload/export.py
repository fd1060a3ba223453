"""Files for the expert cache of an engine that does not have this package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from clustergym.common.extras import require
from clustergym.common.files import atomic_file, write_atomically
from clustergym.moe_offload.kernels.state import Task
from clustergym.moe_offload.rules import Rule, Vector, as_json
from clustergym.moe_offload.tables import Tables
from clustergym.traces.token_trace import TokenTrace

EXAMPLE = "cache_example.py"


def export_cache(
    folder: Path, trace: TokenTrace, tables: Tables, task: Task, rule: Rule, z: Vector
) -> list[tuple[str, str]]:
    """Write the hot set, the tables, the parameters of a tuned rule, and an example. Returns (file, content).

    Args:
        folder: made if it does not exist.
        trace: of the model.
        tables: counted on it.
        task: ``home`` are the experts to begin with.
        rule, z: decayed counts and transitions, tuned.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hot = [np.flatnonzero(row >= 0).tolist() for row in task.home]
    hot_set = {
        "model": trace.model, "layers": trace.layer_ids.tolist(), "n_experts": trace.n_experts, "experts": hot,
    }  # fmt: skip
    write_atomically(folder / "hot_set.json", json.dumps(hot_set) + "\n")
    flat = {key: value[0] if len(value) == 1 else value for key, value in as_json(rule, z, every=True).items()}
    write_atomically(folder / "cache.json", json.dumps({"rule": rule.name, **flat}, indent=1) + "\n")
    with atomic_file(folder / "tables.safetensors") as file:
        content = {"popularity": tables.popularity, "lifts": tables.lifts}
        file.write(require("safetensors.numpy", "engines").save(content))
    write_atomically(folder / EXAMPLE, (Path(__file__).parent / EXAMPLE).read_text())
    return [
        ("hot_set.json", "experts of each layer to keep, most used ones of the training sequences"),
        ("tables.safetensors", "popularity (L, E) and lifts (7, L, E, E) of the log-odds"),
        ("cache.json", f"parameters of {rule.name}"),
        (EXAMPLE, "an expert cache in numpy that uses these files"),
    ]
