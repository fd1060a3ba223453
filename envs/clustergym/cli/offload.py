"""``clustergym offload``: which experts to keep on the GPU: fit a predictor, compare policies, export."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)  # fmt: skip
from rich.table import Table

from clustergym.cli.common import prepare_files, prepare_outputs
from clustergym.common.files import write_atomically
from clustergym.moe_offload.evaluation import Row, compare, make_environment, play, policy_names
from clustergym.moe_offload.export import export_cache
from clustergym.moe_offload.picture import plot_curve, plot_rows
from clustergym.moe_offload.predictor import Predictor, fit_predictor, recall
from clustergym.moe_offload.rules import Outcome, Workload, tune_all
from clustergym.moe_offload.scores import scores_of
from clustergym.moe_offload.simulator import build_task, load_once
from clustergym.moe_offload.specs import DEFAULT_TRACE, OffloadConfig
from clustergym.moe_offload.tables import Tables, clean, first_tokens, split_sequences, without
from clustergym.moe_placement.specs import get_model
from clustergym.traces.token_trace import TokenTrace


@dataclass
class Fit:
    """Fit the next-use predictor on the sequences of a trace that no policy is trained, tuned or tested on.

    Takes 2 to 3 minutes. Example: clustergym offload fit tiny_decode -o predictor
    """

    trace: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TRACE")] = DEFAULT_TRACE
    """A .npz or .npy file, or the name of a bundled trace."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("predictor")
    """Folder to write predictor.safetensors and predictor.json to."""
    steps: int = 1500
    """Gradient steps."""
    hidden: int = 96
    """Width of the hidden layer."""
    seed: int = 0
    """Seed of the split, the weights and the batches."""


@dataclass
class Eval:
    """Compare rules, the control, trained policies and bounds: stall per token, tokens per second, hit rate.

    Rules and control are tuned on the training sequences, and measured on others. Times are computed from bandwidths
    and sizes, not measured. Example: clustergym offload eval tiny_decode --policy rules bounds --slots 30% 37% 50%
    """

    trace: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TRACE")] = DEFAULT_TRACE
    """Trace to serve: a .npz or .npy file, or the name of a bundled trace."""
    fit_on: str | None = None
    """Trace that tables are counted on and rules are tuned on. By default TRACE: its test part is then served."""
    split: str | None = None
    """Part to serve: test, new-domain, validation, train, or all. By default test, or all of another trace."""
    new_domain: list[str] = field(default_factory=list)
    """Domains that the part new-domain consists of, if the recording does not name them."""
    predictor: Path | None = None
    """Folder of a fitted predictor, for the control."""
    policy: list[str] = field(default_factory=lambda: ["rules", "bounds"])
    """rules, control, bounds, names of rules, or run folders of ppo_moe_marl.py."""
    model: str | None = None
    """Model preset, config.json or YAML file for the size of an expert. By default the model of the trace, or 13.2 MB
    (gpt-oss-20b)."""
    expert_mb: float | None = None
    """MB of an expert, instead of --model."""
    slots: list[str] = field(default_factory=lambda: ["37.5%"])
    """Shares of all experts that fit on the GPUs: 30%, or 0.3. Several give the curve of --plot."""
    per_layer: bool = False
    """Give each layer the same share of the slots, instead of one pool."""
    gpus: int = 1
    """GPUs of the node."""
    batch: int = 1
    """Sequences that are served together."""
    link: str = "pcie5"
    """Link to the host memory: pcie4, pcie5, or GB/s."""
    tokens: int | None = None
    """Serve only about so many tokens, of sequences drawn at random."""
    tune_tokens: int = 8000
    """Tokens to tune on."""
    evaluations: int = 20
    """Trials per parameter of the search that tunes a rule."""
    num_envs: int = 64
    """Environments in which a trained policy is played."""
    seed: int = 0
    """Seed of the split, of the search, and of the draw of sequences."""
    json: Path | None = None
    """Write the rows to this JSON file."""
    plot: Path | None = None
    """Write a picture of tokens per second over memory to this file (.png, .svg or .pdf)."""


