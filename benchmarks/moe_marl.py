"""The evidence behind docs/ppo_moe_marl.md: studies of the placement policy, each of which can be stopped and taken up again.

    python benchmarks/moe_marl.py train --seeds 1 2 3 4 5     # five trainings (about 5 minutes of one core each)
    python benchmarks/moe_marl.py curves                      # what those five saved while they learned
    python benchmarks/moe_marl.py holdout                     # held-out streams, two models, 4×4, 2×8 and 4×8, every seed
    python benchmarks/moe_marl.py limit --clusters h800-2x8   # how far search gets with ten times the steps
    python benchmarks/moe_marl.py guided                      # policy-guided search beside annealing at equal time
    python benchmarks/moe_marl.py decision                    # time of a decision (on an idle machine)
    python benchmarks/moe_marl.py domains                     # trained on one domain, serving another
    python benchmarks/moe_marl.py ablations                   # one table
    python benchmarks/moe_marl.py throughput                  # beside one environment a process, numpy in and out
    python benchmarks/moe_marl.py growth                      # cost against experts, GPUs, tokens, environments

Whatever a study has measured lies in ``--output`` as one JSON file an item and is not measured again. Traces of DeepSeek-V2-Lite and
gpt-oss-20b are looked for in ``--data``; without them the bundled trace stands in, and the tables say so.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from clustergym import SyntheticConfig, TokenTrace, synthetic_trace
from clustergym.common.statistics import ci95
from clustergym.moe_placement import ModelSpec, PlacementBatch, PlacementConfig, Simulator
from clustergym.moe_placement.evaluation import Protocol, evaluate_planner
from clustergym.moe_placement.planner_registry import make_planner
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.planners.eplb import EPLB
from clustergym.moe_placement.planners.search import Anneal
from clustergym.moe_placement.policy.export import PolicySettings, load_policy, read_policy
from clustergym.moe_placement.policy.network import PolicyNetwork
from clustergym.moe_placement.policy.planner import Policy, PolicyGuided
from clustergym.moe_placement.policy.view import LAYER_KEYS, STEP_KEYS, PolicyView
from clustergym.moe_placement.specs import MODELS
from clustergym.training import read_scalars

ROOT = Path(__file__).resolve().parents[1]
TRAINER = ROOT / "cleanrl_ppo" / "ppo_moe_marl.py"
EPLBS = ("eplb-once", "eplb", "eplb-hierarchical", "eplb-ema")
THRESHOLDS = [(ema, threshold) for ema in (0.25, 0.5, 1.0) for threshold in (1.1, 1.2, 1.3, 1.5, 2.0)]
CLUSTERS = ("h800-4x4", "h800-2x8", "h800-4x8")
STAGES = ("untrained", "supervised", "policy")
ABLATIONS: dict[str, list[str]] = {
    "as it is": [],
    "MLP encoder": ["--encoder", "mlp"],
    "two rounds of messages": ["--graph-layers", "2"],
    "simultaneous choice": ["--simultaneous"],
    "reward on the observed window": ["--reward-window", "observed"],
    "decentralised critics": ["--no-centralised"],
    "no look-ahead": ["--no-lookahead"],
    "true time in look-ahead": ["--lookahead-norm", "0"],
    "16-norm in look-ahead": ["--lookahead-norm", "16"],
    "16-norm in look-ahead and reward": ["--lookahead-norm", "16", "--reward-norm", "16"],
    "homes as served": ["--homes", "served"],
    "no supervised phase": ["--pretrain-states", "0"],
    "stream credit": ["--credit", "stream"],
    "horizon 1": ["--horizon", "1"],
    "windows of 512": ["--window-tokens", "512"],
    "windows of 8192": ["--window-tokens", "8192"],
    "1000 passes a window": ["--passes-per-window", "1000"],
}


@dataclass
class Args:
    studies: tyro.conf.Positional[
        tuple[
            Literal[
                "train",
                "curves",
                "holdout",
                "limit",
                "guided",
                "decision",
                "domains",
                "ablations",
                "throughput",
                "growth",
            ],
            ...,
        ]
    ] = ("train", "holdout", "guided")
    """Which to run, in this order."""
    data: Path = ROOT.parent / "shared" / "data" / "moe"
    """Folder with deepseek_v2_lite_*.npz and gpt_oss_20b_decode.npz."""
    output: Path = Path("runs/moe_marl")
    """Trainings, figures and plots; what is there is not done again."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Training seeds."""
    timesteps: int = 614_400
    """Operations of each training."""
    streams: int = 20
    """Held-out streams."""
    windows: int = 7
    """Windows of each stream."""
    layers: int = 4
    """Evenly spaced layers that streams are evaluated on."""
    clusters: tuple[str, ...] = CLUSTERS
    """Clusters to evaluate on; training is on the first."""
    models: tuple[str, ...] = ("deepseek-v2-lite", "gpt-oss-20b")
    """Models to evaluate on; training is on the first."""
    operations: tuple[int, ...] = ()
    """Further numbers of operations a layer to try the trained policy with in the study of held-out streams."""
    with_guided: bool = False
    """Also try guided search with its default steps in the study of held-out streams."""
    trainer_flags: tuple[str, ...] = ()
    """Further arguments of the trainer."""
    domain_timesteps: int = 204_800
    """Operations of each training on one domain."""
    ablation_timesteps: int = 65_536
    """Operations of each ablation."""
    ablation_seeds: tuple[int, ...] = (1, 2)
    """Seeds of each ablation."""
    ablation_streams: int = 5
    """Held-out streams of each ablation."""
    threads: int = os.cpu_count() or 1
    """Torch threads of both updates in the study of throughput."""
    budgets_ms: tuple[float, ...] = (3.0, 10.0, 30.0)
    """Time a layer in the study of guided search."""
    console: tyro.conf.Suppress[Console] = field(default_factory=lambda: Console(width=140))


