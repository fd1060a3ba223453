"""The simulator against a brute-force reference, against itself from scratch, and against numbers worked out by hand."""

from __future__ import annotations

import re
import shutil
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym import TokenTrace
from clustergym.common.compiling import source_fingerprint
from clustergym.common.threads import spread
from clustergym.moe_placement import ClusterSpec, ModelSpec, Simulator, Window
from clustergym.moe_placement.kernels import compile as compiling
from clustergym.moe_placement.kernels import state
from clustergym.moe_placement.kernels.cost import layer_time
from clustergym.moe_placement.kernels.counting import count_window
from clustergym.moe_placement.kernels.eplb import eplb_slots
from clustergym.moe_placement.kernels.index import token_index
from clustergym.moe_placement.kernels.lookahead import look_ahead
from clustergym.moe_placement.kernels.operations import apply_operation, change, resolve
from clustergym.moe_placement.kernels.replicas import hash31, set_first_placement
from clustergym.moe_placement.kernels.state import SimulationState
from clustergym.moe_placement.kernels.token_sets import popcount
from clustergym.moe_placement.simulator import allocate_simulation, uses_of
from instances import Instance, random_instance, random_placement
from reference import LayerResult, busiest, serve, token_hash

MODES = ("dedup", "per-expert", "stay")
COUNTS = (
    "visits", "node_visits", "return_visits", "return_node_visits", "pairs", "gpu_uses", "destination", "received",
    "n_replicas", "replica_choice", "held_before", "load",
)  # fmt: skip

instances = st.builds(
    random_instance,
    st.integers(0, 2**32),
    nodes=st.integers(1, 3),
    per_node=st.integers(1, 3),
    n_experts=st.integers(2, 8),
    top_k=st.integers(1, 3),
    tokens=st.integers(1, 12),
    layers=st.integers(1, 3),
    spare_slots=st.integers(0, 3),
    fill=st.sampled_from([0.0, 0.6, 1.0]),
    pads=st.sampled_from([0.0, 0.2, 0.7]),
)
one_layer = st.builds(
    random_instance,
    st.integers(0, 2**32),
    nodes=st.integers(1, 3),
    per_node=st.integers(1, 3),
    n_experts=st.integers(2, 8),
    top_k=st.integers(1, 3),
    tokens=st.integers(1, 12),
    layers=st.just(1),
    spare_slots=st.integers(0, 2),
    fill=st.sampled_from([0.3, 0.7, 1.0]),
)


def expected(case: Instance, comm: str) -> list[LayerResult]:
    window = case.window
    return serve(
        window.experts.tolist(), window.rows.tolist(), window.home.tolist(), case.placement.tolist(),
        case.model, case.cluster, comm, case.passes, case.before.tolist(),
    )  # fmt: skip


def check_against_reference(case: Instance, comm: str) -> None:
    simulator = case.simulator(comm)
    served = simulator.evaluate(case.window, case.placement, case.before)
    sim = simulator.count(case.window, case.placement, case.before)
    gpus = case.cluster.n_gpus
    for layer, truth in enumerate(expected(case, comm)):
        links = {(g, h): int(n) for (g, h), n in np.ndenumerate(served.copies[layer]) if n}
        assert links == dict(truth.links)
        pairs = {(e, g): int(n) for (e, g), n in np.ndenumerate(sim.pairs[layer, 0]) if n}
        assert pairs == dict(truth.pairs)
        assert served.pairs[layer].tolist() == [
            sum(n for (_, h), n in truth.pairs.items() if h == g) for g in range(gpus)
        ]
        counts = np.stack([uses_of(sim, simulator.network, g)[layer, 0] for g in range(gpus)], 1)
        assert counts.tolist() == [[ran.count(g) for g in range(gpus)] for ran in truth.ran]
        if comm == "stay":
            assert sim.destination[layer, 0].tolist() == truth.stays
        received = {(g, bool(far)): int(n) for (g, far), n in np.ndenumerate(sim.received[layer]) if n}
        assert received == dict(+truth.received)
        assert served.moves[layer] == truth.received.total()
        between = sum(
            n for (g, h), n in truth.links.items() if g // case.cluster.gpus_per_node != h // case.cluster.gpus_per_node
        )
        for found, known in (
            (served.dispatch_us, truth.dispatch_us),
            (served.compute_us, truth.compute_us),
            (served.combine_us, truth.combine_us),
            (served.time_us, truth.time_us),
            (served.migration_us, truth.migration_us),
            (served.inter_node_bytes, between * case.model.hidden * case.model.dispatch_bytes),
            (served.gpus_per_token, np.mean([len(set(ran)) for ran in truth.ran])),
        ):
            assert found[layer] == pytest.approx(known, rel=1e-9, abs=0)