@dataclass
class Curve:
    """Show what a training run has learned: stall over its steps beside the rules, and a table on all test sequences.

    Example: clustergym offload curve runs/ppo_moe_marl__MoEOffload-v0__1
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run folder of ppo_moe_marl.py, trained with --eval-interval in an offloading task."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Picture to write. Default: curve.png in the run folder."""
    policy: list[str] = field(default_factory=lambda: ["rules", "bounds"])
    """What to compare with: rules, control, bounds, names of rules, or other run folders."""
    predictor: Path | None = None
    """Folder of a fitted predictor, for the control and for policies that read its columns."""
    tune_tokens: int = 8000
    """Tokens to tune on."""
    evaluations: int = 20
    """Trials per parameter of the search that tunes a rule."""
    num_envs: int = 64
    """Environments in which trained policies are played."""


@dataclass
class Export:
    """Write what an engine needs for its expert cache: hot set, transition tables, parameters of a rule, an example.

    Example: clustergym offload export cache --trace tiny_decode
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Folder for the files."""
    trace: str = DEFAULT_TRACE
    """Trace that tables are counted on and the rule is tuned on."""
    slots: str = "37.5%"
    """Share of all experts that fit on the GPU."""
    link: str = "pcie5"
    """Link to the host memory: pcie4, pcie5, or GB/s."""
    policy: Path | None = None
    """Run folder of a trained policy: its policy.onnx and model.safetensors are copied."""
    predictor: Path | None = None
    """Folder of a fitted predictor, which is copied."""
    evaluations: int = 20
    """Trials per parameter of the search that tunes the rule."""
    seed: int = 0
    """Seed of the split and of the search."""