# Common


def cached(path: Path, make: Callable[[], Any]) -> Any:
    """What the file holds, or what ``make`` returns, written to it whole."""
    if path.exists():
        return json.loads(path.read_text())
    value = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.replace(path)
    return value


def sources(args: Args, model: str) -> list[str]:
    """Trace files of a model, or the bundled trace in their place."""
    pattern = {"deepseek-v2-lite": "deepseek_v2_lite_*.npz", "gpt-oss-20b": "gpt_oss_20b_decode.npz"}[model]
    return [str(path) for path in sorted(args.data.glob(pattern))] or ["synthetic"]


def halves(args: Args, model: str, layers: int) -> tuple[TokenTrace, TokenTrace]:
    """(training part, held-out part) of a model's traces, split by sequence exactly as the trainer splits them."""
    traces = [TokenTrace.load(path) for path in sources(args, model)]
    whole = traces[0] if len(traces) == 1 else TokenTrace.concat(traces, [trace.name for trace in traces])
    train, test = whole.split(0.5, seed=0)
    return evenly_spaced(train, layers), evenly_spaced(test, layers)


def evenly_spaced(trace: TokenTrace, layers: int) -> TokenTrace:
    picked = np.unique(np.linspace(0, trace.n_layers - 1, min(layers, trace.n_layers)).round().astype(int))
    return trace.select(layers=picked.tolist())


def model_of(args: Args, model: str) -> str:
    return "deepseek-v2-lite" if sources(args, model) == ["synthetic"] else model


def trainer_command(
    args: Args, folder: Path, seed: int, timesteps: int, flags: Sequence[str], traces: Sequence[str]
) -> list[str]:
    model = args.models[0]
    return [
        sys.executable, str(TRAINER), "--trace", *(traces or sources(args, model)), "--model", model_of(args, model), "--cluster", args.clusters[0],
        "--seed", str(seed), "--total-timesteps", str(timesteps), "--run-dir", str(folder), "--eval-streams", "0", *flags,
    ]  # fmt: skip


def train_one(
    args: Args, folder: Path, seed: int, timesteps: int, flags: Sequence[str] = (), traces: Sequence[str] = ()
) -> Path:
    """The run's folder; a training that was cut short goes on where it stopped."""
    if not (folder / "policy.pt").exists():
        command = trainer_command(args, folder, seed, timesteps, flags, traces)
        args.console.print(" ".join(command), highlight=False, soft_wrap=True)
        subprocess.run([*command, "--resume"], check=True, stdout=subprocess.DEVNULL)
    return folder


def seed_folder(args: Args, seed: int) -> Path:
    return args.output / "train" / f"seed-{seed}"


def stage_policy(folder: Path, seed: int, stage: str) -> tuple[PolicyNetwork, PolicySettings]:
    """The network of a training before, between and after its two phases."""
    network, settings = load_policy(folder if stage == "policy" else folder / "supervised")
    if stage == "untrained":
        options = read_policy(folder)["network"]
        network = PolicyNetwork.from_state(options, new_agent(seed, **options).state_dict())
    return network, settings


