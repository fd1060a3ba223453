"""vLLM: a JSON list of slots per MoE layer. Upstream vLLM loads no placement file yet."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote

from clustergym.common.files import write_atomically
from clustergym.moe_placement.profiles import EngineProfile
from clustergym.plans.engines.base import Engine, EnginePlan, Launch, expect_list, read_json
from clustergym.traces.readers.slot_plans import SlotRows, checked_rows

_BACKEND = {
    "allgather": "allgather_reducescatter",
    "per-expert": "deepep_low_latency",
    "dedup": "deepep_high_throughput",
}


def write(path: Path, plan: EnginePlan) -> None:
    """MoE layers are counted from 0, without dense and MTP layers (a draft model is balanced on its own)."""
    write_atomically(path, json.dumps(list(plan.moe_rows().values())) + "\n")


def read(path: Path) -> SlotRows:
    return checked_rows(dict(enumerate(expect_list(read_json(path), path))), path)


def launch(path: Path, plan: EnginePlan, profile: EngineProfile, n_nodes: int, both_phases: bool) -> Launch:
    config = json.dumps({"num_redundant_experts": plan.n_redundant})
    command = (
        f"--data-parallel-size {plan.n_gpus} --data-parallel-size-local {plan.n_gpus // n_nodes} "
        f"--enable-expert-parallel --all2all-backend {_BACKEND[profile.transport]} --enable-eplb "
        f"--eplb-config {quote(config)}, with the environment variable CLUSTERGYM_EPLB_PLAN={quote(str(path))}"
    )
    static = json.dumps({"num_redundant_experts": plan.n_redundant, "initial_expert_map_path": str(path)})
    warnings = (
        "upstream vLLM loads no placement file: install clustergym beside it, and its EPLB policy returns this plan at "
        "every rebalancing",
        f"a vLLM with pull request 49572 loads it at the start, without clustergym: --eplb-config {quote(static)}",
    )
    return Launch(command, profile, warnings)


ENGINE = Engine("vllm", (".json",), write, read, launch, counts_dense=False)