@settings(max_examples=3000, deadline=None)
@given(instances, st.sampled_from(MODES))
def test_evaluate_equals_the_reference(case: Instance, comm: str) -> None:
    check_against_reference(case, comm)


@pytest.mark.parametrize("comm", MODES)
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 61), (61, 1), (31, 2), (8, 8), (3, 21), (2, 127)])
def test_many_gpus_equal_the_reference(nodes: int, per_node: int, comm: str) -> None:
    """61 GPUs are the last that fit, beside the pad, into the bits of one integer, and 254 into a byte."""
    case = random_instance(
        nodes, nodes=nodes, per_node=per_node, n_experts=9, top_k=6, tokens=200, layers=2, spare_slots=1, fill=0.5
    )
    check_against_reference(case, comm)


@pytest.mark.parametrize("tokens", [2**15 - 1, 2**15])
def test_windows_with_more_pairs_than_16_bits_count(tokens: int) -> None:
    case = random_instance(1, nodes=2, per_node=2, n_experts=6, top_k=2, tokens=tokens, layers=1, spare_slots=1)
    check_against_reference(case, "dedup")
    simulator = case.simulator("dedup")
    sim = simulator.count(case.window, case.placement, case.before)
    for e in range(6):
        _, source, target, victim = resolve(sim, 0, e, next(g for g in range(4) if e not in sim.slots[0, g]))
        apply_operation(sim, 0, e, source, target, victim, simulator.network, 1)
    assert_same_counts(sim, scratch(case, "dedup", sim.slots))


def test_hash_is_the_reference_s() -> None:
    rows = [*range(2000), 2**31 - 1, 2**31 - 2, 2**30, *np.random.default_rng(0).integers(0, 2**31, 2000).tolist()]
    assert [hash31(r) for r in rows] == [token_hash(r) for r in rows]


# -- the index of a trace ------------------------------------------------------------------------------------------


def trace_of(
    seed: int, lengths: list[int], n_experts: int, top_k: int, layers: int = 2, pads: float = 0.2
) -> TokenTrace:
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((sum(lengths), layers, n_experts)), axis=2)[:, :, :top_k].astype(np.int16)
    experts[rng.random(experts.shape) < pads] = -1
    return TokenTrace(experts, n_experts=n_experts, seq_lens=np.array(lengths))


def test_index_lists_the_uses_of_each_expert_in_each_piece() -> None:
    trace = trace_of(0, [1500, 40, 513], 6, 3)
    index = token_index(trace, 7)
    assert index is not None
    # Equal pieces of at most 512 tokens, none across two sequences.
    assert index.piece_starts.tolist() == [0, 500, 1000, 1500, 1540, 1796, 2053]
    for layer in range(2):
        for piece, (start, end) in enumerate(pairwise(index.piece_starts)):
            off = index.use_starts[layer, piece]
            assert len(off) == 8
            for e in range(7):
                rows = [r for r in range(start, end) if e in trace.experts[r, layer]]
                first = [trace.experts[r, layer][trace.experts[r, layer] >= 0][0] == e for r in rows]
                entries = [(r - start) << 1 | int(f) for r, f in zip(rows, first, strict=True)]
                assert index.uses[layer, off[e] : off[e + 1]].tolist() == entries
        # The same as sets of rows, with the rows that choose the upper of two replicas as one more column.
        users = np.array([[e in trace.experts[r, layer] for e in range(7)] for r in range(trace.n_tokens)])
        upper = np.array([token_hash(r) * 2 >> 31 for r in range(trace.n_tokens)], bool)
        rows = np.unpackbits(index.user_bits[layer].T.copy().view(np.uint8), axis=1, bitorder="little").astype(bool)
        np.testing.assert_array_equal(rows[:, 64 : 64 + trace.n_tokens], np.column_stack([users, upper]).T)
        assert not rows[:, :64].any()
        assert not rows[:, 64 + trace.n_tokens :].any()


@given(st.integers(0, 2**64 - 1))
def test_popcount(x: int) -> None:
    assert popcount(np.uint64(x)) == x.bit_count()