def new_agent(seed: int = 1, **options: Any) -> Any:
    """The trainer's networks before training."""
    marl = load_trainer()
    args = marl.Args()
    for name, value in options.items():
        setattr(args.network if name in vars(args.network) else args.ablation, name, value)
    torch.manual_seed(seed)
    return marl.Agent(args)


def stage_planner(args: Args, simulator: Simulator, seed: int, stage: str) -> Policy:
    """``policy@32`` is the trained policy with 32 operations a layer, ``guided`` the search that it guides."""
    if stage == "guided":
        return PolicyGuided(simulator, policy=stage_policy(seed_folder(args, seed), seed, "policy"))
    stage, _, operations = stage.partition("@")
    return Policy(
        simulator,
        policy=stage_policy(seed_folder(args, seed), seed, stage),
        operations=int(operations) if operations else None,
    )


def figures(make: Callable[[], Planner], name: str, trace: TokenTrace, protocol: Protocol) -> dict[str, Any]:
    result = evaluate_planner(make(), name, trace, trace, protocol)
    return {key: getattr(result, key) for key in ("total_us", "served_us", "migration_us", "moves", "decision_ms")} | {
        "streams": result.stream_totals_us
    }


def interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{np.mean(values):.3f}"
    return f"{np.mean(values):.3f} ± {ci95(list(values)):.3f}"


# Studies


def train(args: Args) -> None:
    for seed in args.seeds:
        train_one(args, seed_folder(args, seed), seed, args.timesteps, args.trainer_flags)


def curves(args: Args) -> None:
    """Learning curves of the trainings: the reward of finished episodes, and the validation streams since the supervised phase."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    colours = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377")
    for axis, tag, title in (
        (axes[0], "charts/episodic_saved", "training episodes: share of the static time saved, %"),
        (axes[1], "validation/saved_vs_eplb", "validation streams: more saved than after the supervised phase, points"),
    ):
        found = [read_scalars(seed_folder(args, seed), tag) for seed in args.seeds]
        steps = np.array(found[0][0])
        values = np.array([each[1] for each in found])
        values = 100 * values if axis is axes[0] else values - values[:, :1]
        # Single rollouts and single looks are noisy: means of the last ten.
        smooth = np.array([[row[max(0, i - 9) : i + 1].mean() for i in range(len(row))] for row in values])
        for row, colour, seed in zip(smooth, colours, args.seeds, strict=False):
            axis.plot(steps / 1000, row, lw=1, color=colour, label=f"seed {seed}")
        axis.plot(steps / 1000, smooth.mean(0), lw=2.2, color="black", label="mean")
        axis.set(xlabel="thousand operations", title=title)
        axis.title.set_fontsize(10)
    axes[1].axhline(0, color="#BBBBBB", lw=1)
    axes[0].legend(fontsize=8)
    figure.savefig(args.output / "curves.png", dpi=110)
    plt.close(figure)
    args.console.print(f"plot: {args.output / 'curves.png'}")


def tuned_eplb(args: Args, simulator: Simulator, train: TokenTrace, folder: Path) -> dict[str, Any]:
    """The moving average and threshold with the least total on streams of the TRAINING part."""
    tuning = Protocol("drift", args.windows, 2048, streams=4, seed=5000)

    def search() -> dict[str, Any]:
        totals = {
            f"{ema} {threshold}": evaluate_planner(
                EPLB(simulator, ema=ema, threshold=threshold), "eplb", train, train, tuning
            ).total_us
            for ema, threshold in THRESHOLDS
        }
        ema, threshold = min(totals, key=totals.__getitem__).split()
        return {"ema": float(ema), "threshold": float(threshold), "totals": totals}

    return cached(folder / "tuning.json", search)


def rules_for(simulator: Simulator, tuned: dict[str, Any]) -> dict[str, Callable[[], Planner]]:
    """What the policy is held against."""
    rules: dict[str, Callable[[], Planner]] = {
        name: partial(make_planner, name, simulator) for name in (*EPLBS, "static", "bottleneck-8", "anneal")
    }
    rules["eplb-tuned"] = partial(EPLB, simulator, ema=tuned["ema"], threshold=tuned["threshold"])
    rules["bottleneck-8, 16 ops, 16-norm"] = partial(make_planner, "bottleneck-8", simulator, operations=16, norm=16)
    return rules


def holdout(args: Args) -> None:
    """Every seed's policy, its supervised and untrained self, and the rules, on the same held-out streams."""
    for model in args.models:
        train_part, test = halves(args, model, args.layers)
        for cluster in args.clusters:
            simulator = Simulator(model_of(args, model), cluster)
            folder = args.output / "holdout" / f"{model}-{cluster}"
            protocol = Protocol("drift", args.windows, 2048, streams=args.streams, seed=0)
            tuned = tuned_eplb(args, simulator, train_part, folder)
            found = {
                name: cached(folder / f"{name}.json", partial(figures, make, name, test, protocol))
                for name, make in rules_for(simulator, tuned).items()
            }
            for seed in args.seeds:
                if not (seed_folder(args, seed) / "policy.pt").exists():
                    continue
                further = [f"policy@{operations}" for operations in args.operations] + ["guided"] * args.with_guided
                for stage in (*STAGES, *further):
                    make = partial(stage_planner, args, simulator, seed, stage)
                    found[f"{stage} {seed}"] = cached(
                        folder / f"{stage}-{seed}.json", partial(figures, make, stage, test, protocol)
                    )
            args.console.print(holdout_table(found, f"{model} on {cluster}, {args.streams} held-out streams"))


