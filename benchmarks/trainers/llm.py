"""PPO on the small language model with and without the KL penalty: rewards, KL divergences and curves.

    python benchmarks/trainers/llm.py

All runs share one pre-trained model. Prints a table, writes a JSON file and a plot, and checks the requirements: for
every seed, a reward at least 0.08 above the reference at a KL within 20 % of the target; and a KL at least 3 times
larger without the penalty.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import tyro
from rich.console import Console
from rich.table import Table

from clustergym.training.logs import read_scalars

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = {"penalty": [], "no-penalty": ["--kl-coef", "0"]}
LEAST_GAIN, KL_TARGET, KL_TOLERANCE = 0.08, 6.0, 0.2


@dataclass
class Args:
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of PPO with the penalty. The first one also pre-trains the reference."""
    seeds_without: tuple[int, ...] = (1, 2, 3)
    """Seeds of PPO without the penalty."""
    reward: str = "vowels"
    """Reward to optimise."""
    total_timesteps: int = 245_760
    """Response tokens of PPO: 40 iterations."""
    pretrain_steps: int = 500
    """Pre-training updates."""
    output: Path = Path("runs/llm")
    """Folder for the runs, llm.json and llm.png. Finished runs in it are not repeated."""


def run(args: Args, variant: str, seed: int, reference: Path | None) -> dict[str, Any]:
    """Train in a subprocess. Returns the result line, the CPU seconds and the curves."""
    folder = args.output / f"{variant}-{seed}"
    kept = folder / "result.json"
    if kept.exists():
        return json.loads(kept.read_text())
    command = [sys.executable, str(ROOT / "cleanrl_ppo" / "ppo_llm.py"), "--run-dir", str(folder), "--resume"]
    command += ["--seed", str(seed), "--reward", args.reward, "--total-timesteps", str(args.total_timesteps)]
    command += ["--pretrain-steps", str(args.pretrain_steps), *VARIANTS[variant]]
    command += [] if reference is None else ["--reference", str(reference)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("result "))
    result["cpu_s"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    for tag in ("charts/episodic_return", "kl/k1"):
        result[tag] = read_scalars(folder, tag)[1]
    kept.write_text(json.dumps(result, indent=1) + "\n")
    return result


def gain(result: dict[str, Any]) -> float:
    return float(result["mean_return"] - result["reference_return"])


def show(results: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table(title="responses to held-out prompts")
    for column in ("run", "seed", "reward", "gain", "KL", "validation loss", "CPU s"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for variant, runs in results.items():
        for r in runs:
            table.add_row(
                variant, str(r["seed"]), f"{r['mean_return']:.3f} ± {r['mean_return_ci95']:.3f}", f"{gain(r):+.3f}",
                f"{r['kl']:.2f}", f"{r['validation_loss']:.3f}", f"{r['cpu_s']:.0f}",
            )  # fmt: skip
    return table


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for colour, (variant, runs) in zip(("tab:blue", "tab:red"), results.items(), strict=True):
        for i, r in enumerate(runs):
            label = {"penalty": "with the KL penalty", "no-penalty": "without"}[variant] if i == 0 else None
            iterations = range(1, len(r["kl/k1"]) + 1)
            left.plot(iterations, r["charts/episodic_return"], color=colour, alpha=0.8, label=label)
            right.plot(iterations, [max(kl, 0.1) for kl in r["kl/k1"]], color=colour, alpha=0.8, label=label)
    first = results["penalty"][0]
    left.axhline(first["reference_return"], color="black", linestyle=":", label="reference")
    right.axhline(KL_TARGET, color="black", linestyle=":", label="target")
    left.set(xlabel="iteration", ylabel="reward of a response", title=f"reward: {first['reward']}")
    right.set(xlabel="iteration", ylabel="nats per response", yscale="log", title="KL to the reference (k1)")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def requirements(results: dict[str, list[dict[str, Any]]]) -> list[tuple[str, bool]]:
    with_, without = results["penalty"], results["no-penalty"]
    kls, least = [r["kl"] for r in with_], min(map(gain, with_))
    ratio = min(r["kl"] for r in without) / max(kls)
    return [
        (f"smallest gain {least:+.3f}, required {LEAST_GAIN:+.2f}", least >= LEAST_GAIN),
        (
            f"KL {', '.join(f'{kl:.2f}' for kl in kls)}, required {KL_TARGET} within {KL_TOLERANCE:.0%}",
            all(abs(kl / KL_TARGET - 1) <= KL_TOLERANCE for kl in kls),
        ),
        (f"without the penalty at least {ratio:.1f} times the KL, required 3", ratio >= 3),
    ]


def main(args: Args) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    args.output.mkdir(parents=True, exist_ok=True)
    reference: Path | None = None
    results: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for variant in VARIANTS:
        for seed in args.seeds if variant == "penalty" else args.seeds_without:
            results[variant].append(run(args, variant, seed, reference))
            reference = args.output / f"penalty-{args.seeds[0]}" / "reference.pt"
    first = results["penalty"][0]
    console.print(show(results))
    console.print(
        f"reference: reward {first['reference_return']:.3f}, validation loss {first['reference_validation_loss']:.3f}"
    )
    console.print(f"(seed {args.seeds[0]} with the penalty includes the pre-training in its CPU seconds)")
    checks = requirements(results)
    for sentence, met in checks:
        console.print(f"{'met' if met else 'MISSED'}: {sentence}")
    plot(results, args.output / "llm.png")
    (args.output / "llm.json").write_text(json.dumps(results, indent=1) + "\n")
    if not all(met for _, met in checks):
        raise SystemExit(1)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
