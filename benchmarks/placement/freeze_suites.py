"""Write the suites of ``clustergym bench``: the definitions of their tasks, with the hashes of their data.

    python benchmarks/placement/freeze_suites.py             # only for a suite that has not been published

A published suite is never changed. For a better one, add a new version here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace

from clustergym.bench.suites import (
    FOLDER,
    AllocationTask,
    Limits,
    OffloadTask,
    PlacementTask,
    Suite,
    trace_sha256,
    workload_sha256,
)
from clustergym.gpu_allocation.specs import AllocationConfig
from clustergym.gpu_allocation.workload import load_workload
from clustergym.ids import OFFLOADING
from clustergym.moe_offload.specs import OffloadConfig
from clustergym.moe_placement.specs import get_model
from clustergym.planners.evaluation import deal_streams
from clustergym.traces import SyntheticConfig

RECORDED = "tiny_moe_domains"
SERVED = ("slots", "per_layer", "gpus", "batch", "link")
LIMITS = Limits(seconds=20.0, memory_mb=6144, start_seconds=120.0)


def synthetic(model: str, n_tokens: int, n_layers: int, n_domains: int) -> dict[str, object]:
    """Options of a generated trace with the routing of a model, on its first layers."""
    spec = get_model(model)
    layers = spec.layer_ids[:n_layers]
    config = SyntheticConfig.for_model(spec, n_layers=n_layers, layers=layers, n_tokens=n_tokens, n_domains=n_domains)
    default = asdict(SyntheticConfig())
    return {key: value for key, value in asdict(config).items() if value != default[key]} | {"seed": 1}


PLACEMENT = [
    PlacementTask("small-4x4-prefill-drift", RECORDED, "", "h800-4x4", "sglang-prefill", "drift", 64, 2, 3, 5),
    PlacementTask("small-2x8-decode-drift", RECORDED, "", "h800-2x8", "sglang-decode", "drift", 32, 4, 3, 5),
    PlacementTask("small-4x4-vllm-switch", RECORDED, "", "h800-4x4", "vllm-deepep", "switch", 32, 4, 3, 5),
    PlacementTask("small-4x8-trtllm-replay", RECORDED, "", "h800-4x8", "tensorrt-llm", "replay", 16, 4, 3, 5),
    PlacementTask(
        "v2lite-4x4-prefill-switch", "synthetic", "", "h800-4x4", "sglang-prefill", "switch", 64, 2, 3, 5,
        model="deepseek-v2-lite", synthetic=synthetic("deepseek-v2-lite", 160_000, 4, 10),
    ),
    # The sizes of the public EPLB evolution benchmark: 288 slots on 32 GPUs in 4 nodes, 8 groups.
    PlacementTask(
        "v3-4x8-prefill-drift", "synthetic", "", "h800-4x8", "sglang-prefill", "drift", 64, 2, 2, 4,
        model="deepseek-v3", synthetic=synthetic("deepseek-v3", 200_000, 2, 10), slots_per_gpu=9,
    ),
]  # fmt: skip
# Every option is written down, so that another default does not change the task.
OPTIONS = {
    f.name: getattr(AllocationConfig(), f.name)
    for f in fields(AllocationConfig)
    if f.name not in ("history", "workload", "mix")
}
ALLOCATION = [
    AllocationTask("requests-only", "GPUAllocation-v0", 64, options=OPTIONS),
    AllocationTask("history", "GPUAllocationHistory-v0", 64, options=OPTIONS),
    AllocationTask("history-without-waiting", "GPUAllocationHistory-v0", 64, options=OPTIONS | {"reward": "seed"}),
]
OFFLOAD = [
    OffloadTask(
        name.lower() or "pool", f"MoEOffload{name}-v0", "tiny_decode", "", streams, 128,
        options={key: getattr(OffloadConfig(**arguments), key) for key in SERVED} | {"expert_mb": 13.2},
    )
    for (name, arguments), streams in zip(OFFLOADING.items(), (48, 48, 12, 48), strict=True)
]  # fmt: skip


def main() -> None:
    tasks = []
    for task in PLACEMENT:
        frozen = replace(task, data_sha256=trace_sha256(task.load()), limits=LIMITS)
        for track in (frozen.on_track(None), frozen.on_track(b"any secret")):
            deals = deal_streams(track.protocol.parts(track.load())[1], track.simulator.n_gpus, track.protocol)
            # Every run has sequences of its own, so that runs are independent.
            assert deals.groups == track.streams, (task.name, deals.groups)
        tasks.append(frozen)
    suites = [
        Suite(
            "placement-v2",
            "Place experts after every interval of passes. Disjoint sequences for every run, no token served twice. "
            "Score: share of the time of a pass, migration included, that is saved compared with EPLB.",
            tuple(tasks),
            ("small-4x4-prefill-drift", "small-2x8-decode-drift", "small-4x4-vllm-switch"),
        ),
        Suite(
            "allocation-v2",
            "Allocate GPU cores and memory to streams of pods that no trainer sees. Score: position of the mean reward "
            "between the rule grant (0) and an oracle (1).",
            tuple(replace(t, data_sha256=workload_sha256(load_workload(None)), limits=LIMITS) for t in ALLOCATION),
            ("requests-only", "history"),
        ),
        Suite(
            "offload-v1",
            "Decide which experts of a model stay in GPU memory, token by token, and which are loaded ahead. Score: "
            "share of LRU's stall on the same sequence that is saved.",
            tuple(replace(t, data_sha256=trace_sha256(t.load()), limits=LIMITS) for t in OFFLOAD),
            ("pool",),
        ),
    ]
    for suite in suites:
        path = FOLDER / f"{suite.name}.json"
        path.write_text(json.dumps(asdict(suite), indent=1) + "\n")
        print(f"{path}: {len(suite.tasks)} tasks, sha256 {suite.sha256}")


if __name__ == "__main__":
    main()
