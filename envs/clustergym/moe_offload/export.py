"""Files for the expert cache of an engine that does not have this package."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from clustergym.common.extras import require
from clustergym.common.files import atomic_file, write_atomically
from clustergym.moe_offload.rules import Workload, as_json, tune_all
from clustergym.moe_offload.simulator import build_task
from clustergym.moe_offload.specs import OffloadConfig
from clustergym.moe_offload.tables import Tables, first_tokens, split_sequences
from clustergym.traces.token_trace import TokenTrace

EXAMPLE = "cache_example.py"
RULE = "frequency+transitions"
TUNE_TOKENS = 8000


def export_cache(
    folder: Path,
    trace: TokenTrace,
    slots: float,
    link: str | float,
    evaluations: int = 20,
    seed: int = 0,
    progress: Callable[[str, str], None] | None = None,
) -> list[tuple[str, str]]:
    """Tune a rule and write it with the hot set, the tables, and an example. Returns (file, content).

    Args:
        folder: made if it does not exist.
        trace: of the model.
        slots: share of all experts that fit on the GPU.
        link: to the host memory.
        evaluations: trials per parameter of the rule.
        seed: of the split and of the search.
        progress: told what is going on.
    """
    parts = split_sequences(trace, seed)
    tables, tuning = Tables.count(parts["fit"]), first_tokens(parts["train"], TUNE_TOKENS, seed)
    task = build_task(OffloadConfig(trace=tuning, split="all", slots=slots, link=link), tables)
    if progress is not None:
        progress(f"tune {RULE}", "")
    rule, z = tune_all(Workload(task, tuning, tables, reuse=True), [RULE], evaluations, seed)[RULE]
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


def copy_files(source: Path, folder: Path, names: Sequence[str]) -> list[tuple[str, str]]:
    """Copy files that exist; the first one must. Returns (file, content)."""
    if not (source / names[0]).is_file():
        raise ValueError(f"{source}: no {names[0]} in the folder")
    found = [name for name in names if (source / name).is_file()]
    for name in found:
        with atomic_file(folder / name) as file:
            file.write((source / name).read_bytes())
    return [(name, f"of {source}") for name in found]