def test_no_index_larger_than_the_trace() -> None:
    """A piece lists all experts: where sequences are short, each window indexes its own rows."""
    assert token_index(trace_of(0, [2] * 30, 6, 3), 6) is None
    assert token_index(trace_of(0, [3] * 30, 6, 3), 6) is not None


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(MODES), st.booleans())
def test_windows_count_the_same_by_the_trace_s_index_and_by_their_own(seed: int, comm: str, scattered: bool) -> None:
    rng = np.random.default_rng(seed)
    trace = trace_of(seed, rng.integers(8, 40, 6).tolist(), 8, 4, layers=1)
    model = ModelSpec("m", 1, 8, 4, 64, 64)
    simulator = Simulator(model, ClusterSpec("c", 2, int(rng.integers(1, 4)), 6), comm)
    tokens, whole = int(rng.choice([50, 64, 150])), Window.whole(trace, simulator.n_gpus)
    if scattered:
        rows = rng.integers(0, trace.n_tokens, tokens)
    else:
        # Whole sequences in any order, cut at both ends.
        order = np.concatenate([np.arange(a, a + n) for a, n in zip(trace.seq_starts, trace.seq_lens, strict=True)])
        rows = np.roll(np.resize(order, 400), int(rng.integers(400)))[:tokens]
    window = Window(whole.experts, rows.astype(np.int32), rng.integers(0, simulator.n_gpus, tokens).astype(np.int16))
    placement = random_placement(rng, 1, simulator.n_gpus, simulator.n_slots, 8, float(rng.choice([0.1, 0.5])))
    own = simulator.count(window, placement)
    tensors = allocate_simulation(
        1, 1, tokens, experts=8, top_k=4, slots=simulator.n_slots, network=simulator.network, index=token_index(trace, 8),
    )  # fmt: skip
    shared = SimulationState(**{name: tensor.numpy() for name, tensor in tensors.items()})
    shared.rows[0, 0], shared.origin[0, 0], shared.slots[0] = window.rows, window.home, placement[0]
    set_first_placement(shared, 0, simulator.network)
    count_window(shared, 0, 0, window.experts, 0, simulator.network)
    assert not shared.own_index[0]
    assert own.own_index[0]
    assert_same_traffic(shared, own, simulator)
    for e, node in rng.integers(0, [8, 3 * simulator.n_gpus], (6, 2)):
        ahead = np.zeros((2, 3 * simulator.n_gpus))
        for sim, result in zip((own, shared), ahead, strict=True):
            look_ahead(sim, 0, e, simulator.costs, simulator.network, 2, result)
        np.testing.assert_array_equal(*ahead)
        assert_same_traffic(shared, own, simulator)
        kind, source, target, victim = resolve(own, 0, e, node)
        if kind not in (state.OP_NOTHING, state.OP_ILLEGAL):
            for sim in (own, shared):
                apply_operation(sim, 0, e, source, target, victim, simulator.network, 1)
        assert_same_traffic(shared, own, simulator)


def assert_same_traffic(shared: SimulationState, own: SimulationState, simulator: Simulator) -> None:
    """The trace's index counts by sets of tokens in mode dedup, an own index token by token."""
    if simulator.comm != "dedup":
        assert_same_counts(shared, own)
        return
    assert_same_counts(shared, own._replace(gpu_uses=shared.gpu_uses))
    tokens = np.unpackbits(shared.slot_tokens[0, 0].view(np.uint8), axis=2, bitorder="little")[
        :, :, : own.rows.shape[2]
    ]
    for g in range(simulator.n_gpus):
        runs = tokens[g, shared.slots[0, g] >= 0].sum(0)
        np.testing.assert_array_equal(runs, uses_of(own, simulator.network, g)[0, 0])


# -- incremental = from scratch ------------------------------------------------------------------------------------


def scratch(case: Instance, comm: str, slots: np.ndarray) -> SimulationState:
    """A fresh count of the placement in ``slots`` (1, G, S), after the case's ``before``."""
    return case.simulator(comm).count(case.window, np.ascontiguousarray(slots), case.before)


def assert_same_counts(sim: SimulationState, fresh: SimulationState) -> None:
    for name in COUNTS:
        np.testing.assert_array_equal(getattr(sim, name), getattr(fresh, name), err_msg=name)
    for e, n in enumerate(sim.n_replicas[0]):
        assert sim.replicas[0, e, :n].tolist() == fresh.replicas[0, e, :n].tolist()
    # Slot order carries no meaning.
    np.testing.assert_array_equal(np.sort(sim.slots), np.sort(fresh.slots))


def copy_of(sim: SimulationState) -> SimulationState:
    return SimulationState(*(array.copy() for array in sim))