def limit(args: Args) -> None:
    """What is to be had on a cluster: annealing as ``anneal-even`` with its steps, and with ten times as many."""
    table = Table("model", "cluster", "planner", "total µs", "÷ best EPLB (streams)", title="how far search alone gets")
    for model in args.models:
        _, test = halves(args, model, args.layers)
        for cluster in args.clusters:
            simulator = Simulator(model_of(args, model), cluster)
            protocol = Protocol("drift", args.windows, 2048, streams=args.streams, seed=0)
            folder = args.output / "holdout" / f"{model}-{cluster}"
            eplbs = [json.loads(path.read_text()) for path in sorted(folder.glob("eplb*.json"))]
            if not eplbs:
                raise SystemExit(f"no figures of EPLB in {folder}: run the study holdout first")
            best = np.array(min(eplbs, key=lambda each: each["total_us"])["streams"])
            for name, iterations in (("anneal-even", 6000), ("anneal-even, 60,000 steps", 60_000)):
                make = partial(make_planner, "anneal-even", simulator, iterations=iterations)
                streams = np.array(
                    cached(
                        args.output / "limit" / f"{model}-{cluster}-{iterations}.json",
                        partial(figures, make, name, test, protocol),
                    )["streams"]
                )
                table.add_row(model, cluster, name, f"{streams.mean():.1f}", interval(streams / best))
    args.console.print(table)


def stage_streams(found: dict[str, Any], stage: str) -> np.ndarray:
    """(seeds, streams) totals of a stage."""
    return np.array([each["streams"] for name, each in found.items() if name.split()[0] == stage and name != stage])


def holdout_table(found: dict[str, Any], title: str) -> Table:
    """Ratios to the best EPLB and differences between stages, with intervals over streams and over seeds."""
    eplbs = {name: each for name, each in found.items() if name.startswith("eplb")}
    best = min(eplbs, key=lambda name: eplbs[name]["total_us"])
    best_streams, every = np.array(found[best]["streams"]), np.array(found["eplb"]["streams"])
    table = Table(
        "planner", "total µs", "÷ best EPLB (streams)", "÷ best EPLB (seeds)", "÷ EPLB every window", "migration", "moves", "ms",
        title=f"{title}; best EPLB: {best}", caption="means, ± half width of the 95 % interval over streams or training seeds",
    )  # fmt: skip
    for name, each in sorted(found.items(), key=lambda item: -item[1]["total_us"]):
        if name.split("@")[0].split()[0] in (*STAGES, "guided"):
            continue
        streams = np.array(each["streams"])
        table.add_row(
            name, f"{streams.mean():.1f}", interval(streams / best_streams), "", interval(streams / every),
            f"{each['migration_us']:.1f}", f"{each['moves']:.1f}", f"{each['decision_ms']:.1f}",
        )  # fmt: skip
    stages = dict.fromkeys(name.split()[0] for name in found if name.split("@")[0].split()[0] in (*STAGES, "guided"))
    ours = {stage: stage_streams(found, stage) for stage in stages}
    for stage, totals in ours.items():
        if not len(totals):
            continue
        about = [each for name, each in found.items() if name.split()[0] == stage]
        table.add_row(
            f"{stage} ({len(totals)} seeds)", f"{totals.mean():.1f}", interval(totals.mean(0) / best_streams),
            interval((totals / best_streams).mean(1)), interval(totals.mean(0) / every),
            f"{np.mean([a['migration_us'] for a in about]):.1f}", f"{np.mean([a['moves'] for a in about]):.1f}",
            f"{np.mean([a['decision_ms'] for a in about]):.1f}",
        )  # fmt: skip
    if len(ours.get("policy", ())):
        policy = ours["policy"]
        others = {"supervised": ours["supervised"], "untrained": ours["untrained"]} | {
            name: np.array(found[name]["streams"])[None] for name in found if name.startswith("bottleneck")
        }
        for name, totals in others.items():
            gain = (totals - policy) / best_streams
            table.add_row(f"{name} − policy", "", interval(gain.mean(0)), interval(gain.mean(1)), "", "", "", "")
    return table


