"""An independent judge of plans: passes, replica choice and cost formula are written here again in numpy.

It shares nothing with the simulator.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clustergym import TokenTrace

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


def serving_gpus(
    slots: npt.NDArray[np.int64], n_experts: int, state: str = "older", rng: np.random.Generator | None = None
) -> npt.NDArray[np.int64]:
    """(G, E) SGLang's static rule: which GPU runs an expert for the tokens of a rank.

    A copy on the GPU itself, else the first on its node, else the ranks are dealt evenly over the copies: ``older``,
    before SGLang 0.5.16. ``rebalanced`` is the rule since then: if all copies are on one node, its ranks are dealt,
    too. ``start`` is what it does until its first rebalancing: these ranks draw a copy, each for itself.
    """
    chosen = np.empty((GPUS, n_experts), int)
    for e in range(n_experts):
        copies = sorted(set(np.nonzero(slots == e)[0].tolist()))
        left = 0
        for rank in range(GPUS):
            on_node = [g for g in copies if g // PER_NODE == rank // PER_NODE]
            if state != "older" and len(on_node) == len(copies) > 1:
                on_node = []
            near = [g for g in copies if g == rank] or on_node
            if near:
                chosen[rank, e] = near[0]
            elif state == "start":
                assert rng is not None
                chosen[rank, e] = copies[rng.integers(len(copies))]
            else:
                chosen[rank, e] = copies[left % len(copies)]
                left += 1
    return chosen


def dealt(
    slots: npt.NDArray[np.int64], experts: npt.NDArray[np.int64], n_experts: int, rule: str
) -> npt.NDArray[np.int64]:
    """(T, K) GPU that serves each use of an expert in other engines. ``experts`` is (T, K), rank by rank.

    ``token-hash`` (vLLM): the token's place in its rank's batch, hashed. ``round-robin`` (TensorRT-LLM): a rank goes
    through the copies of an expert, use by use. ``rank-mod`` (vllm-ascend): copy number rank modulo their number.
    """
    tokens = len(experts) // GPUS
    gpu = np.empty(experts.shape, int)
    for e in range(n_experts):
        copies = np.array(sorted(set(np.nonzero(slots == e)[0].tolist())))
        token, k = np.nonzero(experts == e)
        number = rank = token // tokens
        if rule == "token-hash":
            number = token % tokens * 2654435769 % 2**32
        elif rule == "round-robin":
            number = np.arange(len(token)) - np.searchsorted(rank, rank) + rank
        gpu[token, k] = copies[number % len(copies)]
    return gpu


def pass_us(experts: npt.NDArray[np.int64], gpu: npt.NDArray[np.int64], transport: str, kernel: str) -> float:
    """Time of a layer in one pass: dispatch + slowest expert kernel + combine. Both are (T, K), rank by rank.

    The kernel of a GPU takes so much per active expert and per token-expert pair. Sending takes the bytes of the
    busiest GPU over its links. ``dedup`` sends a token once to each GPU, and between nodes once to each node (DeepEP
    normal mode); ``per-expert`` sends it once per expert (low-latency mode); ``allgather`` to every GPU.
    """
    n_tokens, top_k = experts.shape
    expert_us, pair_us = KERNELS[kernel]
    rank = np.arange(n_tokens) // (n_tokens // GPUS)
    kernel_us = max(
        expert_us * len(np.unique(experts[gpu == g])) + pair_us * np.count_nonzero(gpu == g) for g in range(GPUS)
    )
    copies = np.zeros((n_tokens, GPUS), int)
    np.add.at(copies, (np.repeat(np.arange(n_tokens), top_k), gpu.ravel()), 1)
    if transport == "dedup":
        copies = (copies > 0).astype(int)
    elif transport == "allgather":
        copies[:] = 1
    away = rank[:, None] // PER_NODE != np.arange(GPUS) // PER_NODE
    elsewhere = rank[:, None] != np.arange(GPUS)
    intra, inter = copies * (elsewhere & ~away), copies * away
    sent_inter = np.bincount(rank, weights=inter.sum(1), minlength=GPUS)
    received_inter = inter.sum(0)
    if transport == "dedup":
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


def judge(
    plan: Plan, trace: TokenTrace, phase: str, kernel: str = "weights and tokens", state: str = "older",
    transport: str | None = None, seed: int = 1,
) -> float:  # fmt: skip
    """Mean time of a layer and pass. ``state`` is of SGLang, or another engine's rule (:func:`dealt`)."""
    passes, times = draw_passes(trace, phase, np.random.default_rng(seed)), []
    transport = transport or {"prefill": "dedup", "decode": "per-expert"}[phase]
    rank = np.repeat(np.arange(GPUS), TOKENS_PER_RANK[phase])[:, None]
    for layer, slots in enumerate(plan):
        if sglang := state in ("older", "start", "rebalanced"):
            chosen = serving_gpus(slots, trace.n_experts, state, np.random.default_rng(layer))
        for rows in passes:
            experts = trace.experts[rows, layer].astype(int)
            gpu = chosen[rank, experts] if sglang else dealt(slots, experts, trace.n_experts, state)
            times.append(pass_us(experts, gpu, transport, kernel))
    return float(np.mean(times))
