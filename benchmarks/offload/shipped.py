"""The shipped policy against the control and the best rule on the same test sequences, for several training seeds.

The control has 20 trials per parameter; the policies start from it. All of it is chosen on training sequences.

    python benchmarks/offload/shipped.py gpt_oss_20b.npz --predictor predictor --link pcie5 --output shipped.csv
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro

from clustergym.common.files import atomic_file
from clustergym.moe_offload.evaluation import Player, change, play_networks, row_of
from clustergym.moe_offload.improvement import TABLE, ImprovedPolicy, gather_trials, learn
from clustergym.moe_offload.predictor import Predictor
from clustergym.moe_offload.rules import CONTROL, Outcome, Workload, tune_all
from clustergym.moe_offload.simulator import build_task, load_once
from clustergym.moe_offload.specs import OffloadConfig
from clustergym.moe_offload.tables import Tables, first_tokens, split_sequences


@dataclass
class Args:
    trace: Annotated[str, tyro.conf.Positional] = "tiny_decode"
    predictor: Path = Path("predictor")
    link: str = "pcie5"
    slots: float = 0.375
    best_rule: str = "frequency+transitions"
    """The rule to compare with. This one is the best on all traces that we have."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Of the trials and of the network."""
    decisions: int = 30_000
    part: str = "test"
    tokens: int = 100_000
    """Serve only about so many tokens, of sequences drawn at random."""
    evaluations: int = 20
    """Trials per parameter of control and rules."""
    output: Path = Path("shipped.csv")
    """Rows of this trace and link are replaced, those of others stay."""


COLUMNS = (
    "trace", "link", "part", "tokens", "sequences", "policy", "seed", "stall_ms_per_token", "stall_low", "stall_high",
    "tokens_per_s", "vs_control_percent", "vs_control_low", "vs_control_high", "vs_best_rule_percent",
    "vs_best_rule_low", "vs_best_rule_high",
)  # fmt: skip


def main(args: Args) -> None:
    parts, predictor = split_sequences(load_once(args.trace)), Predictor.load(args.predictor)
    tables, train, test = Tables.count(parts["fit"]), parts["train"], first_tokens(parts[args.part], args.tokens)
    config = OffloadConfig(train, "all", tables, slots=args.slots, link=args.link)
    tuning = first_tokens(train, 8000)
    known = Workload(build_task(replace(config, trace=tuning), tables), tuning, tables, predictor, reuse=True)
    tuned = tune_all(known, [args.best_rule, CONTROL], args.evaluations)
    served = replace(config, trace=test)
    workload = Workload(build_task(served, tables), test, tables, predictor)
    outcomes = {name: workload.run(*found) for name, found in tuned.items()}
    served_by = {"trace": test.name, "link": args.link, "part": args.part, "tokens": test.n_tokens,
                 "sequences": test.n_sequences}  # fmt: skip
    rows: list[dict[str, str]] = []
    if args.output.exists():
        with args.output.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if (row["trace"], row["link"]) != (test.name, args.link)]

    def show(name: str, outcome: Outcome, seed: str = "") -> None:
        row = row_of(name, tuned[name][0].kind if name in tuned else "trained", args.slots, outcome)
        found = {**served_by, "policy": name, "seed": seed, "stall_ms_per_token": row.stall_ms_per_token,
                 "stall_low": row.ci95[0], "stall_high": row.ci95[1], "tokens_per_s": row.tokens_per_s}  # fmt: skip
        for column, other in (("vs_control", CONTROL), ("vs_best_rule", args.best_rule)):
            value, (low, high) = change(outcome, outcomes[other])
            found |= {f"{column}_percent": 100 * value, f"{column}_low": 100 * low, f"{column}_high": 100 * high}
        rows.append({key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in found.items()})
        print(
            f"{name} {seed}: {row.stall_ms_per_token:.4f} ms per token, {rows[-1]['vs_control_percent']} % "
            f"({rows[-1]['vs_control_low']} … {rows[-1]['vs_control_high']}) against the control, "
            f"{rows[-1]['vs_best_rule_percent']} % against {args.best_rule}, {row.tokens_per_s:.0f} tokens/s",
            flush=True,
        )  # fmt: skip
        with atomic_file(args.output, "w") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    print(f"{test.name} {args.link}: {test.n_tokens} tokens of {test.n_sequences} sequences of {args.part}", flush=True)
    for name, outcome in outcomes.items():
        show(name, outcome)
    _, z = tuned[CONTROL]
    trained: list[Outcome] = []
    for seed in args.seeds:
        trials = gather_trials(config, tables, predictor, z, args.decisions, seed)
        torch.manual_seed(seed)
        policy = ImprovedPolicy(z)
        learn(policy, trials, seed=seed)

        def act(obs: dict[str, np.ndarray], policy: ImprovedPolicy = policy) -> np.ndarray:
            with torch.inference_mode():
                rows, nodes = policy({name: torch.from_numpy(value) for name, value in obs.items()})
                row = rows.argmax(-1)
                return torch.stack([row, nodes[torch.arange(len(row)), row].argmax(-1)], -1).numpy()

        player = Player("trained", lambda env, act=act: [act], options={"predictor": True, **TABLE})
        outcome = play_networks(player, served, workload)
        trained.append(outcome)
        show("shipped", outcome, str(seed))
    show("shipped", Outcome.mean(trained), "mean")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
