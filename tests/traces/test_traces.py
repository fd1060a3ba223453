"""TokenTrace: slices, statistics calculated by hand, and every input that must be refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym.traces import TokenTrace
from clustergym.traces.splits import SAME_DOMAINS, SHARES, split_trace
from clustergym.traces.statistics import (
    coactivation_groups,
    domain_divergence,
    next_layer_predictability,
    next_token_overlap,
    window_divergence,
)
from small_traces import BLOCKS, same, small_trace, traces


class TestConstruction:
    def test_defaults(self) -> None:
        trace = TokenTrace(np.array([[0, 4], [2, 1], [3, 3]]))
        assert trace.experts.shape == (3, 2, 1)
        assert trace.experts.dtype == np.int16
        assert trace.n_experts == 5
        assert trace.layer_ids.tolist() == [0, 1]
        assert trace.seq_lens.tolist() == [3]
        assert trace.domain_names == ["all"]
        assert trace.model is None

    def test_shape_and_starts(self) -> None:
        trace = small_trace()
        assert (trace.n_tokens, trace.n_layers, trace.top_k, trace.n_sequences) == (6, 2, 2, 3)
        assert trace.seq_starts.tolist() == [0, 1, 3]
        assert trace.domain_names == ["a", "b"]

    def test_repr_names_the_shape(self) -> None:
        assert "6 tokens in 3 sequences, 2 layers, top-2 of 6 experts" in repr(small_trace())

    def test_a_writable_array_is_copied(self) -> None:
        mine = np.zeros((2, 1, 1), dtype=np.int16)
        trace = TokenTrace(mine, n_experts=4)
        mine[:] = 3
        assert trace.experts.max() == 0

    def test_padding_may_repeat(self) -> None:
        assert TokenTrace(np.array([[[-1, 2, -1]]])).loads().tolist() == [[0, 0, 1]]

    @pytest.mark.parametrize(
        ("experts", "message"),
        [
            (np.zeros(3, dtype=int), r"shape \(3,\): expected \(tokens, layers\) or \(tokens, layers, top_k\)"),
            (np.zeros((1, 1, 1, 1), dtype=int), "expected"),
            (np.zeros((2, 2)), "dtype float64: expert ids must be integers"),
            (np.zeros((2, 2), dtype=bool), "dtype bool"),
            (np.array([[0, None]], dtype=object), "dtype object"),
            (np.array([["0"]]), "integers"),
            (np.zeros((0, 2, 2), dtype=int), "the trace is empty"),
            (np.zeros((2, 0, 2), dtype=int), "the trace is empty"),
            (np.zeros((2, 2, 0), dtype=int), "the trace is empty"),
            (np.full((2, 2, 2), -1), "every entry is the pad"),
            (np.array([[0], [-2]]), "expert id -2 at token 1, layer 0: ids are 0 or more"),
            (np.array([[0], [40_000]]), "n_experts is 40001: expected 1 … 32767"),
            (np.array([[0], [2**63]], dtype=np.uint64), "n_experts is"),
            (np.array([[[0, 1]], [[3, 3]]]), "expert 3 appears twice at token 1, layer 0"),
            (np.array([[[0, 1, 2], [4, 2, 4]]]), "expert 4 appears twice at token 0, layer 1"),
        ],
    )
    def test_bad_experts(self, experts: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            TokenTrace(experts)

    def test_a_repeated_expert_is_found_after_the_first_block_of_rows(self) -> None:
        experts = np.tile(np.array([[[0, 1]]]), (70_000, 1, 1))
        experts[69_999] = 1
        with pytest.raises(ValueError, match="expert 1 appears twice at token 69999, layer 0"):
            TokenTrace(experts)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"n_experts": 5}, "expert id 5 at token 4, layer 0, but n_experts is 5"),
            ({"n_experts": -1}, "n_experts is -1"),
            ({"layer_ids": [1]}, r"layer_ids has shape \(1,\), but the trace has 2 layers"),
            ({"layer_ids": [1, 1]}, "distinct"),
            ({"layer_ids": [-1, 1]}, "not negative"),
            ({"layer_ids": [0.0, 1.0]}, "layer_ids has dtype float64"),
            ({"seq_lens": [1, 2, 4]}, "seq_lens sums to 7, but experts has 6 tokens"),
            ({"seq_lens": [0, 3, 3]}, "at least 1"),
            ({"seq_lens": [[1, 2, 3]]}, "at least 1"),
            ({"seq_lens": [1.0, 2.0, 3.0]}, "seq_lens has dtype float64"),
            ({"seq_lens": [2**62, 2**62, 2**62, 2**62 - 6, 6, 6]}, "seq_lens sums to"),
            ({"domains": np.array(["a", "b"])}, r"domains has shape \(2,\), but there are 3 sequences"),
            ({"domains": np.array([0, 1, 0])}, "domains must be strings"),
        ],
    )
    def test_bad_labels(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            small_trace(**changes)


class TestSlices:
    def test_select_keeps_the_given_order(self) -> None:
        part = small_trace().select(sequences=[2, 0])
        assert part.experts[:, 0, 0].tolist() == [3, 4, 5, 0]
        assert part.seq_lens.tolist() == [3, 1]
        assert part.n_experts == 6
        assert part.model == "toy"

    def test_select_domain(self) -> None:
        part = small_trace().select(domains="b")
        assert part.experts[:, 0, 0].tolist() == [1, 2]
        assert part.domain_names == ["b"]
        assert small_trace().select(domains=["a", "b"]).n_tokens == 6

    def test_select_layers_by_position(self) -> None:
        trace = TokenTrace(BLOCKS, layer_ids=np.array([3, 5]))
        part = trace.select(layers=[1])
        assert part.layer_ids.tolist() == [5]
        assert np.array_equal(part.experts, BLOCKS[:, 1:])

    def test_select_everything_at_once(self) -> None:
        part = small_trace().select(sequences=[1, 2], domains="a", layers=[0])
        assert part.experts[:, 0, 0].tolist() == [3, 4, 5]
        assert part.layer_ids.tolist() == [3]

    @pytest.mark.parametrize(
        ("what", "message"),
        [
            ({"sequences": [3]}, "sequence 3 asked for, but the ids are 0 … 2"),
            ({"sequences": [-1, 2]}, "sequence -1 asked for"),
            ({"sequences": []}, "no sequence is selected"),
            ({"sequences": np.array([True, False, True])}, "found a mask"),
            ({"sequences": [1], "domains": "a"}, "no sequence is selected"),
            ({"domains": "c"}, "no domain 'c'; the domains are: a, b"),
            ({"layers": [2]}, "the positions are 0 … 1"),
            ({"layers": []}, "the positions are 0 … 1"),
            ({"layers": [0, 0]}, "distinct"),
        ],
    )
    def test_bad_selections(self, what: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            small_trace().select(**what)

    @settings(max_examples=60, deadline=None)
    @given(trace=traces(min_sequences=2), seed=st.integers(0, 5), data=st.data())
    def test_split_is_a_partition(self, trace: TokenTrace, seed: int, data: st.DataObject) -> None:
        fraction = data.draw(st.sampled_from([0.1, 0.5, 0.9]))
        marked = mark(trace)
        first, second = marked.split(fraction, seed=seed)
        ids = sorted([*first.domains, *second.domains])
        assert ids == sorted(marked.domains)
        assert not set(first.domains) & set(second.domains)
        assert first.n_tokens + second.n_tokens == trace.n_tokens
        again = marked.split(fraction, seed=seed)
        assert same(again[0], first)
        assert same(again[1], second)

    @settings(max_examples=60, deadline=None)
    @given(trace=traces(min_sequences=2), seed=st.integers(0, 5))
    def test_the_first_half_is_never_smaller(self, trace: TokenTrace, seed: int) -> None:
        first, second = trace.split(0.5, seed=seed)
        assert first.n_tokens >= second.n_tokens

    def test_split_divides_every_domain(self) -> None:
        trace = TokenTrace(
            np.zeros((40, 1), dtype=int), seq_lens=np.full(20, 2), domains=np.array(["a"] * 12 + ["b"] * 8)
        )
        first, second = trace.split(0.75, seed=1)
        assert [(first.domains == d).sum() for d in "ab"] == [9, 6]
        assert [(second.domains == d).sum() for d in "ab"] == [3, 2]

    def test_same_domains_in_all_parts_or_in_one(self) -> None:
        """The default trace is split by domain. The other division has every domain in every part."""
        trace = TokenTrace.load("tiny_moe_domains")
        for ending, disjoint in (("", True), (SAME_DOMAINS, False)):
            parts = {name: split_trace(trace, name + ending) for name in SHARES}
            domains = [set(part.domains) for part in parts.values()]
            assert set.union(*domains) == set(trace.domains)
            assert (sum(map(len, domains)) == len(set(trace.domains))) == disjoint
            assert disjoint or all(found == domains[0] for found in domains)
            assert sum(part.n_sequences for part in parts.values()) == trace.n_sequences
            for name, share in SHARES.items():
                assert abs(parts[name].n_tokens / trace.n_tokens - share) < 0.03

    def test_test_sequences_of_the_default_trace_do_not_open_like_training_sequences(self) -> None:
        trace = TokenTrace.load("tiny_moe_domains")
        openings = [
            [part.experts[start : start + 16].tobytes() for start in np.cumsum([0, *part.seq_lens[:-1]])]
            for part in (split_trace(trace, "train"), split_trace(trace, "test"))
        ]
        assert np.isin(openings[1], openings[0]).mean() < 0.002

    def test_one_sequence_per_domain_splits_with_the_larger_part_first(self) -> None:
        trace = TokenTrace(np.zeros((9, 1), dtype=int), seq_lens=np.array([1, 8]), domains=np.array(["a", "b"]))
        first, second = trace.split()
        assert (first.n_tokens, second.n_tokens) == (8, 1)

    @pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, float("nan")])
    def test_bad_fraction(self, fraction: float) -> None:
        with pytest.raises(ValueError, match="between 0 and 1"):
            small_trace().split(fraction)

    def test_one_sequence_cannot_be_split(self) -> None:
        with pytest.raises(ValueError, match="the trace has one sequence, so nothing can be held out"):
            TokenTrace(BLOCKS).split()


def mark(trace: TokenTrace) -> TokenTrace:
    """The same trace with a different domain label for each sequence."""
    labels = np.array([f"{d}-{i}" for i, d in enumerate(trace.domains)])
    return TokenTrace(trace.experts, trace.n_experts, trace.layer_ids, trace.seq_lens, labels, trace.model)


class TestConcat:
    def test_keeps_or_replaces_the_labels(self) -> None:
        joined = TokenTrace.concat([small_trace(), small_trace().select(domains="b")])
        assert joined.domains.tolist() == ["a", "b", "a", "b"]
        assert joined.seq_lens.tolist() == [1, 2, 3, 2]
        assert joined.experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 1, 2]
        assert (joined.name, joined.model) == ("small+small", "toy")
        named = TokenTrace.concat([small_trace(), small_trace()], ["first", "2nd"])
        assert named.domains.tolist() == ["first"] * 3 + ["2nd"] * 3

    @settings(max_examples=30, deadline=None)
    @given(trace=traces())
    def test_concat_inverts_select(self, trace: TokenTrace) -> None:
        parts = [trace.select(sequences=[i]) for i in range(trace.n_sequences)]
        assert same(TokenTrace.concat(parts), trace)

    def test_concat_refuses_different_models(self) -> None:
        with pytest.raises(ValueError, match="empty"):
            TokenTrace.concat([])
        with pytest.raises(ValueError, match=r"\(2, 2, 7\) and small has \(2, 2, 6\)"):
            TokenTrace.concat([small_trace(), small_trace(n_experts=7)])
        with pytest.raises(ValueError, match=r"layer_ids \[3, 6\] and small has \[3, 5\]"):
            TokenTrace.concat([small_trace(), small_trace(layer_ids=[3, 6])])
        with pytest.raises(ValueError, match="1 domains given for 2 traces"):
            TokenTrace.concat([small_trace(), small_trace()], ["one"])
        with pytest.raises(ValueError, match="different models"):
            TokenTrace.concat([small_trace(model="mixtral-8x7b"), small_trace(model="deepseek-v3")])
        assert TokenTrace.concat([small_trace(model=None), small_trace(model="deepseek-v3")]).model == "deepseek-v3"


class TestStatistics:
    def test_loads(self) -> None:
        assert small_trace().loads().tolist() == [[2] * 6] * 2
        padded = TokenTrace(np.array([[[0, -1]], [[2, 0]]]), n_experts=4)
        assert padded.loads().tolist() == [[2, 0, 1, 0]]

    def test_statistics_of_two_blocks_of_experts_by_hand(self) -> None:
        trace = TokenTrace(BLOCKS, seq_lens=np.array([2, 2]), domains=np.array(["a", "b"]))
        assert trace.statistics(n_gpus=2) == pytest.approx(
            {
                "max_mean_load": 1.0,
                "load_gini": 0.0,
                "gpus_per_token": 1.0,
                # A GPU is not visited if neither of its two experts, each used by half of the tokens, is drawn.
                "gpus_per_token_independent": 2 * (1 - 0.5 * 0.5),
                "gpus_per_token_grouped": 1.0,
                # Held-out tokens all use the block of one GPU.
                "grouped_max_mean_load": 2.0,
                # P(0, 1) = 1/2, independent experts would give 1/4; times K / (K − 1) = 2.
                "coactivation_lift": 4.0,
                "next_layer_predictability": 1.0,
                "next_layer_chance": 0.5,
                "next_token_overlap": 1.0,
                # With one sequence per domain, shuffling the labels changes nothing.
                "domain_divergence": 0.0,
                "domain_divergence_shuffled": 1.0,
                "window_divergence": 1.0,
            }
        )

    def test_statistics_of_uneven_loads_by_hand(self) -> None:
        stats = TokenTrace(np.array([[0], [1], [1], [1]])).statistics(n_gpus=2)
        assert stats["max_mean_load"] == 1.5
        assert stats["load_gini"] == 0.25
        assert stats["coactivation_lift"] == 1.0
        assert stats["next_layer_predictability"] == stats["next_layer_chance"] == 0.0

    def test_scattered_blocks_can_be_grouped(self) -> None:
        """Experts 0 and 2, and 1 and 3, are used together. Grouping puts each pair on one GPU."""
        experts = np.tile(np.array([[[0, 2]], [[1, 3]]]), (8, 1, 1))
        stats = TokenTrace(experts, seq_lens=np.full(4, 4)).statistics(n_gpus=2)
        assert stats["gpus_per_token"] == 2.0
        assert stats["gpus_per_token_grouped"] == 1.0
        assert stats["grouped_max_mean_load"] == 1.0

    def test_grouping_is_measured_on_held_out_sequences(self) -> None:
        """In the longer sequence, 0 is used with 2. In the held-out one, 0 is used with 1."""
        trace = TokenTrace(
            np.array([[[0, 1]], [[0, 2]], [[0, 2]]]),
            n_experts=4,
            seq_lens=np.array([1, 2]),
            domains=np.array(["a", "b"]),
        )
        assert trace.statistics(n_gpus=2)["gpus_per_token_grouped"] == 2.0

    def test_coactivation_groups_by_hand(self) -> None:
        together = np.array([[5, 0, 1, 4, 0], [0, 4, 3, 0, 1], [1, 3, 4, 0, 0], [4, 0, 0, 4, 0], [0, 1, 0, 0, 1]])
        # 0 is the busiest. It takes 3 and then 2 (used once with 0). Of the others, 1 is busier than 4.
        assert coactivation_groups(together, 2).tolist() == [0, 1, 0, 0, 1]
        assert coactivation_groups(together, 5).tolist() == [0, 1, 2, 3, 4]

    @settings(max_examples=30, deadline=None)
    @given(seed=st.integers(0, 1000), n_experts=st.integers(1, 20), n_gpus=st.integers(1, 24))
    def test_coactivation_groups_have_equal_sizes(self, seed: int, n_experts: int, n_gpus: int) -> None:
        counts = np.random.default_rng(seed).integers(0, 9, (n_experts, n_experts))
        gpu = coactivation_groups(counts + counts.T, n_gpus)
        contiguous = np.arange(n_experts) * n_gpus // n_experts
        assert np.bincount(gpu, minlength=n_gpus).tolist() == np.bincount(contiguous, minlength=n_gpus).tolist()

    def test_divergence_of_a_known_pair(self) -> None:
        """Between (1, 0) and (1/2, 1/2): (log2(4/3) + log2(2/3)/2 + log2(2)/2) / 2 bits."""
        trace = TokenTrace(np.array([[0]] * 4 + [[0], [0], [1], [1]]))
        expected = (np.log2(4 / 3) + 0.5 * np.log2(2 / 3) + 0.5) / 2
        assert window_divergence(trace) == pytest.approx(expected)
        assert expected == pytest.approx(0.3113, abs=1e-4)

    def test_domain_divergence_of_disjoint_and_equal_domains(self) -> None:
        experts = np.repeat([0, 1], 40)[:, None]
        apart = TokenTrace(experts, seq_lens=np.full(40, 2), domains=np.repeat(["a", "b"], 20))
        found, shuffled = domain_divergence(apart)
        assert found == 1.0
        assert shuffled < 0.1
        equal = TokenTrace(experts, seq_lens=np.full(40, 2), domains=np.tile(["a", "b"], 20))
        assert domain_divergence(equal)[0] == 0.0

    def test_the_largest_domains_are_compared(self) -> None:
        """Twelve domains are compared. The two large ones, 1 bit apart, are among them whatever their names."""
        sizes = [1] * 20 + [50, 50]
        experts = np.concatenate([np.zeros(20 + 50, int), np.ones(50, int)])[:, None]
        labels = np.array([f"a{i:02d}" for i in range(20)] + ["y", "z"])
        trace = TokenTrace(experts, seq_lens=np.array(sizes), domains=labels)
        # Of the 66 pairs of {y, z and ten small ones}, those 11 with z are 1 bit apart.
        assert domain_divergence(trace)[0] == pytest.approx(11 / 66)

    def test_next_token_overlap_stays_within_a_sequence(self) -> None:
        assert next_token_overlap(TokenTrace(BLOCKS)) == pytest.approx(2 / 3)
        assert next_token_overlap(TokenTrace(BLOCKS, seq_lens=np.array([2, 2]))) == 1.0
        assert next_token_overlap(TokenTrace(BLOCKS, seq_lens=np.array([1, 1, 1, 1]))) == 0.0
        padded = TokenTrace(np.array([[[0, -1]], [[1, 0]], [[-1, 1]]]))
        assert next_token_overlap(padded) == pytest.approx((1 + 1) / (2 + 1))

    def test_a_shifted_copy_of_a_layer_is_predictable_and_noise_is_not(self) -> None:
        rng = np.random.default_rng(0)
        here = rng.integers(0, 8, 4000)
        copied = TokenTrace(np.stack([here, (here + 3) % 8], 1))
        assert next_layer_predictability(copied)[0] == 1.0
        noise = TokenTrace(np.stack([here, rng.integers(0, 8, 4000)], 1))
        assert next_layer_predictability(noise) == pytest.approx((1 / 8, 1 / 8), abs=0.02)

    def test_independent_experts_have_no_lift(self) -> None:
        experts = np.random.default_rng(0).random((20_000, 1, 16)).argsort(2)[:, :, :4]
        stats = TokenTrace(experts, n_experts=16).statistics(n_gpus=4)
        # Drawn without repeats, a pair is more likely by E / (E − 1) than the correction K / (K − 1) assumes.
        assert stats["coactivation_lift"] == pytest.approx(16 / 15, abs=0.01)

    @settings(max_examples=40, deadline=None)
    @given(trace=traces(), n_gpus=st.integers(1, 5))
    def test_statistics_are_finite_and_within_bounds(self, trace: TokenTrace, n_gpus: int) -> None:
        stats = trace.statistics(n_gpus)
        assert all(np.isfinite(value) for value in stats.values())
        shares = ("load_gini", "next_layer_predictability", "next_layer_chance", "next_token_overlap")
        bits = ("domain_divergence_shuffled", "window_divergence")
        assert all(-1e-6 <= stats[key] <= 1 + 1e-6 for key in shares + bits)
        most = min(n_gpus, trace.top_k)
        assert all(0 <= stats[key] <= most for key in ("gpus_per_token", "gpus_per_token_grouped"))
        assert 1 - 1e-6 <= stats["grouped_max_mean_load"] <= n_gpus + 1e-6
