"""Shared parts of the studies in this folder: arguments, traces, trainings and tables.

Every study writes one JSON file per item to ``--output`` and does not measure an item again, so a study can be
interrupted and started again. The traces of DeepSeek-V2-Lite and gpt-oss-20b are expected in CLUSTERGYM_DATA. Without
them a study uses the bundled trace.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from clustergym import TokenTrace
from clustergym.common.files import write_atomically
from clustergym.common.statistics import ci95
from clustergym.moe_placement import Simulator
from clustergym.moe_placement.profiles import DEFAULT_PROFILE, get_profile
from clustergym.moe_placement.streams import Traffic
from clustergym.planners.base import Planner
from clustergym.planners.eplb import EPLB
from clustergym.planners.evaluation import Protocol, evaluate_planner
from clustergym.planners.policy.export import PolicySettings, load_policy, read_policy
from clustergym.planners.policy.network import PolicyNetwork
from clustergym.planners.policy.planner import Policy
from clustergym.planners.registry import make_planner
from clustergym.traces import load_traces
from clustergym.traces.splits import split_trace

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
from public_data import find_data  # noqa: E402

TRAINER = ROOT / "cleanrl_ppo" / "ppo_moe_marl.py"
BUNDLED = ["synthetic"]
TRACE_FILES = {"deepseek-v2-lite": "moe/deepseek_v2_lite_*.npz", "gpt-oss-20b": "moe/gpt_oss_20b_decode.npz"}
EPLBS = ("eplb-once", "eplb", "eplb-hierarchical", "eplb-ema")
STAGES = ("untrained", "supervised", "policy")
CONSOLE = Console(width=140)


@dataclass
class Args:
    """Arguments of every study."""

    output: Path = Path("runs/moe_marl")
    """Folder of trainings, measurements and plots. What is there is not measured again."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Training seeds."""
    streams: int = 20
    """Held-out streams."""
    intervals: int = 4
    """Intervals per stream."""
    profile: str = DEFAULT_PROFILE
    """Engine profile."""
    layers: int = 4
    """Number of evenly spaced layers to evaluate on."""
    clusters: tuple[str, ...] = ("h800-4x4", "h800-2x8", "h800-4x8")
    """Clusters to evaluate on. Training uses the first."""
    models: tuple[str, ...] = tuple(TRACE_FILES)
    """Models to evaluate on. Training uses the first."""
    trainer_flags: str = ""
    """More arguments of the trainer, as in --trainer-flags="--layers 2 --tokens-per-rank 32"."""

    def protocol(self, **changes: Any) -> Protocol:
        """Held-out streams with drift."""
        traffic = Traffic(get_profile(self.profile).phase, schedule="drift", allow_reuse=True)
        return replace(Protocol(traffic, self.intervals, self.streams), **changes)

    def simulator(self, model: str, cluster: str, passes_per_interval: int = 1000) -> Simulator:
        return Simulator(model_of(self, model), cluster, self.profile, passes_per_interval)


def run(main: Callable[[Any], None], args_class: type[Args], description: str | None) -> None:
    """Run a study with the arguments of the command line."""
    torch.set_num_threads(1)
    args = tyro.cli(args_class, description=description)
    args.output.mkdir(parents=True, exist_ok=True)
    main(args)


def cached(path: Path, measure: Callable[[], Any]) -> Any:
    """The content of a JSON file, or the result of ``measure``, which is then written to it."""
    if path.exists():
        return json.loads(path.read_text())
    value = measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(value, indent=1) + "\n")
    return value


def interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{np.mean(values):.3f}"
    return f"{np.mean(values):.3f} ± {ci95(list(values)):.3f}"


# Traces


def sources(args: Args, model: str) -> list[str]:
    """Trace files of a model, or the bundled trace."""
    return [str(path) for path in find_data(TRACE_FILES[model])] or BUNDLED


def model_of(args: Args, model: str) -> str:
    """The model of the trace that is used for ``model``."""
    return "deepseek-v2-lite" if sources(args, model) == BUNDLED else model