def guided(args: Args) -> None:
    """Equal time a layer: plain annealing, annealing on the policy's objective, the policy as its guide; swap-greedy at its own."""
    for model in args.models:
        _, test = halves(args, model, args.layers)
        simulator = Simulator(model_of(args, model), args.clusters[0])
        protocol = Protocol("drift", args.windows, 2048, streams=args.streams, seed=0)
        folder = args.output / "guided" / model
        policy = stage_policy(seed_folder(args, args.seeds[0]), args.seeds[0], "policy")
        table = Table(
            "planner", "budget ms", "total µs", "÷ anneal (streams)", "spent ms", title=f"{model}, equal time"
        )
        for budget in args.budgets_ms:
            seconds = budget / 1000 * test.n_layers
            planners: dict[str, Callable[[], Planner]] = {
                "anneal": partial(Anneal, simulator, seconds=seconds),
                "anneal-even": partial(make_planner, "anneal-even", simulator, seconds=seconds),
                "policy-guided": partial(PolicyGuided, simulator, policy=policy, seconds=seconds),
            }
            found = {
                name: cached(folder / f"{name}-{budget}.json", partial(figures, make, name, test, protocol))
                for name, make in planners.items()
            }
            plain = np.array(found["anneal"]["streams"])
            for name, each in found.items():
                streams = np.array(each["streams"])
                table.add_row(
                    name,
                    f"{budget:g}",
                    f"{streams.mean():.1f}",
                    interval(streams / plain),
                    f"{each['decision_ms']:.1f}",
                )
        few = Protocol("drift", args.windows, 2048, streams=min(4, args.streams), seed=0)
        for norm in (0, 16):
            make = partial(make_planner, "swap-greedy", simulator, norm=norm)
            each = cached(folder / f"swap-greedy-{norm}.json", partial(figures, make, "swap-greedy", test, few))
            name = f"swap-greedy, norm {norm}, {len(each['streams'])} streams"
            table.add_row(name, "", f"{each['total_us']:.1f}", "", f"{each['decision_ms']:.1f}")
        args.console.print(table)


def decision(args: Args) -> None:
    """Milliseconds a layer, all layers of the model at once. Run it on an idle machine."""
    model = args.models[0]
    _, test = halves(args, model, 26)
    simulator = Simulator(model_of(args, model), args.clusters[0])
    protocol = Protocol("drift", 4, 2048, streams=1, seed=0)
    policy = stage_policy(seed_folder(args, args.seeds[0]), args.seeds[0], "policy")
    table = Table("planner", "ms a layer", title=f"decision time, {test.n_layers} layers of {model}")
    planners: dict[str, Callable[[], Planner]] = {
        "policy": lambda: Policy(simulator, policy=policy),
        "anneal": lambda: Anneal(simulator),
        "swap-greedy": lambda: make_planner("swap-greedy", simulator),
    }
    for name, make in planners.items():

        def measure(name: str = name, make: Callable[[], Planner] = make) -> float:
            planner = make()
            evaluate_planner(planner, name, test, test, Protocol("drift", 1, 2048))  # compiled, and its tables made
            return evaluate_planner(planner, name, test, test, protocol).decision_ms

        table.add_row(name, f"{cached(args.output / 'decision' / f'{name}.json', measure):.2f}")
    args.console.print(table)


