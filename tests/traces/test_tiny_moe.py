"""The small language model against slow references: one token-expert pair at a time, generation without a cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny_moe import (
    ALPHABET,
    END,
    VOCABULARY,
    Cache,
    Experts,
    TinyMoE,
    TinyMoEConfig,
    balance_loss,
    decode,
    encode,
    grouped_mm,
    grouped_mm_loop,
)

CONFIG = TinyMoEConfig(n_layers=2, n_experts=6, top_k=2, hidden=16, intermediate=4, n_heads=2, context=24)


@pytest.fixture(scope="module")
def model() -> TinyMoE:
    torch.manual_seed(0)
    return TinyMoE(CONFIG)


def test_encode_decode_round_trip() -> None:
    text = "Größe: 3 × 4\n\tend"
    assert decode(encode(text)) == "Gr??e: 3 ? 4\n?end"
    assert decode(encode(ALPHABET)) == ALPHABET
    assert sorted(encode(ALPHABET)) == list(range(1, VOCABULARY))
    assert decode([*encode("ab"), END, *encode("c"), END]) == "ab"
    assert decode(torch.tensor(encode("x"))) == "x"


def dense_experts(layer: Experts, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Reference implementation: one token-expert pair at a time."""
    rows = []
    for x, chosen, shares in zip(hidden, experts.tolist(), weights, strict=True):
        out = torch.zeros_like(x)
        for e, w in zip(chosen, shares, strict=True):
            gate, up = (x @ layer.w_in[e]).chunk(2)
            out = out + w * ((gate * torch.sigmoid(gate) * up) @ layer.w_out[e])
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("only", [None, 3])  # all experts in use, or only a few
def test_grouped_experts_match_the_reference(only: int | None) -> None:
    torch.manual_seed(1)
    layer = Experts(CONFIG)
    hidden = torch.randn(11, CONFIG.hidden, requires_grad=True)
    scores = torch.randn(11, CONFIG.n_experts)
    if only is not None:
        scores[:, only] += 100
        scores[:, 0] += 50
    experts = scores.topk(CONFIG.top_k).indices
    weights = torch.rand(11, CONFIG.top_k, requires_grad=True)
    fast, slow = layer(hidden, experts, weights), dense_experts(layer, hidden, experts, weights)
    torch.testing.assert_close(fast, slow)
    leaves = [hidden, weights, layer.w_in, layer.w_out]
    for a, b in zip(
        torch.autograd.grad(fast.square().sum(), leaves), torch.autograd.grad(slow.square().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(a, b)


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any))
@settings(max_examples=30, deadline=None)
def test_grouped_mm_matches_the_loop(counts: list[int]) -> None:
    torch.manual_seed(2)
    rows, weights = torch.randn(sum(counts), 8), torch.randn(len(counts), 8, 12)
    ends = torch.tensor(counts).cumsum(0)
    torch.testing.assert_close(grouped_mm(rows, weights, ends), grouped_mm_loop(rows, weights, ends))


def test_balance_loss_is_one_for_equal_loads_and_larger_otherwise() -> None:
    even = torch.zeros(6, 3)
    assert balance_loss(even, torch.tensor([[0], [1], [2]] * 2)).item() == pytest.approx(1.0)
    # All tokens at expert 0, whose probability is p: the loss is 3 · p.
    skewed = torch.tensor([[2.0, 0.0, 0.0]] * 4)
    p = torch.e**2 / (torch.e**2 + 2)
    assert balance_loss(skewed, torch.zeros(4, 1, dtype=torch.long)).item() == pytest.approx(3 * p, rel=1e-6)


@torch.no_grad()
def test_cache_gives_the_same_logits(model: TinyMoE) -> None:
    tokens = torch.randint(1, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(3))
    cache = Cache(CONFIG, 3, 20, model.embedding)
    parts = [model.trunk(tokens[:, :7], cache)[0]]
    parts += [model.trunk(tokens[:, i : i + 1], cache)[0] for i in range(7, 20)]
    torch.testing.assert_close(model.logits(torch.cat(parts, 1)), model(tokens), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_later_tokens_do_not_change_earlier_logits(model: TinyMoE) -> None:
    tokens = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(4))
    other = tokens.clone()
    other[:, 8:] = 5
    torch.testing.assert_close(model(tokens)[:, :8], model(other)[:, :8])


@torch.no_grad()
def test_generate_matches_sampling_without_a_cache(model: TinyMoE) -> None:
    prompts = torch.randint(1, VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(5))
    fast = model.generate(prompts, 10, torch.Generator().manual_seed(6), temperature=0.8)
    generator, tokens = torch.Generator().manual_seed(6), prompts
    for _ in range(10):
        chosen = torch.multinomial((model(tokens)[:, -1] / 0.8).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, chosen], 1)
    slow = tokens[:, 5:]
    for a, b in zip(fast.tolist(), slow.tolist(), strict=True):
        upto = b.index(END) + 1 if END in b else len(b)
        assert a[:upto] == b[:upto]
        assert not any(a[upto:])


def test_all_tokens_after_the_end_token_are_end_tokens() -> None:
    torch.manual_seed(0)
    model = TinyMoE(CONFIG)
    with torch.no_grad():
        model.embedding[END] *= 60  # makes END a likely next token
    out = model.generate(torch.ones(64, 2, dtype=torch.long), 20, torch.Generator().manual_seed(0))
    ended = [row for row in out.tolist() if END in row]
    assert len(ended) > 10
    assert all(not any(row[row.index(END) :]) for row in ended)


def test_invalid_sizes_are_refused(model: TinyMoE) -> None:
    with pytest.raises(ValueError, match="a sequence of 25 tokens is longer than the context of the model, 24"):
        model(torch.ones(1, 25, dtype=torch.long))
    cache = Cache(CONFIG, 1, 20, model.embedding)
    model.trunk(torch.ones(1, 4, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="2 tokens after 4 in the cache: pass them one at a time"):
        model.trunk(torch.ones(1, 2, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="top_k is 9, but there are only 8 experts"):
        TinyMoEConfig(n_experts=8, top_k=9)
    with pytest.raises(ValueError, match=r"hidden is 100: expected a multiple of 2·n_heads = 8"):
        TinyMoEConfig(hidden=100)
    with pytest.raises(ValueError, match="n_layers is 0: expected at least 1"):
        TinyMoEConfig(n_layers=0)