def evenly_spaced(trace: TokenTrace, layers: int) -> TokenTrace:
    picked = np.unique(np.linspace(0, trace.n_layers - 1, min(layers, trace.n_layers)).round().astype(int))
    return trace.select(layers=picked.tolist())


def halves(args: Args, model: str, layers: int) -> tuple[TokenTrace, TokenTrace]:
    """(training part, held-out part) of a model's traces, split as the trainer splits them."""
    trace = evenly_spaced(load_traces(sources(args, model)), layers)
    return split_trace(trace, "train"), split_trace(trace, "test")


# Trainings


def train_one(
    args: Args, folder: Path, seed: int, timesteps: int, flags: Sequence[str] = (), traces: Sequence[str] = ()
) -> Path:
    """Train one policy and return the run folder. An interrupted training is resumed."""
    if not (folder / "policy.pt").exists():
        model = args.models[0]
        command = [
            sys.executable, str(TRAINER), "--trace", *(traces or sources(args, model)), "--model",
            model_of(args, model), "--cluster", args.clusters[0], "--profile", args.profile, "--seed", str(seed),
            "--total-timesteps", str(timesteps), "--run-dir", str(folder), "--eval-streams", "0",
            *shlex.split(args.trainer_flags), *flags, "--resume",
        ]  # fmt: skip
        CONSOLE.print(" ".join(command), highlight=False, soft_wrap=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def seed_folder(args: Args, seed: int) -> Path:
    return args.output / "train" / f"seed-{seed}"


def load_trainer() -> Any:
    sys.path.insert(0, str(TRAINER.parent))
    import ppo_moe_marl

    return ppo_moe_marl


def new_agent(seed: int = 1, network: dict[str, Any] | None = None) -> Any:
    """The trainer's networks before training, with the options of a policy file."""
    marl = load_trainer()
    args = marl.Args()
    if network is not None:
        changed = {
            "mlp-encoder": network["encoder"] == "mlp",
            "simultaneous": network["simultaneous"],
            "no-lookahead": not network["lookahead"],
            "two-critics": not network["centralised"],
            "separate-critic": network["separate_critic"],
        }
        args.network.hidden = network["hidden"]
        args.ablation.ablate = tuple(name for name, is_changed in changed.items() if is_changed)
        assert marl.network_options(args) == network
    torch.manual_seed(seed)
    return marl.Agent(args)


def stage_policy(folder: Path, seed: int, stage: str) -> tuple[PolicyNetwork, PolicySettings]:
    """The policy of a training: ``untrained``, ``supervised`` (after that phase) or ``policy`` (at the end)."""
    network, settings = load_policy(folder if stage == "policy" else folder / "supervised")
    if stage == "untrained":
        options = read_policy(folder / "supervised")["network"]
        network = PolicyNetwork.from_state(options, new_agent(seed, options).state_dict())
    return network, settings


# Measurements


def measure(make: Callable[[], Planner], name: str, trace: TokenTrace, protocol: Protocol) -> dict[str, Any]:
    result = evaluate_planner(make(), name, trace, trace, protocol)
    keys = ("total_us", "served_us", "migration_us", "moves", "decision_ms")
    return {key: getattr(result, key) for key in keys} | {"streams": result.stream_totals_us}


def measure_all(
    folder: Path, planners: dict[str, Callable[[], Planner]], trace: TokenTrace, protocol: Protocol
) -> dict[str, Any]:
    """Measurements of planners by name, from the files in ``folder`` if they exist."""
    return {
        name: cached(folder / f"{file_name(name)}.json", partial(measure, make, name, trace, protocol))
        for name, make in planners.items()
    }


def file_name(name: str) -> str:
    """ "<stage> <seed>" → "<stage>-<seed>"."""
    return re.sub(r" (\d+)$", r"-\1", name)


SIMULATED: dict[str, Any] = {"estimate": False}
"""Options of the policy planner with which it works as in training."""


def stage_planners(
    simulator: Simulator, folder: Path, seed: int, stages: Iterable[str] = STAGES, candidates: int = 1
) -> dict[str, Callable[[], Planner]]:
    """The stages of one training as planners, named "<stage> <seed>". They simulate operations on ``candidates``."""

    def planner(stage: str) -> Planner:
        return Policy(simulator, policy=stage_policy(folder, seed, stage), candidates=candidates, **SIMULATED)

    return {f"{stage} {seed}": partial(planner, stage) for stage in stages}


def baselines(args: Args, simulator: Simulator, train: TokenTrace, folder: Path) -> dict[str, Callable[[], Planner]]:
    """The planners that the policy is compared with, EPLB with tuned options included."""
    names = (*EPLBS, "static", "bottleneck-8", "anneal")
    planners: dict[str, Callable[[], Planner]] = {name: partial(make_planner, name, simulator) for name in names}
    tuned = tuned_eplb(args, simulator, train, folder)
    planners["eplb-tuned"] = partial(EPLB, simulator, ema=tuned["ema"], threshold=tuned["threshold"])
    options = {"operations": 16, "norm": 16}
    planners["bottleneck-8, 16 ops, 16-norm"] = partial(make_planner, "bottleneck-8", simulator, **options)
    return planners


def tuned_eplb(args: Args, simulator: Simulator, train: TokenTrace, folder: Path) -> dict[str, Any]:
    """The moving average and threshold of EPLB with the lowest total on streams of the TRAINING part."""
    tuning = args.protocol(streams=4, seed=5000)

    def search() -> dict[str, Any]:
        totals = {}
        for ema in (0.25, 0.5, 1.0):
            for threshold in (1.1, 1.2, 1.3, 1.5, 2.0):
                planner = EPLB(simulator, ema=ema, threshold=threshold)
                totals[f"{ema} {threshold}"] = evaluate_planner(planner, "eplb", train, train, tuning).total_us
        ema, threshold = min(totals, key=totals.__getitem__).split()
        return {"ema": float(ema), "threshold": float(threshold), "totals": totals}

    return cached(folder / "tuning.json", search)


def comparison_table(found: dict[str, Any], title: str) -> Table:
    """Ratios to the best EPLB and differences between stages, with intervals over streams and over training seeds.

    Items named "<stage> <seed>" are stages of a training; all others are planners without training.
    """
    trained = {name for name in found if name.rpartition(" ")[2].isdigit()}
    eplbs = [name for name in found if name.startswith("eplb")]
    best = min(eplbs, key=lambda name: found[name]["total_us"])
    streams = {name: np.array(item["streams"]) for name, item in found.items()}
    table = Table(
        "planner", "total µs", "÷ best EPLB (streams)", "÷ best EPLB (seeds)", "÷ EPLB every interval", "migration",
        "moves", "ms", title=f"{title}; best EPLB: {best}",
        caption="means, ± half width of the 95 % interval over streams or training seeds",
    )  # fmt: skip

    def add_row(label: str, names: list[str], over_seeds: bool) -> None:
        totals = np.array([streams[name] for name in names])
        extra = [np.mean([found[name][key] for name in names]) for key in ("migration_us", "moves", "decision_ms")]
        table.add_row(
            label, f"{totals.mean():.1f}", interval(totals.mean(0) / streams[best]),
            interval((totals / streams[best]).mean(1)) if over_seeds else "",
            interval(totals.mean(0) / streams["eplb"]), *(f"{value:.1f}" for value in extra),
        )  # fmt: skip

    for name in sorted(found.keys() - trained, key=lambda name: -found[name]["total_us"]):
        add_row(name, [name], over_seeds=False)
    by_stage: dict[str, list[str]] = {}
    for name in found:
        if name in trained:
            by_stage.setdefault(name.split()[0], []).append(name)
    for stage, names in by_stage.items():
        add_row(f"{stage} ({len(names)} seeds)", names, over_seeds=True)
    if "policy" in by_stage:
        others = {stage: by_stage[stage] for stage in ("supervised", "untrained")}
        others |= {name: [name] for name in found if name.startswith("bottleneck")}
        policy = np.array([streams[name] for name in by_stage["policy"]])
        for label, names in others.items():
            gain = (np.array([streams[name] for name in names]) - policy) / streams[best]
            table.add_row(f"{label} − policy", "", interval(gain.mean(0)), interval(gain.mean(1)), "", "", "", "")
    return table