def share(text: str) -> float:
    """A share of all experts: ``37%`` or ``0.37``."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise ValueError(f"--slots {text}: expected a share of all experts, like 37% or 0.37")
    return value


def link_of(text: str) -> str | float:
    return float(text) if re.fullmatch(r"[0-9.]+", text) else text


def bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:28s}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console, transient=True,
    )  # fmt: skip


def run_fit(args: Fit, console: Console, line: str) -> None:
    trace = load_once(args.trace)
    parts = split_sequences(trace, args.seed)
    fit, held_out = parts["fit"], parts["test"]
    args.output.mkdir(parents=True, exist_ok=True)
    prepare_files(args.output / "predictor.json")
    console.print(escape(f"{trace.name}: fit on {fit.n_tokens} tokens of {fit.n_sequences} sequences"))
    with bar(console) as progress:
        task = progress.add_task("fit", total=args.steps, note="")
        predictor = fit_predictor(
            fit, parts.get("validation"), steps=args.steps, hidden=args.hidden, seed=args.seed,
            progress=lambda done, total, note: progress.update(task, completed=done, note=note),
        )  # fmt: skip
    predictor.save(args.output)
    part = first_tokens(held_out, 6000)
    tables = Tables.count(fit)
    groups = single(part)
    table = Table("share of the used experts among the top-k", "1 layer ahead", "2", "3", box=None)
    table.add_row("popularity", *[f"{recall_of_popularity(tables, part):.3f}"] * 3)
    for name in ("transitions", "frequency-transitions"):
        table.add_row(name, *(f"{recall(x, part):.3f}" for x in scores_of(name, part, groups, tables, None).ahead))
    table.add_row("predictor", *(f"{x:.3f}" for x in predictor.recall(part)))
    console.print(table)
    console.print(escape(f"predictor: {args.output}"))


def single(trace: TokenTrace) -> Any:
    """Every sequence alone."""
    import numpy as np

    return np.arange(trace.n_sequences)[:, None]


def recall_of_popularity(tables: Tables, trace: TokenTrace) -> float:
    import numpy as np

    return recall(np.broadcast_to(tables.popularity, (trace.n_tokens, *tables.shape)), trace)


def served(args: Eval) -> tuple[TokenTrace, TokenTrace, dict[str, TokenTrace]]:
    """The sequences to serve, the trace to fit on, and its parts."""
    trace = load_once(args.trace)
    source = trace if args.fit_on is None else load_once(args.fit_on)
    parts = split_sequences(source, args.seed, args.new_domain)
    split = args.split or ("test" if source is trace else "all")
    if source is trace:
        if split == "all":
            raise ValueError("--split all would serve the sequences that rules are tuned on: give --fit-on TRACE")
        if split not in parts:
            raise ValueError(f"--split {split}: the parts of {trace.name} are {', '.join(parts)}")
        part = parts[split]
    else:
        part = without(clean(trace), [parts["fit"], parts["train"]])
        if split != "all":
            others = split_sequences(part, args.seed, args.new_domain)
            if split not in others:
                raise ValueError(f"--split {split}: the parts of {trace.name} are {', '.join(others)}, and all")
            part = others[split]
    return part if args.tokens is None else first_tokens(part, args.tokens, args.seed), source, parts


def run_eval(args: Eval, console: Console, line: str) -> None:
    shares = [share(text) for text in args.slots]
    predictor = None if args.predictor is None else Predictor.load(args.predictor)
    names, runs = policy_names(args.policy, predictor is not None)
    policies = {name: read_policy(name) for name in runs}
    prepare_outputs(args.json, args.plot)
    part, source, parts = served(args)
    tables = Tables.count(parts["fit"])
    tables.check(part)
    if predictor is not None:
        predictor.check(part)
    expert_mb = args.expert_mb
    if expert_mb is None and args.model is not None:
        expert_mb = get_model(args.model).expert_bytes / 1e6
    base = OffloadConfig(
        trace=part, split="all", fit_on=source, per_layer=args.per_layer, gpus=args.gpus, batch=args.batch,
        link=link_of(args.link), expert_mb=expert_mb, predictor=None,
    )  # fmt: skip
    tuning = first_tokens(parts["train"], args.tune_tokens, args.seed)
    console.print(
        escape(
            f"{part.name}: {part.n_tokens} tokens of {part.n_sequences} sequences, {part.n_layers} layers, top-"
            f"{part.top_k} of {part.n_experts}; tuned on {tuning.n_tokens} tokens; {base.megabytes(part):.1f} MB per "
            f"expert over {base.link_gb_s:g} GB/s (assumed, not measured)"
        )
    )
    rows: list[Row] = []
    with bar(console) as progress:
        steps = progress.add_task("", total=len(shares) * (len(names) + len(policies) + 1), note="")
        for slots in shares:
            config = replace(base, slots=slots)
            train = Workload(build_task(replace(config, trace=tuning), tables), tuning, tables, predictor, reuse=True)
            test = Workload(build_task(config, tables), part, tables, predictor)
            tuned = tune_all(train, names, args.evaluations, args.seed, stepper(progress, steps, slots))
            del train
            progress.update(steps, description="play", advance=1)
            trained: dict[str, Outcome] = {}
            for name, policy in policies.items():
                progress.update(steps, description=f"play {Path(name).name[:20]}", advance=1)
                trained[name] = play_policy(policy, config, args.predictor, test, args.num_envs, progress, steps)
            rows += compare(test, tuned, slots, trained)
            if args.json is not None:
                document = {
                    "rows": [row.as_dict() for row in rows], "complete": slots == shares[-1], "trace": part.name,
                    "split": args.split, "tokens": part.n_tokens, "sequences": part.n_sequences, "fit_on": source.name,
                    "expert_mb": base.megabytes(part), "link_gb_s": base.link_gb_s, "batch": args.batch,
                    "gpus": args.gpus, "per_layer": args.per_layer, "seed": args.seed, "command": line,
                }  # fmt: skip
                write_atomically(args.json, json.dumps(document, indent=1) + "\n")
    cells = part.n_layers * part.n_experts
    for slots in shares:
        console.print(results_table([row for row in rows if row.slots == slots], slots, cells, base.megabytes(part)))
    if args.plot is not None:
        title = f"{part.name}, {base.link_gb_s:g} GB/s, batch {args.batch}"
        plot_rows(rows, cells * base.megabytes(part) / 1e3, title, args.plot)
        console.print(escape(f"plot: {args.plot}"))
    if args.json is not None:
        console.print(escape(f"rows: {args.json}"))


def run_curve(args: Curve, console: Console, line: str) -> None:
    predictor = None if args.predictor is None else Predictor.load(args.predictor)
    names, runs = policy_names(args.policy, predictor is not None)
    policies = {name: read_policy(name) for name in (str(args.run), *runs)}
    about = policies[str(args.run)].about
    if not about["env_id"].startswith("MoEOffload"):
        raise ValueError(f"{args.run} was trained in {about['env_id']}: expected an offloading task")
    path = args.output or args.run / "curve.png"
    prepare_outputs(None, path)
    options = {key: value for key, value in about["env_args"].items() if key in OffloadConfig.__dataclass_fields__}
    trace = load_once(options.get("trace", DEFAULT_TRACE))
    source = trace if options.get("fit_on") is None else load_once(options["fit_on"])
    tables, parts = Tables.count(split_sequences(source)["fit"]), split_sequences(trace)
    config = OffloadConfig(**options | {"trace": parts["test"], "split": "all", "fit_on": source, "predictor": None})
    tuning = first_tokens(parts["train"], args.tune_tokens)
    with bar(console) as progress:
        bars = progress.add_task("", total=len(names) + len(policies), note="")
        train = Workload(build_task(replace(config, trace=tuning), tables), tuning, tables, predictor, reuse=True)
        test = Workload(build_task(config, tables), parts["test"], tables, predictor)
        tuned = tune_all(train, names, args.evaluations, 0, stepper(progress, bars, config.slots))
        trained: dict[str, Outcome] = {}
        for name, policy in policies.items():
            progress.update(bars, description=f"play {Path(name).name[:20]}", advance=1)
            trained[name] = play_policy(policy, config, args.predictor, test, args.num_envs, progress, bars)
    rows = compare(test, tuned, config.slots, trained)
    steps, returns, episodes = evaluations_of(args.run, about)
    tokens = test.lengths[episodes].sum()
    stall = [-value * len(episodes) * test.task.load_ms / tokens for value in returns]
    shown = shown_levels(rows)
    levels = {
        name: float(outcome.stall_ms[episodes].sum() / tokens)
        for name, outcome in zip(shown, test.run_all([tuned[name] for name in shown]), strict=True)
    }
    part, megabytes = parts["test"], config.megabytes(trace)
    cells = part.n_layers * part.n_experts
    console.print(results_table(rows, config.slots, cells, megabytes))
    title = f"{about['env_id']} on {trace.name}: {part.n_sequences} test sequences, {part.n_tokens} tokens"
    plot_curve(steps, stall, levels, rows, title, path)
    console.print(escape(f"plot: {path}"))


def shown_levels(rows: list[Row]) -> list[str]:
    """Rules and bounds that the learning curve is compared with: what engines have, the best ones, and Belady."""
    names = {"lru", "decayed-lfu", "belady"} & {row.policy for row in rows}
    for kind in ("rule", "control"):
        names |= {min(each, key=lambda row: row.stall_ms_per_token).policy
                  for each in [[row for row in rows if row.kind == kind]] if each}  # fmt: skip
    return sorted(names)


def evaluations_of(run: Path, about: dict[str, Any]) -> tuple[list[int], list[float], Any]:
    """Steps and mean returns of a run's evaluations, and the test episodes that they were played on."""
    from clustergym.training.envs import evaluation_seed
    from clustergym.training.logs import read_scalars

    trained = json.loads((run / "model.json").read_text())["args"]
    if trained["eval_args"] != ["split=test"] or not trained["eval_episodes"]:
        raise ValueError(f"{run} was evaluated with {trained['eval_args']}: expected --eval-args split=test")
    steps, returns = read_scalars(run, "eval/mean_return")
    options = about["env_args"] | {"split": "test"}
    for key in ("autoreset_mode", "num_envs", "render_mode"):
        options.pop(key, None)
    env = make_environment(about["env_id"], trained["eval_episodes"], **options)
    _, infos = env.reset(seed=evaluation_seed(trained["seed"]))
    return steps, returns, infos["group"]


