"""The packing study: placements compared with a brute-force search, and grants that keep the class of a pod."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from packing import FITS, Decisions, Nodes, Packing, Pods, grants_for, pack

POD = st.tuples(st.sampled_from([1, 1, 1, 2]), st.integers(1, 1000), st.integers(0, 8), st.integers(0, 8))
NODE = st.tuples(st.integers(1, 3), st.integers(4, 16), st.integers(4, 16))


def reference(
    nodes: list[tuple[int, int, int]], pods: list[Any], fit: str, with_cpu: bool
) -> tuple[int, list[list[int]]]:
    """Try every node and GPU in order, in plain Python."""
    free = [[1000] * gpus for gpus, _, _ in nodes]
    cpu, memory = [node[1] for node in nodes], [node[2] for node in nodes]
    placed = 0
    for gpus, milli, need_cpu, need_memory in pods:
        best: tuple[float, int, list[int]] | None = None
        for n, row in enumerate(free):
            if with_cpu and (cpu[n] < need_cpu or memory[n] < need_memory):
                continue
            if gpus == 1:
                options = [([g], float(f)) for g, f in enumerate(row) if f >= milli]
            else:
                empty = [g for g, f in enumerate(row) if f == 1000]
                options = [(empty[:gpus], float(len(empty)))] if len(empty) >= gpus else []
            for chosen, left in options:
                score = 0.0 if fit == "first fit" else left
                if best is None or score < best[0]:
                    best = score, n, chosen
        if best is not None:
            _, n, chosen = best
            for g in chosen:
                free[n][g] -= milli
            cpu[n] -= need_cpu
            memory[n] -= need_memory
            placed += 1
    return placed, free


@settings(max_examples=150, deadline=None)
@given(st.lists(NODE, min_size=1, max_size=4), st.lists(POD, max_size=25), st.sampled_from(FITS), st.booleans())
def test_pods_are_placed_as_a_search_over_all_gpus_does(nodes: Any, pods: Any, fit: Any, with_cpu: bool) -> None:
    # Pods with several GPUs use them whole.
    pods = [(gpus, milli if gpus == 1 else 1000, cpu, memory) for gpus, milli, cpu, memory in pods]
    placed, free = reference(nodes, pods, fit, with_cpu)
    packing = Packing(Nodes(*np.array(nodes).T), fit, with_cpu)
    assert sum(packing.place(*one) for one in pods) == placed
    assert packing.free.tolist() == [gpu for row in free for gpu in row]
    assert packing.gpus_used == sum(gpu < 1000 for row in free for gpu in row)


def test_smaller_grants_need_fewer_gpus() -> None:
    pods = Pods(np.ones(8, int), np.full(8, 600), np.zeros(8, bool), np.zeros(8, int), np.zeros(8, int))
    nodes = Nodes(np.array([8]), np.array([0]), np.array([0]))
    assert pack(pods, pods.milli, nodes, "first fit", False) == (8, 8)
    assert pack(pods, pods.milli // 2, nodes, "first fit", False) == (8, 3)


def test_shared_pods_get_the_grant_of_a_simulated_pod_of_their_class_and_request() -> None:
    milli = np.array([300, 300, 600, 1000, 50])
    pods = Pods(np.array([1, 1, 1, 1, 1]), milli, np.array([True, False, True, True, False]), milli, milli)
    decisions = Decisions(
        request=np.array([30.0, 30.0, 60.0, 10.0]), grant=np.array([15.0, 30.0, 20.0, 8.0]),
        sensitive=np.array([True, False, True, False]), met=np.array([True, True, False, True]),
    )  # fmt: skip
    found, met = grants_for(pods, decisions, np.random.default_rng(0))
    # Requests below 10 % are simulated as 10 %; a whole GPU stays whole.
    assert found.tolist() == [150, 300, 200, 1000, 40]
    assert met.tolist() == [True, True, False, True, True]