def what_an_action_means(case: Instance, sim: SimulationState, e: int, node: int) -> tuple[int, int, int, int]:
    """The rules of the action table, from sets."""
    gpus, slots = case.cluster.n_gpus, sim.slots.shape[2]
    held = [{int(x) for x in gpu if x >= 0} for gpu in sim.slots[0]]
    pairs = sim.pairs[0, 0]
    kind, g = divmod(node, gpus)
    homes = [h for h in range(gpus) if e in held[h]]
    nothing = (state.OP_ILLEGAL, -1, -1, -1)
    if kind == 0:
        if e in held[g]:
            return state.OP_NOTHING, -1, -1, -1
        # The replica on the busiest GPU moves (lowest index at a tie), against the least used one that the source lacks.
        source = max(homes, key=lambda h: (pairs[:, h].sum(), -h))
        if len(held[g]) < slots:
            return state.OP_PLACE, source, g, -1
        victims = sorted(held[g] - held[source], key=lambda v: (pairs[v, g], v))
        return (state.OP_SWAP, source, g, victims[0]) if victims else nothing
    if kind == 1:
        return (state.OP_ADD, -1, g, -1) if e not in held[g] and len(held[g]) < slots else nothing
    return (state.OP_DELETE, g, -1, -1) if e in held[g] and len(homes) > 1 else nothing


@settings(max_examples=300, deadline=None)
@given(one_layer, st.sampled_from(MODES), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 26)), max_size=12))
def test_operations_equal_a_fresh_count_and_undo_exactly(
    case: Instance, comm: str, actions: list[tuple[int, int]]
) -> None:
    simulator = case.simulator(comm)
    sim = simulator.count(case.window, case.placement, case.before)
    for e, node in ((e % case.model.n_experts, node % (3 * case.cluster.n_gpus)) for e, node in actions):
        meaning = resolve(sim, 0, e, node)
        assert tuple(int(x) for x in meaning) == what_an_action_means(case, sim, e, node)
        kind, source, target, victim = meaning
        if kind in (state.OP_NOTHING, state.OP_ILLEGAL):
            continue
        before = copy_of(sim)
        forth = (source, target, victim, target, source)
        back = (target, source, victim, source, target)
        change(sim, 0, e, *forth, simulator.network, 1)
        simulator.check(sim.slots)
        assert_same_counts(sim, scratch(case, comm, sim.slots))
        after = copy_of(sim)
        change(sim, 0, e, *back, simulator.network, 1)
        assert_same_counts(sim, before)
        change(sim, 0, e, *forth, simulator.network, 1)
        assert_same_counts(sim, after)


@pytest.mark.parametrize("action", [(-1, 0), (5, 0), (0, -1), (0, 12), (10**9, 10**9)])
def test_resolve_refuses_what_is_out_of_range(action: tuple[int, int]) -> None:
    case = random_instance(0, nodes=2, per_node=2, n_experts=5, top_k=2, tokens=4, layers=1, spare_slots=1)
    sim = case.simulator("dedup").count(case.window, case.placement)
    assert resolve(sim, 0, *action) == (state.OP_ILLEGAL, -1, -1, -1)


@settings(max_examples=120, deadline=None)
@given(one_layer, st.sampled_from(MODES), st.integers(0, 7))
def test_look_ahead_is_the_difference_of_evaluations(case: Instance, comm: str, expert: int) -> None:
    simulator, gpus = case.simulator(comm), case.cluster.n_gpus
    e = expert % case.model.n_experts
    sim = simulator.count(case.window, case.placement, case.before)
    untouched = copy_of(sim)
    result = np.full(3 * gpus, np.nan, np.float32)
    look_ahead(sim, 0, e, simulator.costs, simulator.network, -1, result)
    assert_same_counts(sim, untouched)
    served = simulator.evaluate(case.window, case.placement, case.before)
    now = served.time_us[0] + served.migration_us[0]
    for node in range(3 * gpus):
        kind, source, target, victim = what_an_action_means(case, sim, e, node)
        held = [{int(x) for x in gpu if x >= 0} for gpu in case.placement[0]]
        if kind not in (state.OP_NOTHING, state.OP_ILLEGAL):
            for x, leaves, enters in ((e, source, target), (victim, target, source)):
                if x >= 0:
                    if leaves >= 0:
                        held[leaves].discard(x)
                    if enters >= 0:
                        held[enters].add(x)
        slots = np.full_like(case.placement, -1)
        for g, experts in enumerate(held):
            slots[0, g, : len(experts)] = sorted(experts)
        then = simulator.evaluate(case.window, slots, case.before)
        saved = now - then.time_us[0] - then.migration_us[0]
        # float32 holds the difference; the sums behind it are float64.
        assert result[node] == pytest.approx(saved, rel=2e-7, abs=1e-9 * now)