def stepper(progress: Progress, task: TaskID, slots: float) -> Callable[[str, int, int], None]:
    def step(name: str, done: int, total: int) -> None:
        progress.update(task, description=f"{slots:.1%} {name}", advance=1)

    return step


def read_policy(name: str) -> Any:
    """A trained policy of a run folder."""
    if not Path(name).exists():
        raise ValueError(f"--policy {name}: expected rules, control, bounds, the name of a rule, or a run folder")
    from clustergym.training.policies import Policy

    return Policy(name)


def play_policy(
    policy: Any, config: OffloadConfig, predictor: Path | None, test: Workload, num_envs: int,
    progress: Progress, steps: TaskID,
) -> Outcome:  # fmt: skip
    """Play a trained policy in the environment that it was trained in, with the slots and the link of ``config``."""
    options = dict(policy.about.get("env_args", {}))
    if options.get("predictor") and predictor is None:
        raise ValueError(f"{policy.path} reads the columns of a predictor: give --predictor")
    for key in ("trace", "split", "fit_on", "slots", "per_layer", "gpus", "batch", "link", "expert_mb", "max_tokens"):
        options[key] = getattr(config, key)
    options["predictor"] = predictor if options.get("predictor") else None
    for key in ("autoreset_mode", "num_envs", "render_mode"):
        options.pop(key, None)
    env = make_environment(policy.about["env_id"], min(num_envs, len(test.task.groups)), **options)
    try:
        return play(env, policy.act, test, lambda done, total: progress.update(steps, note=f"{done}/{total} episodes"))
    finally:
        env.close()