def domains(args: Args) -> None:
    """Train on one domain of the first model and serve another: no sequence and no topic in common."""
    model, cluster = args.models[0], args.clusters[0]
    files = sources(args, model)
    if len(files) < 2:
        raise SystemExit(f"{model}: expected a trace of each of two domains in {args.data}, found {len(files)}")
    parts = [TokenTrace.load(path) for path in files[:2]]
    train_part, test = evenly_spaced(parts[0].split(0.5, seed=0)[0], args.layers), evenly_spaced(parts[1], args.layers)
    simulator = Simulator(model_of(args, model), cluster)
    protocol = Protocol("drift", args.windows, 2048, streams=args.streams, seed=0)
    folder = args.output / "domains"
    tuned = tuned_eplb(args, simulator, train_part, folder)
    found = {
        name: cached(folder / f"{name}.json", partial(figures, make, name, test, protocol))
        for name, make in rules_for(simulator, tuned).items()
    }
    for seed in args.seeds:
        run = train_one(args, folder / f"seed-{seed}", seed, args.domain_timesteps, args.trainer_flags, files[:1])
        for stage in STAGES:
            make = partial(Policy, simulator, policy=stage_policy(run, seed, stage))
            found[f"{stage} {seed}"] = cached(
                folder / f"{stage}-{seed}.json", partial(figures, make, stage, test, protocol)
            )
    title = f"trained on {Path(files[0]).stem}, serving {Path(files[1]).stem} on {cluster}, {args.streams} streams"
    args.console.print(holdout_table(found, title))


def ablations(args: Args) -> None:
    """Each variant trained and evaluated on its own terms: window size and passes are those of the variant."""
    model = args.models[0]
    table = Table(
        "variant",
        "seeds",
        "policy ÷ best EPLB",
        "supervised ÷ best EPLB",
        title=f"ablations, {model}, {args.clusters[0]}",
    )
    _, test = halves(args, model, args.layers)
    for name, flags in ABLATIONS.items():
        folder = args.output / "ablations" / name.replace(" ", "-")
        given = dict(zip(flags[::2], flags[1::2], strict=False))
        tokens, passes = int(given.get("--window-tokens", 2048)), int(given.get("--passes-per-window", 100))
        simulator = Simulator(model_of(args, model), args.clusters[0], passes_per_window=passes)
        protocol = Protocol("drift", args.windows, tokens, streams=args.ablation_streams, seed=0)
        eplb = min(
            cached(
                folder / f"{rule}.json", partial(figures, partial(make_planner, rule, simulator), rule, test, protocol)
            )["total_us"]
            for rule in (*EPLBS, "eplb-threshold")
        )
        rows: dict[str, list[float]] = {"policy": [], "supervised": []}
        for seed in args.ablation_seeds:
            run = train_one(args, folder / f"seed-{seed}", seed, args.ablation_timesteps, (*args.trainer_flags, *flags))
            for stage, place in (("policy", run), ("supervised", run / "supervised")):
                make = partial(Policy, simulator, checkpoint=place)
                found = cached(folder / f"{stage}-{seed}.json", partial(figures, make, stage, test, protocol))
                rows[stage].append(found["total_us"] / eplb)
        table.add_row(name, str(len(args.ablation_seeds)), *(interval(values) for values in rows.values()))
    args.console.print(table)


# Throughput


def _serve(pipe: Any, config: PlacementConfig, settings: tuple[str, int], seed: int) -> None:
    """One environment in a process of its own: numpy in, numpy out."""
    torch.set_num_threads(1)
    view = PolicyView(PlacementBatch(config, 1), *settings)
    view.batch.seed(np.array([seed]))
    view.reset()
    while True:
        command, *arguments = pipe.recv()
        if command == "inputs":
            pipe.send({key: each.numpy() for key, each in view.inputs().items()})
        elif command == "look":
            expert = torch.tensor(arguments)
            pipe.send((view.look(expert).numpy(), view.legal(expert).numpy()))
        elif command == "step":
            expert, node = (torch.tensor([each]) for each in arguments)
            reward, layer_end = view.step(expert, node)
            done = bool(view.batch.done)
            if done:
                view.reset()
            pipe.send((float(reward), bool(layer_end) or done, done))
        else:
            return


