"""Turn public recordings of expert routing into traces.

    python traces/convert_public.py core12345 law/*.json maths/*.json --model gpt-oss-20b -o gpt_oss.npz
    python traces/convert_public.py esft results/expert_scores/law results/expert_scores/intent -o deepseek_v2_lite.npz

* ``core12345``: the data set core12345/MoE_expert_selection_trace, one JSON file per query. The file is a list: the
  prompt, then one entry per generated token. An entry maps a layer to the experts of its tokens, or to null if the
  layer is dense. The folder of a file is its domain.
* ``esft``: deepseek-ai/ESFT, ``TASK/expert_weights_LAYER.txt``, one line per sequence: the expert ids of all tokens,
  two tabs, the gate weights. Each task is a domain. The model is DeepSeek-V2-Lite.
* ``load-history``: ``expert-load.json`` of abmfy/eplb-openevolve, loads of vLLM's EPLB; a load trace.

Only for files that you trust: they are read with few checks. Recordings of engines: ``clustergym trace import``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import tyro

from clustergym.moe_placement.specs import get_model
from clustergym.traces import LoadTrace, TokenTrace

Sequences = list[tuple[npt.NDArray[np.int16], str, int]]
"""(tokens, layers, top-k) experts, domain and prompt length of each sequence."""
ESFT_TOP_K = 6


@dataclass
class Args:
    format: tyro.conf.Positional[Literal["core12345", "esft", "load-history"]]
    """Format of the files."""
    sources: tyro.conf.Positional[list[Path]]
    """Files (core12345) or folders of tasks (esft)."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The .npz file to write."""
    model: str | None = None
    """Model preset. Default for esft: deepseek-v2-lite."""


def read_core12345(files: list[Path]) -> tuple[Sequences, list[int]]:
    sequences: Sequences = []
    layers: list[int] = []
    for file in files:
        entries = json.loads(file.read_bytes())
        layers = sorted(int(layer) for layer, rows in entries[0].items() if rows is not None)
        steps = [np.stack([np.array(entry[str(layer)], np.int16) for layer in layers], 1) for entry in entries]
        sequences.append((np.concatenate(steps), file.resolve().parent.name, len(steps[0])))
    return sequences, layers


def read_esft(folders: list[Path]) -> tuple[Sequences, list[int]]:
    sequences: Sequences = []
    layers: list[int] = []
    for folder in folders:
        files = {int(re.findall(r"\d+", path.name)[0]): path for path in folder.glob("expert_weights_*.txt")}
        layers = sorted(files)
        lines = [files[layer].read_text().splitlines() for layer in layers]
        for rows in zip(*lines, strict=True):
            ids = [np.array(row.split("\t\t")[0].split("\t"), np.int16).reshape(-1, ESFT_TOP_K) for row in rows]
            sequences.append((np.stack(ids, 1), folder.name, len(ids[0])))
    return sequences, layers


def read_load_history(files: list[Path], model: str | None, name: str) -> LoadTrace:
    steps = [step["logical_expert_load"] for file in files for step in json.loads(file.read_bytes())["load_history"]]
    counts = np.array(steps).astype(np.int64)
    layers = get_model(model).layer_ids if model else range(counts.shape[1])
    return LoadTrace(counts[counts.any((1, 2))], np.array(layers), model=model, name=name)


def main(args: Args) -> None:
    if args.format == "load-history":
        loads = read_load_history(args.sources, args.model, args.output.stem)
        loads.save(args.output)
        print(f"{loads}\nwrote {args.output}")
        return
    sequences, layers = (read_core12345 if args.format == "core12345" else read_esft)(args.sources)
    if not sequences:
        raise SystemExit(f"no sequence found in {', '.join(map(str, args.sources))}")
    model = args.model or ("deepseek-v2-lite" if args.format == "esft" else None)
    trace = TokenTrace(
        np.concatenate([experts for experts, _, _ in sequences]),
        layer_ids=layers,
        n_experts=get_model(model).n_experts if model else 0,
        seq_lens=[len(experts) for experts, _, _ in sequences],
        domains=[domain for _, domain, _ in sequences],
        model=model,
        name=args.output.stem,
    )
    trace.save(args.output)
    print(f"{trace}\nwrote {args.output}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
