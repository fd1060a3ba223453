"""Time and memory for importing ten million token-layer entries in the format of each engine.

    python benchmarks/import_traces.py
    python benchmarks/import_traces.py --entries 1_000_000 --formats vllm megatron

The recordings are written first, which is not timed. Then each import runs in its own process, which reports its CPU
time and the growth of its peak memory. The shape is that of DeepSeek-V3: 58 MoE and 3 dense layers, top-8 of 256.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import engine_files as files

LAYERS, DENSE, TOP_K, EXPERTS = 58, 3, 8, 256
CHILD = """
import json, os, resource, sys, time
from clustergym.moe_placement.specs import get_model
from clustergym.traces.readers import ReadOptions, read_trace
from clustergym.traces.readers import sglang, vllm, megatron, esft
engine, out, paths = sys.argv[1], sys.argv[2], sys.argv[3:]
began, cpu = time.perf_counter(), time.process_time()
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = 0
if paths:
    trace = read_trace(paths, engine, ReadOptions(model=get_model("deepseek-v3")))
    result = trace.experts.nbytes
    read_s, read_cpu = time.perf_counter() - began, time.process_time() - cpu
    trace.save(out)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"read_s": read_s, "read_cpu_s": read_cpu, "s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu, "peak_mb": (peak - base) / 1024,
        "result_mb": result / 2**20, "tokens": trace.n_tokens, "sum": int(trace.experts.sum(dtype="int64"))}))
"""


@dataclass
class Args:
    entries: int = 10_000_000
    """Number of token-layer entries, each with eight experts."""
    formats: list[str] = field(default_factory=lambda: ["vllm", "sglang-tokens", "sglang-http", "megatron", "esft"])
    """Formats to measure."""
    json: Path | None = None
    """Write the results to this file."""


def write(kind: str, logical: np.ndarray, folder: Path) -> tuple[str, list[Path]]:
    """Write a recording of the routing. Returns (engine, files)."""
    n = len(logical)
    sequences = np.array_split(np.arange(n), max(1, n // 1000))
    if kind == "vllm":
        for i, rows in enumerate(sequences):
            np.save(folder / f"answer{i}.npy", files.vllm_array(logical[rows], DENSE, EXPERTS))
        return "vllm", [folder]
    if kind == "sglang-tokens":
        slots = files.slot_map(DENSE + LAYERS, EXPERTS, 32)
        per_file = -(-n // 8)
        paths = []
        for i in range(0, n, per_file):
            part = logical[i : i + per_file]
            passes = [
                {"n": len(r), "mode": 1, "lens": [len(r)], "id": (i, j)[1] + i}
                for j, r in enumerate(np.array_split(np.arange(len(part)), max(1, len(part) // 4000)))
            ]
            paths.append(files.sglang_per_token(folder / f"dump{i}.pt", part, DENSE, slots, passes))
        return "sglang", paths
    if kind == "sglang-http":
        path = folder / "answers.jsonl"
        with open(path, "w") as file:
            for rows in sequences:
                file.write(
                    json.dumps({"meta_info": {"routed_experts": files.sglang_base64(logical[rows], DENSE)}}) + "\n"
                )
        return "sglang", [path]
    if kind == "megatron":
        return "megatron", files.megatron(folder, logical, ranks=4, steps=max(1, n // 16_000), first_layer=DENSE)
    if kind == "esft":
        lengths = [len(rows) for rows in np.array_split(np.arange(n), max(1, n // 100))]
        return "esft", [files.esft(folder / "task", logical, lengths, first_layer=DENSE)]
    raise ValueError(f"unknown format {kind!r}")


def main(args: Args) -> None:
    tokens = args.entries // LAYERS
    logical = files.routing(tokens, LAYERS, TOP_K, EXPERTS)
    checksum = int(logical.sum(dtype=np.int64))
    rows = []
    for kind in args.formats:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "recording"
            folder.mkdir()
            engine, paths = write(kind, logical, folder)
            size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
            out = Path(name) / "trace.npz"
            done = subprocess.run(
                [sys.executable, "-c", CHILD, engine, str(out), *map(str, paths)],
                capture_output=True,
                text=True,
                check=True,
            )
            row = json.loads(done.stdout)
            assert (row.pop("tokens"), row.pop("sum")) == (tokens, checksum), (
                f"{kind}: the imported trace differs from the one written"
            )
            rows.append({"format": kind, "files_mb": size / 2**20, "trace_mb": out.stat().st_size / 2**20, **row})
        print(f"{kind}: {rows[-1]['s']:.1f} s", file=sys.stderr)
    print(f"\n{tokens * LAYERS:,} token-layer entries, top-{TOP_K} of {EXPERTS}\n")
    print("| format | files MB | read s | CPU s | read and save s | CPU s | peak memory MB | peak / result |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for r in rows:
        print(
            f"| {r['format']} | {r['files_mb']:.0f} | {r['read_s']:.1f} | {r['read_cpu_s']:.1f} | {r['s']:.1f} "
            f"| {r['cpu_s']:.1f} | {r['peak_mb']:.0f} | {r['peak_mb'] / r['result_mb']:.1f} × |"
        )
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "rows": rows,
            "measured": time.strftime("%F"),
            "own_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        args.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