class PlainView:
    """The plain way: one environment a process behind pipes, observations stacked from numpy at every step."""

    def __init__(self, config: PlacementConfig, size: int, settings: tuple[str, int], same_node: torch.Tensor) -> None:
        self.same_node = same_node
        self.pipes, self.processes = [], []
        context = multiprocessing.get_context("spawn")
        for seed in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, config, settings, seed), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, *messages: tuple[Any, ...]) -> list[Any]:
        for pipe, message in zip(self.pipes, messages, strict=True):
            pipe.send(message)
        return [pipe.recv() for pipe in self.pipes]

    def inputs(self) -> dict[str, torch.Tensor]:
        found = self.ask(*[("inputs",)] * len(self.pipes))
        return {key: torch.from_numpy(np.concatenate([each[key] for each in found])) for key in found[0]}

    def look(self, expert: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.ask(*(("look", int(e)) for e in expert))
        parts, legal = (np.concatenate(each) for each in zip(*found, strict=True))
        return torch.from_numpy(parts), torch.from_numpy(legal)

    def step(self, expert: torch.Tensor, node: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.ask(*(("step", int(e), int(n)) for e, n in zip(expert, node, strict=True)))
        rewards, ends, _ = zip(*found, strict=True)
        return torch.tensor(rewards), torch.tensor(ends)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(("end",))
        for process in self.processes:
            process.join(timeout=10)


def plain_collect(marl: Any, view: PlainView, agent: Any, ppo: Any) -> Any:
    """The trainer's rollout on the plain view: every observation is kept whole, and any steps make a minibatch."""
    size = len(view.pipes)
    seen: dict[str, list[torch.Tensor]] = {key: [] for key in (*STEP_KEYS, *LAYER_KEYS)}
    taken = []
    with torch.no_grad():
        for _ in range(ppo.num_steps):
            inputs = view.inputs()
            for key, each in inputs.items():
                seen[key].append(each)
            encoded = agent.encode(inputs, view.same_node)
            expert, first = marl.sample(agent.expert_logits(inputs, encoded))
            values = agent.values(inputs, encoded, view.same_node).mean(-1)
            parts, legal = view.look(expert)
            node, second = marl.sample(agent.node_logits(inputs, encoded, view.same_node, expert, parts, legal))
            reward, end = view.step(expert, node)
            taken.append((expert, node, parts, legal, first + second, values, reward, end))
    expert, node, parts, legal, logprobs, values, rewards, ends = (
        torch.stack(each) for each in zip(*taken, strict=True)
    )
    advantages, returns = marl.compute_gae(
        rewards, values, ends, ends, torch.zeros(size), torch.zeros_like(values), ppo.gamma, ppo.gae_lambda
    )
    return marl.Batch(
        *({key: torch.stack(seen[key]).flatten(0, 1) for key in keys} for keys in (STEP_KEYS, LAYER_KEYS)),
        *(each.flatten(0, 1) for each in (expert, node, parts, legal, logprobs, advantages, returns, values)),
    )


def load_trainer() -> Any:
    sys.path.insert(0, str(TRAINER.parent))
    import ppo_moe_marl

    return ppo_moe_marl


def throughput(args: Args) -> None:
    """Steps/s of the same networks and update: the trainer, and one environment a process. Four rounds each, in turns."""
    marl, model = load_trainer(), args.models[0]
    common = {
        "trace": tuple(sources(args, model)), "model": model_of(args, model), "cluster": args.clusters[0],
    }  # fmt: skip
    ours = marl.Args(**common, threads=args.threads)
    plain = marl.Args(**common, ppo=marl.PPOArgs(num_envs=8, num_steps=512))  # as many steps per update
    world = marl.World()
    rounds: dict[str, list[dict[str, float]]] = {"batched": [], "one process each": []}
    task = marl.make_task(ours)
    torch.manual_seed(1)
    agent = marl.make_agent(ours)
    optimizer = marl.make_optimizer(agent, 1e-4)
    rollouts = marl.Rollouts(ours, agent, task, world.device)
    rollouts.restart(1)
    view = PlainView(
        task.config, plain.ppo.num_envs, (ours.task.homes, ours.task.lookahead_norm), rollouts.view.same_node
    )
    try:
        marl.iterate(agent, optimizer, rollouts, marl.ReturnStatistics(), ours, world)
        plain_collect(marl, view, agent, plain.ppo)
        for _ in range(4):
            found = marl.iterate(agent, optimizer, rollouts, marl.ReturnStatistics(), ours, world)
            rounds["batched"].append({key: found[key] for key in found if key.startswith(("time/", "charts/SPS"))})
            began = time.perf_counter()
            batch = plain_collect(marl, view, agent, plain.ppo)
            collected = time.perf_counter()
            torch.set_num_threads(args.threads)
            marl.update(agent, optimizer, batch, view.same_node, plain, world)
            torch.set_num_threads(1)
            ended = time.perf_counter()
            rounds["one process each"].append(
                {"charts/SPS": len(batch) / (ended - began), "time/update": (ended - collected) / (ended - began)}
            )
    finally:
        view.close()
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "throughput.json").write_text(json.dumps(rounds, indent=1) + "\n")
    table = Table("way", "steps/s", "simulator and look-ahead", "policy", "update", title="training throughput")
    for name, each in rounds.items():
        row = {key: float(np.mean([one[key] for one in each])) for key in each[0]}
        table.add_row(
            name, f"{row['charts/SPS']:.0f}", *(f"{row[key]:.0%}" if key in row else "" for key in ("time/simulator", "time/policy", "time/update"))
        )  # fmt: skip
    args.console.print(table)


def growth(args: Args) -> None:
    """Median µs of one step (simulation, look-ahead, both actors) against each size, the others held at 64 experts, 4×4, 2048, 64."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    base = {"experts": 64, "gpus": 16, "tokens": 2048, "environments": 64}
    sizes = {
        "experts": (16, 32, 64, 128, 256), "gpus": (4, 8, 16, 32, 64), "tokens": (512, 1024, 2048, 4096, 8192),
        "environments": (1, 4, 16, 64, 256),
    }  # fmt: skip

    def measure(setting: dict[str, int]) -> dict[str, float]:
        model = ModelSpec(
            "grown", 2, setting["experts"], min(6, setting["experts"]), *(MODELS["deepseek-v2-lite"].hidden, 1408)
        )
        trace = synthetic_trace(
            SyntheticConfig(n_tokens=16384, n_layers=2, n_experts=setting["experts"], top_k=model.top_k), seed=0
        )
        from clustergym.moe_placement import ClusterSpec

        cluster = ClusterSpec("grown", max(1, setting["gpus"] // 4), min(4, setting["gpus"]))
        config = PlacementConfig(
            trace=trace,
            model=model,
            cluster=cluster,
            windows=4,
            window_tokens=setting["tokens"],
            schedule="drift",
            start="eplb",
        )
        view = PolicyView(PlacementBatch(config, setting["environments"]))
        view.reset()
        network, spent = new_agent().eval(), {"policy": list[float](), "simulator": list[float]()}
        repeats = max(12, 64 // setting["environments"])
        with torch.no_grad():
            for i in range(repeats + 1):
                began = time.perf_counter()
                inputs = view.inputs()
                encoded = network.encode(inputs, view.same_node)
                expert = network.expert_logits(inputs, encoded).argmax(-1)
                chosen = time.perf_counter()
                parts = view.look(expert)
                looked = time.perf_counter()
                node = network.node_logits(inputs, encoded, view.same_node, expert, parts, view.legal(expert)).argmax(
                    -1
                )
                decided = time.perf_counter()
                view.step(expert, node)
                if i:  # the first round compiles
                    spent["policy"].append(chosen - began + decided - looked)
                    spent["simulator"].append(looked - chosen + time.perf_counter() - decided)
        return {key: 1e6 * float(np.median(each)) / setting["environments"] for key, each in spent.items()}

    figure, axes = plt.subplots(1, 4, figsize=(14, 3.4), layout="constrained")
    for axis, (name, values) in zip(axes, sizes.items(), strict=True):
        found = [
            cached(args.output / "growth" / f"{name}-{v}.json", lambda v=v, name=name: measure(base | {name: v}))
            for v in values
        ]
        for part, marker in (("simulator", "o"), ("policy", "s")):
            axis.plot(values, [each[part] for each in found], marker=marker, ms=4, label=part)
        axis.set(xscale="log", yscale="log", xlabel=name, ylabel="µs a step" if name == "experts" else "")
        axis.set_xticks(values, [str(v) for v in values])
        axis.minorticks_off()
    axes[0].legend()
    figure.savefig(args.output / "growth.png", dpi=110)
    plt.close(figure)
    args.console.print(f"plot: {args.output / 'growth.png'}")


def main(args: Args) -> None:
    torch.set_num_threads(1)
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.studies:
        globals()[name](args)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