# -- known numbers ---------------------------------------------------------------------------------------------------

# GPUs 0, 1 on node 0 and 2, 3 on node 1. A dispatched copy has 2000 B, a combined one 4000 B: 0.02 and 0.04 µs inside a node
# (100 GB/s), 0.2 and 0.4 µs between nodes (10 GB/s). Each exchange starts with 1 + 2 = 3 µs. Kernel: 10 + 5·experts + 1·pairs.
HAND_MODEL = ModelSpec("hand", 2, 4, 2, 1000, 10, dispatch_bytes=2, combine_bytes=4,
    kernel_start_us=10, kernel_expert_us=5, kernel_pair_us=1,
)  # fmt: skip
HAND_CLUSTER = ClusterSpec("hand", 2, 2, 2, intra_gb_s=100, inter_gb_s=10, intra_latency_us=1, inter_latency_us=2)
HAND_PLACEMENT = np.array([[[0, -1], [1, 3], [2, -1], [3, -1]]] * 2, np.int16)
HAND_WINDOW = Window(
    np.array([[[0, 1], [2, 3], [2, 3], [0, 2]], [[2, 0]] * 4], np.int16),
    np.arange(4, dtype=np.int32),
    np.array([0, 0, 1, 3], np.int16),
)
# Layer 0. Where experts run: t0 on {0, 1}; t1 on 2 and, because GPU 1 is on its node, on 1; t2 on 2 and 1; t3 on 0 and 2.
# Kernels: GPU 0 10+5+2, GPU 1 10+10+3 = 23, GPU 2 10+5+3.
# dedup: t0 0→1; t1 0→1, 0⇒2; t2 1⇒3 (its rank on node 1), 3→2; t3 3→2, 3⇒1, 1→0.
#   inside: GPU 0 sends 2; between: 1 at most. dispatch 3 + 2·0.02 + 0.2, combine 3 + 2·0.04 + 0.4.
# per-expert: t0 0→1; t1 0⇒2, 0→1; t2 1⇒2; t3 3⇒0, 3→2. inside 2; between: GPU 2 gets 2. 3 + 0.04 + 0.4, 3 + 0.08 + 0.8.
# stay: dispatch as dedup. Tokens stay on 0, 2, 2, 0; back to there: t0 1→0; t1 and t2 from GPU 1 through GPU 0 to 2; t3 2⇒0.
#   inside: GPU 0 gets 3; between: GPU 2 gets 2. combine 3 + 3·0.04 + 2·0.4.
# Layer 1, all tokens on GPUs 2 and 0. Kernels 10+5+4 = 19.
# dedup: t0, t1 0⇒2; t2 1→0, 1⇒3, 3→2; t3 3→2, 3⇒1, 1→0. inside 2, between 2: 3 + 0.04 + 0.4, 3 + 0.08 + 0.8.
# per-expert: t0, t1 0⇒2; t2 1→0, 1⇒2; t3 3→2, 3⇒0. inside 1, between: GPU 2 gets 3: 3 + 0.02 + 0.6, 3 + 0.04 + 1.2.
# stay: from 0, 2, 2, 0: two copies each way between 0 and 2: 3 + 0.4. All stay on 2 (expert 2 comes first): 4 results 0⇒2: 3 + 1.6.
HAND_TIMES = {
    "dedup": [(3.24, 23, 3.48), (3.44, 19, 3.88)],
    "per-expert": [(3.44, 23, 3.88), (3.62, 19, 4.24)],
    "stay": [(3.24, 23, 3.92), (3.4, 19, 4.6)],
}


