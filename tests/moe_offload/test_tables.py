"""Tables against counts by hand and by loops, and the parts of a trace."""

from __future__ import annotations

import numpy as np
import pytest

from clustergym import SyntheticConfig, TokenTrace, synthetic_trace
from clustergym.moe_offload.tables import (
    AHEAD,
    NEXT_TOKEN,
    SMOOTHING_TOKENS,
    Tables,
    clean,
    first_tokens,
    split_sequences,
    without,
)  # fmt: skip


def logit(p: float) -> float:
    return float(np.log(p / (1 - p)))


def test_counts_of_a_trace_by_hand() -> None:
    # Two sequences of two layers with one expert of three per token. Transitions do not cross sequences.
    trace = TokenTrace(np.array([[[0], [1]], [[0], [2]], [[1], [1]]], np.int16), n_experts=3, seq_lens=np.array([2, 1]))
    tables = Tables.count(trace)
    assert tables.popularity == pytest.approx(np.array([[2 / 3, 1 / 3, 0], [0, 2 / 3, 1 / 3]]))
    assert tables.profiles[0] == pytest.approx(np.array([[1, 0, 0], [0, 0.5, 0.5]]))

    def lift(together: int, uses: int, popularity: float) -> float:
        prior = 0.98 * popularity + 0.002
        share = (together + SMOOTHING_TOKENS * prior) / (uses + SMOOTHING_TOKENS)
        return logit(max(share, 1e-4)) - logit(prior)

    # Expert 0 of layer 0 was used twice, then experts 1 and 2 of layer 1.
    assert tables.lifts[0, 0, 0] == pytest.approx([lift(0, 2, 0), lift(1, 2, 2 / 3), lift(1, 2, 1 / 3)], abs=1e-5)
    # Expert 1 of layer 1 was used twice. Only the first time a token of the same sequence follows, with expert 0.
    assert tables.lifts[0, 1, 1, 0] == pytest.approx(lift(1, 2, 2 / 3), abs=1e-5)
    assert tables.lifts[0, 1, 1, 1] == pytest.approx(lift(0, 2, 1 / 3), abs=1e-5)
    assert tables.lifts[NEXT_TOKEN, 1, 1, 2] == pytest.approx(lift(1, 2, 1 / 3), abs=1e-5)


def test_lifts_equal_counts_by_loops() -> None:
    rng = np.random.default_rng(0)
    lengths = np.array([1, 7, 3, 12])
    experts = np.array([[rng.permutation(6)[:3] for _ in range(4)] for _ in range(lengths.sum())], np.int16)
    experts[rng.random(experts.shape) < 0.1] = -1
    trace = TokenTrace(experts, n_experts=6, seq_lens=lengths)
    tables = Tables.count(trace)
    for s, start in enumerate(trace.seq_starts):
        uses = (experts[start : start + lengths[s], 2] == 5).sum()
        assert tables.profiles[s, 2, 5] == pytest.approx(uses / lengths[s])
    together = np.zeros((AHEAD + 1, 4, 6, 6))
    for start, length in zip(trace.seq_starts * 4, lengths * 4, strict=True):
        for v in range(start, start + length):
            for i, h in enumerate([*range(1, AHEAD + 1), 4]):
                if v + h < start + length:
                    for a in experts[v // 4, v % 4]:
                        for e in experts[(v + h) // 4, (v + h) % 4]:
                            if a >= 0 and e >= 0:
                                together[i, v % 4, a, e] += 1
    prior = tables.prior()
    for i, h in enumerate([*range(1, AHEAD + 1), 4]):
        for l in range(4):
            to = prior[(l + h) % 4]
            uses = (experts[:, l] == np.arange(6)[:, None, None]).sum((1, 2))
            share = (together[i, l] + SMOOTHING_TOKENS * to) / (uses[:, None] + SMOOTHING_TOKENS)
            expected = np.log(share / (1 - share)) - np.log(to / (1 - to))
            assert tables.lifts[i, l] == pytest.approx(expected, abs=1e-4)


def test_tables_of_another_model_are_refused() -> None:
    trace = TokenTrace(np.zeros((3, 2, 1), np.int16), n_experts=4)
    with pytest.raises(ValueError, match=r"2 layers of 5 experts, but the tables were counted on 2 layers of 4"):
        Tables.count(trace).check(TokenTrace(np.zeros((3, 2, 1), np.int16), n_experts=5))


def long_trace(n: int = 12, **options: object) -> TokenTrace:
    config = SyntheticConfig(n_tokens=100 * n, n_layers=3, n_experts=16, top_k=2, mean_seq_len=100, seq_len_spread=0.0)
    found = synthetic_trace(config)
    return TokenTrace(found.experts, 16, seq_lens=found.seq_lens, domains=found.domains, **options)  # type: ignore[arg-type]


def test_short_repetitive_and_repeated_sequences_are_dropped() -> None:
    trace = long_trace()
    short = trace.select(sequences=[0]).experts[:20]
    loop = np.tile(trace.experts[:5], (20, 1, 1))
    twin = trace.experts[100:200].copy()
    twin[70:] = trace.experts[300:330]  # the same opening of 64 tokens
    dirty = TokenTrace(
        np.concatenate([trace.experts, short, loop, twin]), 16, seq_lens=np.append(trace.seq_lens, [20, 100, 100])
    )
    assert np.array_equal(clean(dirty).experts, trace.experts)
    with pytest.raises(ValueError, match="none of the 1 sequences"):
        clean(TokenTrace(short, 16))


def test_parts_share_no_sequence_and_follow_recorded_splits() -> None:
    trace = long_trace(40)
    parts = split_sequences(trace)
    assert list(parts) == ["fit", "test", "train", "validation"]
    heads = [part.experts[start].tobytes() for part in parts.values() for start in part.seq_starts]
    assert len(heads) == trace.n_sequences == 40
    assert {name: part.n_sequences for name, part in parts.items()} == {
        "fit": 12, "train": 8, "validation": 4, "test": 16,
    }  # fmt: skip
    assert not np.array_equal(split_sequences(trace, seed=1)["fit"].experts, parts["fit"].experts)
    splits = np.array(["train"] * 20 + ["test"] * 15 + ["new-domain"] * 5)
    recorded = split_sequences(long_trace(40, splits=splits))
    assert {name: part.n_sequences for name, part in recorded.items()} == {
        "fit": 12, "new-domain": 5, "test": 15, "train": 8,
    }  # fmt: skip


def test_a_new_domain_is_in_no_other_part() -> None:
    parts = split_sequences(long_trace(40), new_domains=["domain3"])
    assert set(parts["new-domain"].domains) == {"domain3"}
    assert all("domain3" not in part.domains for name, part in parts.items() if name != "new-domain")
    with pytest.raises(ValueError, match="no domain 'maths'; the domains are: domain0"):
        split_sequences(long_trace(), new_domains=["maths"])


def test_too_few_sequences_to_split_is_an_error() -> None:
    with pytest.raises(ValueError, match="no sequence is left for"):
        split_sequences(long_trace().select(sequences=[0]))


def test_drawing_tokens_and_leaving_out_known_sequences() -> None:
    trace = long_trace()
    part = first_tokens(trace, 350)
    assert part.n_tokens == 400
    assert first_tokens(trace, 10**6) is trace
    rest = without(trace, [part])
    assert rest.n_sequences == trace.n_sequences - 4
    with pytest.raises(ValueError, match="all of its sequences"):
        without(part, [trace])
