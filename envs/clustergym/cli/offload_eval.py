"""``clustergym offload eval``: compare rules, the control, networks and bounds."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from clustergym.cli.common import prepare_outputs
from clustergym.cli.offload_output import players_of, results_table, steps_of
from clustergym.common.files import write_atomically
from clustergym.moe_offload.evaluation import Row, evaluate, parts_to_serve, policy_names
from clustergym.moe_offload.picture import plot_rows
from clustergym.moe_offload.simulator import load_once, load_predictor
from clustergym.moe_offload.specs import DEFAULT_TRACE, OffloadConfig, share
from clustergym.moe_offload.tables import Tables, first_tokens
from clustergym.moe_placement.specs import get_model


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
    """Folder of a fitted predictor, for the control and the shipped policy."""
    policy: list[str] = field(default_factory=lambda: ["rules", "bounds"])
    """rules, control, bounds, shipped (the policy in the predictor's folder), names of rules, random-networks, or run
    folders of ppo_moe_marl.py."""
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
    """Environments in which networks are played."""
    seed: int = 0
    """Seed of the split, of the search, and of the draw of sequences."""
    json: Path | None = None
    """Write the rows to this JSON file."""
    plot: Path | None = None
    """Write a picture of tokens per second over memory to this file (.png, .svg or .pdf)."""


def run(args: Eval, console: Console, line: str) -> None:
    shares = [share(text) for text in args.slots]
    predictor = load_predictor(args.predictor)
    names, others = policy_names(args.policy, predictor is not None)
    players = players_of(others, args.predictor)
    prepare_outputs(args.json, args.plot)
    trace = load_once(args.trace)
    source = trace if args.fit_on is None else load_once(args.fit_on)
    part, parts = parts_to_serve(trace, source, args.split, args.seed, args.new_domain)
    part = part if args.tokens is None else first_tokens(part, args.tokens, args.seed)
    tables = Tables.count(parts["fit"])
    tables.check(part)
    if predictor is not None:
        predictor.check(part)
    expert_mb = args.expert_mb
    if expert_mb is None and args.model is not None:
        expert_mb = get_model(args.model).expert_bytes / 1e6
    config = OffloadConfig(
        trace=part, split="all", fit_on=tables, per_layer=args.per_layer, gpus=args.gpus, batch=args.batch,
        link=args.link, expert_mb=expert_mb,
    )  # fmt: skip
    megabytes, cells = config.megabytes(part), part.n_layers * part.n_experts
    tuning = first_tokens(parts["train"], args.tune_tokens, args.seed)
    console.print(
        escape(
            f"{part.name}: {part.n_tokens} tokens of {part.n_sequences} sequences, {part.n_layers} layers, top-"
            f"{part.top_k} of {part.n_experts}; tuned on {tuning.n_tokens} tokens; {megabytes:.1f} MB per "
            f"expert over {config.link_gb_s:g} GB/s (assumed, not measured)"
        )
    )
    for name, player in players.items():
        if player.trained_for.get("link", args.link) != args.link:
            console.print(escape(f"{name} was trained for {player.trained_for}: for {args.link}, offload fit --link"))
    rows: list[Row] = []
    with steps_of(console, len(shares) * (len(names) + len(players) + 1)) as progress:
        for slots in shares:
            tell = lambda step, note, slots=slots: progress(f"{slots:.1%} {step}", note)  # noqa: E731
            settings = (args.evaluations, args.seed, args.num_envs, tell)
            rows += evaluate(names, players, replace(config, slots=slots), tuning, tables, predictor, *settings).rows
            if args.json is not None:
                document = {
                    "rows": [row.as_dict() for row in rows], "complete": slots == shares[-1], "trace": part.name,
                    "split": args.split, "tokens": part.n_tokens, "sequences": part.n_sequences, "fit_on": source.name,
                    "expert_mb": megabytes, "link_gb_s": config.link_gb_s, "batch": args.batch,
                    "gpus": args.gpus, "per_layer": args.per_layer, "seed": args.seed, "command": line,
                }  # fmt: skip
                write_atomically(args.json, json.dumps(document, indent=1) + "\n")
    for slots in shares:
        console.print(results_table([row for row in rows if row.slots == slots], cells, megabytes))
    if args.plot is not None:
        title = f"{part.name}, {config.link_gb_s:g} GB/s, batch {args.batch}"
        plot_rows(rows, cells * megabytes / 1e3, title, args.plot)
        console.print(escape(f"plot: {args.plot}"))
    if args.json is not None:
        console.print(escape(f"rows: {args.json}"))