@pytest.mark.parametrize("comm", MODES)
def test_hand_worked_example(comm: str) -> None:
    # Before, expert 3 was only on GPU 3: GPU 1 gets 3·1000·10·2 B = 60 kB over 10 GB/s = 6 µs, in 3 passes.
    before = HAND_PLACEMENT.copy()
    before[:, 1, 1] = -1
    simulator = Simulator(HAND_MODEL, HAND_CLUSTER, comm, passes_per_window=3)
    served = simulator.evaluate(HAND_WINDOW, HAND_PLACEMENT, before)
    found = np.stack([served.dispatch_us, served.compute_us, served.combine_us], axis=1)
    np.testing.assert_allclose(found, HAND_TIMES[comm], rtol=1e-12)
    np.testing.assert_allclose(served.time_us, np.sum(HAND_TIMES[comm], axis=1), rtol=1e-12)
    np.testing.assert_allclose(served.migration_us, 2.0, rtol=1e-12)
    assert served.pairs.tolist() == [[2, 3, 3, 0], [4, 0, 4, 0]]
    np.testing.assert_allclose(served.balancedness, [2 / 3, 0.5])
    np.testing.assert_allclose(served.gpus_per_token, 2.0)
    # From GPU 0 on the same node instead: ten times as fast.
    near = before.copy()
    near[:, 0, 1] = 3
    np.testing.assert_allclose(simulator.evaluate(HAND_WINDOW, HAND_PLACEMENT, near).migration_us, 0.2, rtol=1e-12)


@settings(max_examples=150, deadline=None)
@given(one_layer, st.sampled_from(["dedup", "per-expert"]))
def test_smooth_norm_is_the_p_norm_and_tends_to_the_max(case: Instance, comm: str) -> None:
    simulator, per_node, gpus = case.simulator(comm), case.cluster.gpus_per_node, case.cluster.n_gpus
    sim = simulator.count(case.window, case.placement)
    times = [layer_time(sim, 0, 0, simulator.costs, simulator.network, d, 1.0) for d in range(-1, 7)]
    true, smooth = times[0], times[1:]
    assert true == pytest.approx(simulator.evaluate(case.window, case.placement).time_us[0], rel=1e-12)
    assert all(a >= b * (1 - 1e-12) for a, b in zip(smooth, [*smooth[1:], true], strict=True))
    truth = expected(case, comm)[0]
    copy_us = case.model.hidden * (case.model.dispatch_bytes + case.model.combine_bytes) * 1e-3
    parts: list[list[float]] = [[], [], []]
    for g in range(gpus):
        loads = [n for (_, h), n in truth.pairs.items() if h == g]
        parts[0].append(case.model.kernel_expert_us * len(loads) + case.model.kernel_pair_us * sum(loads))
        for far, bandwidth in ((False, case.cluster.intra_gb_s), (True, case.cluster.inter_gb_s)):
            mine = {
                way: sum(
                    n
                    for link, n in truth.links.items()
                    if link[way] == g and (link[0] // per_node != link[1] // per_node) == far
                )
                for way in (0, 1)
            }
            parts[1 + far] += [n * copy_us / bandwidth for n in mine.values()]
    fixed = true - sum(max(part) for part in parts)
    for d, time in enumerate(smooth):
        norms = [np.linalg.norm(np.array(part) / max(part), 2**d) * max(part) if max(part) else 0 for part in parts]
        assert time == pytest.approx(fixed + sum(norms), rel=1e-9)
    # Sums of 2G terms: the 64-norm is at most (2G)^(1/64) times the max.
    assert smooth[6] <= true + sum(max(part) for part in parts) * ((2 * gpus) ** (1 / 64) - 1) * (1 + 1e-9)
    assert busiest(truth.links, per_node, True) * copy_us / case.cluster.inter_gb_s == pytest.approx(max(parts[2]))


@pytest.mark.parametrize("comm", MODES)
def test_scale_weighs_tokens(comm: str) -> None:
    """Two copies of a window joined, at half the weight, cost what one does, but for the constant parts."""
    case = random_instance(5, nodes=2, per_node=2, n_experts=6, top_k=2, tokens=10, layers=1, spare_slots=1)
    simulator = case.simulator(comm)
    one = simulator.count(case.window, case.placement)
    two = simulator.count(Window.join([case.window, case.window]), case.placement)
    arguments = (simulator.costs, simulator.network, -1)
    assert layer_time(two, 0, 0, *arguments, 0.5) == pytest.approx(layer_time(one, 0, 0, *arguments, 1.0), rel=1e-12)


@settings(max_examples=300, deadline=None)
@given(instances, st.sampled_from(MODES))
def test_lower_bound_holds(case: Instance, comm: str) -> None:
    simulator = case.simulator(comm)
    bound = simulator.lower_bound(case.window)
    assert (bound <= simulator.evaluate(case.window, case.placement).time_us * (1 + 1e-12)).all()


def test_lower_bound_is_reached_by_a_perfect_placement() -> None:
    """Every token at home with its one expert, and all GPUs alike: no placement can do better than the bound."""
    model = ModelSpec("m", 1, 4, 1, 8, 8, kernel_start_us=1, kernel_expert_us=2, kernel_pair_us=3)
    simulator = Simulator(model, ClusterSpec("c", 2, 2, 1))
    window = Window(
        np.arange(4, dtype=np.int16)[None, :, None].copy(), np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int16)
    )
    served = simulator.evaluate(window, np.arange(4, dtype=np.int16).reshape(1, 4, 1))
    np.testing.assert_allclose(served.time_us, 15 + 15 + 1 + 2 + 3)
    np.testing.assert_allclose(simulator.lower_bound(window), served.time_us)


