"""An independent judge of the default plan: passes, replica choice and cost formula are written here again in numpy.

It shares nothing with the simulator. On real traces, plans come from ``clustergym plan`` as files that SGLang reads.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from clustergym import TokenTrace, cli
from clustergym.moe_placement import ModelSpec, Simulator, Traffic, get_cluster
from clustergym.moe_placement.streams import sample_passes
from clustergym.planners.registry import make_planner
from clustergym.traces import SyntheticConfig, synthetic_trace

NODES, PER_NODE, SLOTS = 4, 4, 5
GPUS = NODES * PER_NODE
HIDDEN, INTERMEDIATE = 2048, 1408
INTRA_GB_S, INTER_GB_S = 200.0, 50.0
KERNELS = {"weights and tokens": (5.0, 0.05), "tokens": (0.0, 0.05)}
"""µs per active expert and per token-expert pair. Reading weights takes the same time in every plan, so it hides what
plans differ in: the judge measures with and without it."""
TOKENS_PER_RANK = {"prefill": 128, "decode": 32}
PASSES = 6
Plan = npt.NDArray[np.int64]
"""(L, G, S) expert in each slot"""


def serving_gpus(slots: npt.NDArray[np.int64], n_experts: int) -> npt.NDArray[np.int64]:
    """(G, E) SGLang's static rule: which GPU runs an expert for the tokens of a rank.

    A copy on the GPU itself, else the first on its node, else the ranks are dealt evenly over the copies.
    """
    chosen = np.empty((GPUS, n_experts), int)
    for e in range(n_experts):
        copies = sorted(set(np.nonzero(slots == e)[0].tolist()))
        left = 0
        for rank in range(GPUS):
            near = [g for g in copies if g == rank] or [g for g in copies if g // PER_NODE == rank // PER_NODE]
            if near:
                chosen[rank, e] = near[0]
            else:
                chosen[rank, e] = copies[left % len(copies)]
                left += 1
    return chosen


def pass_us(experts: npt.NDArray[np.int64], chosen: npt.NDArray[np.int64], phase: str, kernel: str) -> float:
    """Time of a layer in one pass: dispatch + slowest expert kernel + combine. ``experts`` is (T, K), rank by rank.

    The kernel of a GPU takes so much per active expert and per token-expert pair. Sending takes the bytes of the
    busiest GPU over its links. Prefill sends a token once to each GPU, and between nodes once to each node (DeepEP
    normal mode); decode sends it once per expert (low-latency mode).
    """
    n_tokens, top_k = experts.shape
    expert_us, pair_us = KERNELS[kernel]
    rank = np.arange(n_tokens) // (n_tokens // GPUS)
    gpu = chosen[rank[:, None], experts]
    kernel_us = max(
        expert_us * len(np.unique(experts[gpu == g])) + pair_us * np.count_nonzero(gpu == g) for g in range(GPUS)
    )
    copies = np.zeros((n_tokens, GPUS), int)
    np.add.at(copies, (np.repeat(np.arange(n_tokens), top_k), gpu.ravel()), 1)
    if phase == "prefill":
        copies = (copies > 0).astype(int)
    away = rank[:, None] // PER_NODE != np.arange(GPUS) // PER_NODE
    elsewhere = rank[:, None] != np.arange(GPUS)
    intra, inter = copies * (elsewhere & ~away), copies * away
    sent_inter = np.bincount(rank, weights=inter.sum(1), minlength=GPUS)
    received_inter = inter.sum(0)
    if phase == "prefill":
        # One copy per remote node crosses the network, to the GPU of the sender's number; NVLink does the rest.
        to_node = inter.reshape(n_tokens, NODES, PER_NODE).any(2)
        sent_inter = np.bincount(rank, weights=to_node.sum(1), minlength=GPUS)
        received_inter = np.zeros(GPUS)
        relayed = np.zeros(GPUS)
        for node in range(NODES):
            gateway = node * PER_NODE + rank % PER_NODE
            np.add.at(received_inter, gateway, to_node[:, node])
            np.add.at(relayed, gateway, inter[:, node * PER_NODE : (node + 1) * PER_NODE].sum(1))
        sent_intra = np.bincount(rank, weights=intra.sum(1), minlength=GPUS) + relayed
        received_intra = (intra + inter).sum(0)
    else:
        sent_intra, received_intra = np.bincount(rank, weights=intra.sum(1), minlength=GPUS), intra.sum(0)
    inter_us = np.maximum(sent_inter, received_inter) / INTER_GB_S
    busiest = max(inter_us + np.maximum(sent_intra, received_intra) / INTRA_GB_S)
    # One byte per element on the way out, two on the way back; a GB/s is a thousand bytes per µs.
    return kernel_us + busiest * HIDDEN * (1 + 2) / 1e3


def draw_passes(trace: TokenTrace, phase: str, rng: np.random.Generator) -> list[npt.NDArray[np.int64]]:
    """Token indices of passes with balanced ranks."""
    tokens, passes = TOKENS_PER_RANK[phase], []
    for _ in range(PASSES):
        if phase == "decode":  # every rank has running sequences, each at a random position
            passes.append(rng.choice(trace.n_tokens, GPUS * tokens, replace=False))
        else:  # every rank has consecutive tokens
            starts = rng.choice(trace.n_tokens // tokens, GPUS, replace=False) * tokens
            passes.append((starts[:, None] + np.arange(tokens)).ravel())
    return passes


def judge(plan: Plan, trace: TokenTrace, phase: str, kernel: str = "weights and tokens") -> float:
    """Mean time of a layer and pass."""
    passes, times = draw_passes(trace, phase, np.random.default_rng(1)), []
    for layer, slots in enumerate(plan):
        chosen = serving_gpus(slots, trace.n_experts)
        times += [pass_us(trace.experts[rows, layer].astype(int), chosen, phase, kernel) for rows in passes]
    return float(np.mean(times))


def plan_of(trace: Path, model: str, phase: str, folder: Path, *more: str) -> Plan:
    output = folder / "plan.json"
    command = ["plan", str(trace), "--engine", "sglang", "--phase", phase, "--model", model, "--cluster", "h800-4x4"]
    assert cli.main([*command, "--slots", str(SLOTS), *more, "-o", str(output)]) == 0
    table = np.array(json.loads(output.read_text())["physical_to_logical_map"])
    return table.reshape(len(table), GPUS, SLOTS)


def test_static_rule_of_a_small_instance() -> None:
    slots = np.full((GPUS, SLOTS), -1)
    slots[[1, 6, 9], 0] = 0
    chosen = serving_gpus(slots, 1)[:, 0]
    # Nodes 0, 1 and 2 have a copy. The ranks of node 3 are dealt over the three.
    assert chosen.tolist() == [1, 1, 1, 1, 6, 6, 6, 6, 9, 9, 9, 9, 1, 6, 9, 1]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_default_planner_beats_eplb(phase: str) -> None:
    """With a number of steps instead of seconds, so that the result does not depend on the machine."""
    config = SyntheticConfig(n_tokens=64_000, n_layers=2, first_layer=0, model="judged", popularity_skew=0.3)
    seen, unseen = synthetic_trace(config, seed=5).split(0.5, seed=0)
    model = ModelSpec("judged", 2, 64, 6, HIDDEN, INTERMEDIATE)
    simulator = Simulator(model, get_cluster("h800-4x4", slots_per_gpu=SLOTS), f"sglang-{phase}")
    passes = sample_passes(seen, simulator.n_gpus, Traffic(phase), 16)
    eplb = make_planner("eplb", simulator).plan([passes], simulator.static(2))
    planner = make_planner("anneal", simulator.spread_migration(10**12), iterations=20_000)
    ratio = judge(planner.plan([passes], eplb), unseen, phase) / judge(eplb, unseen, phase)
    print(f"{phase}: {ratio:.3f}")
    assert ratio < 0.97


@pytest.mark.skipif("CLUSTERGYM_JUDGE" not in os.environ, reason="set CLUSTERGYM_JUDGE=1, CLUSTERGYM_DATA; minutes")
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("model", ["deepseek-v2-lite", "gpt-oss-20b"])
def test_default_plan_on_real_traces(
    phase: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traces are the files moe/*.npz in the folder CLUSTERGYM_DATA.

    A bar that is out of reach is an expected failure: then not even the plan that the same planner makes on the judge's
    own tokens reaches it.
    """
    files = sorted(Path(os.environ["CLUSTERGYM_DATA"]).glob(f"moe/{model.replace('-', '_')}_*.npz"))
    seen, unseen = TokenTrace.concat([TokenTrace.load(file) for file in files]).split(0.5, seed=0)
    monkeypatch.setitem(globals(), "HIDDEN", 2048 if model == "deepseek-v2-lite" else 2880)
    monkeypatch.setitem(globals(), "SLOTS", 5 if model == "deepseek-v2-lite" else 3)
    seen_file, unseen_file = (part.save(tmp_path / f"{name}.npz") for name, part in (("s", seen), ("u", unseen)))
    kinds = {
        "default": plan_of(seen_file, model, phase, tmp_path),
        "eplb": plan_of(seen_file, model, phase, tmp_path, "--planner", "eplb"),
        "hindsight": plan_of(unseen_file, model, phase, tmp_path, "--force"),
    }
    n_dense, shares = len(kinds["eplb"]) - unseen.n_layers, {}
    for kernel in KERNELS:
        us = {name: judge(plan[n_dense:], unseen, phase, kernel) for name, plan in kinds.items()}
        shares[kernel] = us["default"] / us["eplb"], us["hindsight"] / us["eplb"]
    capsys.readouterr()
    for kernel, (share, hindsight) in shares.items():
        print(f"{model}, {phase}, kernel time by {kernel}: {share:.3f} of EPLB's time, hindsight {hindsight:.3f}")
    bar = {"prefill": 0.95, "decode": 0.92}[phase]
    for share, hindsight in shares.values():
        if min(share, hindsight) > bar:
            pytest.xfail(f"{share:.3f} of EPLB's time is above {bar}, and so is hindsight: {hindsight:.3f}")
        assert share <= bar