def results_table(rows: list[Row], slots: float, cells: int, megabytes: float) -> Table:
    """Rows of one memory size, the least stall last."""
    held = round(slots * cells)
    table = Table(
        "policy", "kind", "stall ms/token", "95 %", "tokens/s", "hit rate", "prefetches", "vs Belady", "vs best rule",
        title=f"{held} of {cells} experts ({slots:.1%}, {held * megabytes / 1e3:.1f} GB)", title_justify="left",
        box=None,
    )  # fmt: skip
    for column in table.columns:
        column.no_wrap = True
    for row in sorted(rows, key=lambda row: -row.stall_ms_per_token):
        against = ""
        if row.against_best_rule is not None and row.against_best_rule_ci95 is not None:
            low, high = row.against_best_rule_ci95
            against = f"{row.against_best_rule:+.1%} ± {(high - low) / 2:.1%}"
        table.add_row(
            escape(Path(row.policy).name), row.kind, f"{row.stall_ms_per_token:.3f}",
            "{:.3f} … {:.3f}".format(*row.ci95), f"{row.tokens_per_s:.0f}", f"{row.hit_rate:.1%}",
            f"{row.prefetches_per_token:.1f}", f"{row.belady_regret_ms:+.2f} ms", against,
        )  # fmt: skip
    return table


def run_export(args: Export, console: Console, line: str) -> None:
    slots = share(args.slots)
    trace = load_once(args.trace)
    parts = split_sequences(trace, args.seed)
    tables, tuning = Tables.count(parts["fit"]), first_tokens(parts["train"], 8000, args.seed)
    config = OffloadConfig(trace=tuning, split="all", slots=slots, link=link_of(args.link))
    train = Workload(build_task(config, tables), tuning, tables, reuse=True)
    with bar(console) as progress:
        steps = progress.add_task("tune", total=1, note="")
        tuned = tune_all(train, ["frequency+transitions"], args.evaluations, args.seed, stepper(progress, steps, slots))
    files = export_cache(args.folder, trace, tables, train.task, *tuned["frequency+transitions"])
    for source, wanted in (
        (args.policy, ("policy.onnx", "model.safetensors", "model.json")),
        (args.predictor, ("predictor.safetensors", "predictor.json")),
    ):
        files += [] if source is None else copied(source, args.folder, wanted)
    table = Table("file", "kB", "content", box=None)
    for name, about in files:
        table.add_row(str(args.folder / name), f"{(args.folder / name).stat().st_size / 1e3:.0f}", about)
    console.print(table)


def copied(source: Path, folder: Path, names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Copy files that exist. The first one must."""
    from clustergym.common.files import atomic_file

    if not (source / names[0]).is_file():
        raise ValueError(f"{source}: no {names[0]} in the folder")
    found = []
    for name in names:
        if (source / name).is_file():
            with atomic_file(folder / name) as file:
                file.write((source / name).read_bytes())
            found.append((name, f"of {source}"))
    return found


RUN: dict[type, Callable[..., None]] = {Fit: run_fit, Eval: run_eval, Curve: run_curve, Export: run_export}
"""The function of each subcommand."""


@dataclass
class Command:
    """Keep the right experts on the GPU: fit a next-use predictor, compare policies, export what an engine needs."""

    command: Annotated[
        Annotated[Fit, tyro.conf.subcommand("fit", prefix_name=False)]
        | Annotated[Eval, tyro.conf.subcommand("eval", prefix_name=False)]
        | Annotated[Curve, tyro.conf.subcommand("curve", prefix_name=False)]
        | Annotated[Export, tyro.conf.subcommand("export", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]


def run(args: Command, console: Console, line: str) -> None:
    RUN[type(args.command)](args.command, console, line)