# -- placements ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((1, 2, 0, 7), "layer 1, GPU 2 holds expert 7: ids are 0 … 3"),
        ((1, 2, 0, -2), "layer 1, GPU 2 holds expert -2: ids are 0 … 3"),
        ((1, 1, 0, 3), "layer 1, GPU 1 holds expert 3 twice"),
        ((0, 2, 0, -1), "layer 0: expert 2 is on no GPU"),
    ],
)
def test_check_names_rule_layer_and_gpu(change: tuple[int, int, int, int], message: str) -> None:
    simulator = Simulator(HAND_MODEL, HAND_CLUSTER)
    np.testing.assert_array_equal(simulator.check(HAND_PLACEMENT), HAND_PLACEMENT)
    broken = HAND_PLACEMENT.copy()
    layer, gpu, slot, expert = change
    broken[layer, gpu, slot] = expert
    with pytest.raises(ValueError, match=re.escape(message)):
        simulator.check(broken)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (np.zeros((4, 2), np.int16), "shape (4, 2): expected (layers, 4 GPUs, 2 slots)"),
        (np.zeros((1, 4, 3), np.int16), "shape (1, 4, 3): expected (layers, 4 GPUs, 2 slots)"),
        (HAND_PLACEMENT.astype(float), "dtype float64: expected integers"),
    ],
)
def test_check_names_wrong_shapes_and_types(placement: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Simulator(HAND_MODEL, HAND_CLUSTER).check(placement)


def test_static_placement_counts_through_the_experts() -> None:
    assert Simulator(HAND_MODEL, HAND_CLUSTER).static(2).tolist() == [[[0, 1], [2, 3], [0, 1], [2, 3]]] * 2


def test_unknown_comm_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown comm 'fast'; expected one of: dedup, per-expert, stay"):
        Simulator(HAND_MODEL, HAND_CLUSTER, "fast")


# -- EPLB ------------------------------------------------------------------------------------------------------------


def eplb(load: np.ndarray, n_gpus: int, n_slots: int, n_nodes: int = 1, n_groups: int = 0) -> np.ndarray:
    slots = np.full((n_gpus, n_slots), 99, np.int16)
    ints, floats = np.full((3, len(load)), 99, np.int32), np.full(len(load) + n_gpus, 99.0)
    eplb_slots(slots, load.astype(np.float64), n_nodes, n_groups, ints, floats)
    return slots


def published_eplb(load: list[int], n_gpus: int, n_slots: int) -> list[set[int]] | None:
    """Greedy replication by load per copy, then each copy, heaviest first, to the least loaded GPU that can take it.

    None where a copy fits nowhere, which the published algorithm does not know (it puts twins on one GPU).
    """
    copies = [1] * len(load)
    for _ in range(n_gpus * n_slots - len(load)):
        _, e = max((Fraction(load[e], copies[e]), -e) for e in range(len(load)) if copies[e] < n_gpus)
        copies[-e] += 1
    queue = [e for e in sorted(range(len(load)), key=lambda e: -Fraction(load[e], copies[e])) for _ in range(copies[e])]
    gpus: list[set[int]] = [set() for _ in range(n_gpus)]
    weight = [0.0] * n_gpus
    for e in queue:
        able = [g for g in range(n_gpus) if len(gpus[g]) < n_slots and e not in gpus[g]]
        if not able:
            return None
        g = min(able, key=lambda g: weight[g])
        gpus[g].add(e)
        weight[g] += load[e] / copies[e]
    return gpus


def test_eplb_equals_the_published_algorithm() -> None:
    rng = np.random.default_rng(0)
    equal = 0
    for _ in range(1500):
        n_experts, n_gpus = int(rng.integers(1, 13)), int(rng.integers(1, 7))
        n_slots = min(n_experts, -(-n_experts // n_gpus) + int(rng.integers(0, 3)))
        load = rng.integers(0, rng.choice([3, 1000]), n_experts)
        known = published_eplb(load.tolist(), n_gpus, n_slots)
        if known is not None:
            assert [set(gpu) for gpu in eplb(load, n_gpus, n_slots).tolist()] == known
            equal += 1
    assert equal > 1000


@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.booleans(), st.data()
)  # fmt: skip
def test_eplb_fills_every_slot_without_twins(
    n_nodes: int,
    per_node: int,
    groups_per_node: int,
    group_size: int,
    spare: int,
    hierarchical: bool,
    data: st.DataObject,
) -> None:
    n_gpus, n_groups = n_nodes * per_node, n_nodes * groups_per_node
    n_experts = n_groups * group_size
    room = n_experts // n_nodes if hierarchical else n_experts
    n_slots = min(room, -(-n_experts // n_gpus) + spare)
    load = np.array(data.draw(st.lists(st.integers(0, 50), min_size=n_experts, max_size=n_experts)))
    slots = eplb(load, n_gpus, n_slots, n_nodes, n_groups if hierarchical else 0)
    assert set(slots.ravel().tolist()) == set(range(n_experts))
    for gpu in slots.tolist():
        assert len(set(gpu)) == n_slots
    if hierarchical:
        node_groups = [
            set((slots[n * per_node : (n + 1) * per_node] // group_size).ravel().tolist()) for n in range(n_nodes)
        ]
        assert all(len(groups) == groups_per_node for groups in node_groups)
        assert sum(len(groups) for groups in node_groups) == len(set().union(*node_groups)) == n_groups


def test_hierarchical_eplb_by_hand() -> None:
    """Groups weigh 7, 6, 5, 0: nodes get 7 + 0 and 6 + 5. Each node has four slots for its four experts."""
    load = np.array([4, 3, 6, 0, 1, 4, 0, 0])
    slots = eplb(load, 4, 2, n_nodes=2, n_groups=4)
    assert [set(gpu) for gpu in slots.tolist()] == [{0, 7}, {1, 6}, {2, 3}, {5, 4}]


def test_random_placements_are_legal() -> None:
    """What the tests above call random and legal is both, with replicas and empty slots."""
    rng = np.random.default_rng(0)
    simulator = Simulator(ModelSpec("m", 1, 6, 2, 8, 8), ClusterSpec("c", 2, 2, 3))
    placements = random_placement(rng, 50, 4, 3, 6, 0.5)
    simulator.check(placements)
    assert len(np.unique(placements, axis=0)) == 50
    assert (placements == -1).any()
    assert ((placements >= 0).sum((1, 2)) > 6).any()


# -- compiled code -----------------------------------------------------------------------------------------------------


def test_a_change_in_one_kernel_source_renews_all_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba only notices changes in the file of a function itself, not in the functions that it calls."""

    def fingerprint() -> str:
        return source_fingerprint(compiling.kernel_sources())

    assert count_window._cache._cache_file._source_stamp == compiling.FINGERPRINT == fingerprint()
    assert eplb_slots._cache._cache_file._source_stamp == compiling.FINGERPRINT
    package = tmp_path / "clustergym"
    shutil.copytree(Path(compiling.__file__).parents[2], package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(compiling, "__file__", str(package / "moe_placement" / "kernels" / "compile.py"))
    assert fingerprint() == compiling.FINGERPRINT
    for name, matters in (
        ("moe_placement/specs.py", False),
        ("moe_placement/kernels/state.py", True),
        ("moe_placement/kernels/episode.py", True),
        ("moe_placement/planners/kernels/anneal.py", True),
        ("moe_placement/serving/profiles.py", True),
        ("moe_placement/launchers/prefetch.py", True),
        # Kernels of other tasks have a fingerprint of their own.
        ("other/kernels.py", False),
    ):
        (package / "other").mkdir(exist_ok=True)
        before = fingerprint()
        with open(package / name, "a") as file:
            file.write("# changed\n@device\n" if "other" in name else "# changed\n")
        assert (fingerprint() != before) == matters


@pytest.mark.parametrize("n", [1, 2, 7, 100, 1000])
@pytest.mark.parametrize("chunks", [None, 1, 3, 50])
def test_spread_does_every_part_once(n: int, chunks: int | None) -> None:
    done = np.zeros(n, int)

    def work(first: int, last: int, step: int) -> None:
        done[first:last] += step

    spread(work, n, 2, chunks=chunks)
    assert (done == 2).all()


def test_spread_raises_what_a_part_raises() -> None:
    def work(first: int, last: int) -> None:
        if first <= 37 < last:
            raise KeyError(37)

    with pytest.raises(KeyError):
        spread(work, 64, chunks=64)
