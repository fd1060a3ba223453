"""Plans for a model of DeepSeek-V3's size: planning time of EPLB and annealing, and serving time on held-out traffic.

    python benchmarks/plan.py                 # 58 layers, 256 experts, 32 GPUs, 288 slots; annealing for 30 s
    python benchmarks/plan.py --seconds 10

The trace is synthetic, because no trace of DeepSeek-V3 is public: the planning times are realistic, the gains less so.
Runs ``clustergym plan`` for every engine and reads the plans back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from clustergym.moe_placement.engines import ENGINES, read_plan
from clustergym.traces import SyntheticConfig, synthetic_trace


@dataclass
class Args:
    seconds: float = 30.0
    """Time budget of annealing, in seconds."""
    tokens: int = 24_000
    """Number of tokens in the trace."""
    json: Path | None = None
    """Write the results to this JSON file."""


def main(args: Args) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = SyntheticConfig(
            n_tokens=args.tokens, n_layers=58, first_layer=3, n_experts=256, top_k=8, model="deepseek-v3"
        )
        synthetic_trace(config, seed=0).save(folder / "v3.npz")
        for planner, engine in [("eplb", engine) for engine in ENGINES] + [("anneal", "sglang")]:
            plan, results = folder / f"plan{ENGINES[engine].suffixes[0]}", folder / "results.json"
            words = [
                "plan", str(folder / "v3.npz"), "--cluster", "h800-4x8", "--slots", "9", "--planner", planner,
                "--engine", engine, "--seconds", str(args.seconds), "-o", str(plan), "--json", str(results),
            ]  # fmt: skip
            began = time.perf_counter()
            code = "import sys; from clustergym.cli import main; sys.exit(main(sys.argv[1:]))"
            subprocess.run([sys.executable, "-c", code, *words], check=True, stdout=subprocess.DEVNULL)
            taken = time.perf_counter() - began
            layers = read_plan(plan, engine)
            assert all(len(row) == 288 and set(row) == set(range(256)) for row in layers.values())
            document = json.loads(results.read_text())
            chosen = next(p for p in document["planners"] if p["planner"] == planner)
            rows.append(
                {
                    "planner": planner, "engine": engine, "decision_s": chosen["decision_s"], "command_s": taken,
                    "served_us": chosen["served_us"], "versus_static": document["versus"]["static"],
                    "versus_eplb": document["versus"]["eplb"], "filled_slots": chosen["filled_slots"],
                }
            )  # fmt: skip
    print("| planner | engine | decision s | whole command s | µs per layer, held out | vs EPLB | slots filled |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for r in rows:
        versus = f"{100 * r['versus_eplb']['mean']:+.1f} ± {100 * r['versus_eplb']['ci95']:.1f} %"
        print(
            f"| {r['planner']} | {r['engine']} | {r['decision_s']:.3f} | {r['command_s']:.1f} | {r['served_us']:.1f} "
            f"| {versus} | {r['filled_slots']} |"
        )
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
