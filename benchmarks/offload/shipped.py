"""The shipped policy against the control and the best rule on the same test sequences, for several training seeds.

The control has 20 trials per parameter; the policies start from it. All of it is chosen on training sequences.

    python benchmarks/offload/shipped.py gpt_oss_20b.npz --predictor predictor --link pcie5 --json shipped.json
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro

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
    rules: tuple[str, ...] = ("frequency+transitions",)
    """Rules besides the control. This one is the best on all traces that we have."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Of the trials and of the network."""
    decisions: int = 30_000
    part: str = "test"
    tokens: int = 8000
    """Serve only about so many tokens, of sequences drawn at random."""
    evaluations: int = 20
    """Trials per parameter of control and rules."""
    json: Path | None = None


def main(args: Args) -> None:
    parts, predictor = split_sequences(load_once(args.trace)), Predictor.load(args.predictor)
    tables, train, test = Tables.count(parts["fit"]), parts["train"], first_tokens(parts[args.part], args.tokens)
    config = OffloadConfig(train, "all", tables, slots=args.slots, link=args.link)
    tuning = first_tokens(train, 8000)
    known = Workload(build_task(replace(config, trace=tuning), tables), tuning, tables, predictor, reuse=True)
    tuned = tune_all(known, [*args.rules, CONTROL], args.evaluations)
    served = replace(config, trace=test)
    workload = Workload(build_task(served, tables), test, tables, predictor)
    outcomes = {name: workload.run(*found) for name, found in tuned.items()}
    reference = outcomes[CONTROL]
    document = {"trace": test.name, "part": args.part, "tokens": test.n_tokens, "sequences": test.n_sequences,
                "link": args.link, "rows": []}  # fmt: skip

    def show(name: str, outcome: Outcome) -> None:
        row = row_of(name, tuned[name][0].kind if name in tuned else "trained", args.slots, outcome)
        row.against_control, row.against_control_ci95 = change(outcome, reference)
        if args.rules:
            row.against_best_rule, row.against_best_rule_ci95 = change(outcome, outcomes[args.rules[0]])
        document["rows"].append(row.as_dict())
        low, high = row.against_control_ci95
        against = "" if row.against_best_rule is None else f", {row.against_best_rule:+.2%} against {args.rules[0]}"
        print(
            f"{name}: {row.stall_ms_per_token:.4f} ms per token, {row.against_control:+.2%} ({low:+.2%} … {high:+.2%}) "
            f"against the control{against}, {row.tokens_per_s:.0f} tokens/s", flush=True,
        )  # fmt: skip
        if args.json is not None:
            args.json.write_text(json.dumps(document, indent=1) + "\n")

    print(f"{test.name} {args.link}: {test.n_tokens} tokens of {test.n_sequences} sequences of {args.part}", flush=True)
    for name, outcome in outcomes.items():
        show(name, outcome)
    _, z = tuned[CONTROL]
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
        show(f"shipped, seed {seed}", play_networks(player, served, workload))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
