"""Clusters with a measured bandwidth for every pair of GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clustergym.moe_placement import ClusterSpec, ModelSpec, Simulator, get_cluster
from clustergym.moe_placement.streams import Interval
from clustergym.plans.links import fit_to_links
from instances import made_profile

NODES, PER_NODE, EXPERTS, TOP_K = 2, 3, 12, 3
GPUS, TOKENS = NODES * PER_NODE, 90
MODEL = ModelSpec("m", 2, EXPERTS, TOP_K, 512, 256)
EQUAL = ClusterSpec("c", NODES, PER_NODE, 2)


def instance(seed: int = 0) -> tuple[Interval, np.ndarray]:
    """Two passes, and a placement with one replica of each expert, so that nobody chooses replicas."""
    rng = np.random.default_rng(seed)
    experts = np.stack([[rng.permutation(EXPERTS)[:TOP_K] for _ in range(2 * TOKENS)] for _ in range(2)])
    rows = rng.permutation(2 * TOKENS).astype(np.int32).reshape(2, TOKENS)
    placement = np.stack([rng.permutation(EXPERTS).reshape(GPUS, 2) for _ in range(2)]).astype(np.int16)
    return Interval.even(experts.astype(np.int16), rows, GPUS), placement


def matrix(seed: int = 0) -> tuple[tuple[float, ...], ...]:
    found = np.random.default_rng(seed).uniform(5, 200, (GPUS, GPUS))
    np.fill_diagonal(found, 0)
    return tuple(map(tuple, found.tolist()))


def bytes_sent(interval: Interval, placement: np.ndarray, transport: str, layer: int, p: int) -> np.ndarray:
    """(G, G) copies from row to column, token by token."""
    sent = np.zeros((GPUS, GPUS))
    for t, row in enumerate(interval.rows[p]):
        home = int(np.searchsorted(interval.rank_start[p], t, side="right")) - 1
        holders = [int(np.argwhere(placement[layer] == e)[0, 0]) for e in interval.experts[layer, row]]
        if transport == "per-expert":
            for g in holders:
                sent[home, g] += 1
            continue
        for node in {g // PER_NODE for g in holders}:
            relay = node * PER_NODE + home % PER_NODE  # it forwards the one copy that a node gets
            sent[home, relay] += 1
            for g in {g for g in holders if g // PER_NODE == node} - {relay}:
                sent[relay, g] += 1
    np.fill_diagonal(sent, 0)
    return sent


@pytest.mark.parametrize("transport", ["per-expert", "dedup"])
def test_times_are_those_of_a_reference(transport: str) -> None:
    """Per byte 1 / bandwidth of the pair; the busiest GPU inside a node and the busiest one between nodes."""
    interval, placement = instance()
    cluster = replace(EQUAL, link_gb_s=matrix())
    simulator = Simulator(MODEL, cluster, made_profile("rank-nearest", transport))
    served = simulator.evaluate(interval, placement)
    costs, node = simulator.interval_costs(interval), np.arange(GPUS) // PER_NODE
    same = node[:, None] == node
    for layer in range(2):
        for p in range(2):
            sent = bytes_sent(interval, placement, transport, layer, p)
            for part, start, near_us, far_us, way in (
                (0, costs.dispatch_us, costs.dispatch_intra_us, costs.dispatch_inter_us, sent),
                (2, costs.combine_us, costs.combine_intra_us, costs.combine_inter_us, sent.T),
            ):
                with np.errstate(divide="ignore", invalid="ignore"):
                    us = way / np.array(cluster.link_gb_s)
                np.fill_diagonal(us, 0)
                expected = start
                for kind, rate in (
                    (same, near_us * cluster.intra_gb_s), (~same, far_us * cluster.inter_gb_s),
                ):  # fmt: skip
                    busy = np.where(kind, us, 0)
                    expected += rate * max(busy.sum(1).max(), busy.sum(0).max())
                assert served.pass_us[layer, p, part] == pytest.approx(expected)
    np.testing.assert_allclose(simulator.pass_times(interval, placement), served.pass_us.sum(2))


@pytest.mark.parametrize("transport", ["per-expert", "dedup", "allgather"])
def test_equal_links_are_a_special_case(transport: str) -> None:
    interval, placement = instance(1)
    node = np.arange(GPUS) // PER_NODE
    links = np.where(node[:, None] == node, EQUAL.intra_gb_s, EQUAL.inter_gb_s)
    times = [
        Simulator(MODEL, cluster, made_profile("rank-nearest", transport)).evaluate(interval, placement).pass_us
        for cluster in (EQUAL, replace(EQUAL, link_gb_s=tuple(map(tuple, links.tolist()))))
    ]
    np.testing.assert_allclose(*times)


def test_placements_are_fitted_to_the_links() -> None:
    """All links of GPU 0 are slow. The busiest contents leave it, every layer stays legal, and no layer is slower."""
    interval, placement = instance(2)
    links = np.full((GPUS, GPUS), 100.0)
    links[0], links[:, 0] = 4.0, 4.0
    cluster = replace(EQUAL, link_gb_s=tuple(map(tuple, links.tolist())))
    simulator = Simulator(MODEL, cluster, made_profile("rank-nearest", "per-expert"))

    def times(placed: np.ndarray) -> np.ndarray:
        return simulator.evaluate(interval, placed, check=False).time_us

    fitted = fit_to_links(placement, times, rounds=60)
    simulator.check(fitted)
    assert (times(fitted) < times(placement)).all()
    load = np.bincount(interval.experts[0].ravel(), minlength=EXPERTS)
    assert load[fitted[0, 0]].sum() < load[fitted[0]].sum(1).mean()


def test_matrix_from_yaml(tmp_path: Path) -> None:
    path, gb_s = tmp_path / "measured.yaml", [[0, 100, 20, 20], [50, 0, 20, 20], [10, 20, 0, 80], [20, 20, 80, 0]]
    us = [[1000 / v if v else 0 for v in row] for row in gb_s]
    for key, rows in (("link_gb_s", gb_s), ("link_us_per_mb", us)):
        path.write_text(f"n_nodes: 2\ngpus_per_node: 2\n{key}: {rows}\n")
        cluster = get_cluster(str(path))
        np.testing.assert_allclose(cluster.link_gb_s, gb_s)
        assert cluster.intra_gb_s == pytest.approx(4 / (1 / 100 + 1 / 50 + 2 / 80))
        assert cluster.inter_gb_s == pytest.approx(8 / (7 / 20 + 1 / 10))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("[[0, 1], [1, 0]]", "link_gb_s is not 4 × 4: one row per GPU"),
        ("[[0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]", "link_gb_s from GPU 2 to GPU 3 is 0.0"),
        ("[[0, .nan, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]]", "link_gb_s from GPU 0 to GPU 1 is nan"),
        ("[[0, fast]]", "expected one of link_gb_s and link_us_per_mb, a list of rows of numbers"),
    ],
)
def test_broken_matrices_are_refused(rows: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(f"n_nodes: 2\ngpus_per_node: 2\nlink_gb_s: {rows}\n")
    with pytest.raises(ValueError, match=message):
        get_cluster(str(path))
