"""The bundled decode trace: its splits, and the recorder against a recomputation without a cache."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import make_tiny_decode
from clustergym.traces import TokenTrace, split_trace
from clustergym.traces.token_trace import find_trace
from make_tiny_decode import (
    NEW_DOMAINS,
    OPENING,
    PROMPTS,
    SPLITS,
    Answer,
    Prompt,
    answer,
    choose,
    deal_splits,
    distinct_share,
    documents,
    read_documents,
)
from texts import DOMAINS
from tiny_moe import TinyMoE, TinyMoEConfig

CONFIG = TinyMoEConfig(n_layers=3, n_experts=8, top_k=2, hidden=16, intermediate=4, n_heads=2, context=40)


@pytest.fixture(scope="module")
def trace() -> TokenTrace:
    return TokenTrace.load("tiny_decode")


@pytest.fixture(scope="module")
def own_arrays() -> dict[str, np.ndarray]:
    """Arrays of the file that a TokenTrace does not have."""
    with np.load(find_trace("tiny_decode"), allow_pickle=False) as file:
        return {name: file[name] for name in ("documents", "openings")}


def test_the_bundled_trace_agrees_with_its_data_card(trace: TokenTrace) -> None:
    assert (trace.n_layers, trace.top_k, trace.n_experts) == (12, 4, 32)
    assert trace.n_tokens >= 150_000
    assert trace.prompt_lens is not None
    assert set(trace.prompt_lens) == set(PROMPTS)
    assert set(trace.domain_names) == set(DOMAINS)
    assert (trace.loads() > 0).all()
    assert find_trace("tiny_decode").stat().st_size <= 5_000_000


def test_splits_share_no_document_and_new_domains_are_new(trace: TokenTrace, own_arrays: dict[str, np.ndarray]) -> None:
    assert trace.splits is not None
    assert set(trace.splits) == {*SPLITS, "new-domain"}
    pairs = set(zip(own_arrays["documents"].tolist(), trace.splits.tolist(), strict=True))
    assert max(Counter(document for document, _ in pairs).values()) == 1
    parts = {name: split_trace(trace, name) for name in (*SPLITS, "new-domain")}
    assert sum(part.n_sequences for part in parts.values()) == trace.n_sequences
    assert set(parts["new-domain"].domain_names) == set(NEW_DOMAINS)
    for name in SPLITS:
        assert not set(parts[name].domain_names) & set(NEW_DOMAINS)


def test_no_opening_is_repeated(trace: TokenTrace, own_arrays: dict[str, np.ndarray]) -> None:
    assert len(np.unique(own_arrays["openings"])) == trace.n_sequences
    begins = {trace.experts[start : start + OPENING].tobytes() for start in trace.seq_starts}
    assert len(begins) == trace.n_sequences


@torch.no_grad()
def test_recorded_experts_are_those_of_a_forward_pass_without_a_cache() -> None:
    torch.manual_seed(0)
    model = TinyMoE(CONFIG, 50)
    prompts = torch.randint(1, 50, (5, 7))
    tokens, experts = answer(model, prompts, 20, torch.Generator().manual_seed(1))
    assert experts.shape == (5, 20, 3, 2)
    # Layer by layer over the whole sequences. The experts with the largest logits, without the router's topk.
    x = model.embedding[torch.cat([prompts, tokens], 1)]
    for number, layer in enumerate(model.layers):
        seen = x + layer.attention(layer.norm_attention(x), model.rotations[:, : x.shape[1]], None, number)
        expected = (layer.norm_experts(seen) @ layer.router.weight.T).argsort(-1, descending=True)[:, 7:, :2]
        assert np.array_equal(np.sort(expected, 2), np.sort(experts[:, :, number], 2)), number
        x = layer(x, model.rotations[:, : x.shape[1]], None, number, None)[0]


def test_repetition_is_measured_by_distinct_n_grams() -> None:
    assert distinct_share(list(range(10))) == 1.0
    # abababab has 5 4-grams: abab, baba, abab, baba, abab.
    assert distinct_share([1, 2] * 4) == pytest.approx(2 / 5)


def made_answer(domain: str, document: int, tokens: int, value: int) -> Answer:
    return Answer(Prompt([value], domain, document, 99), np.full((tokens, 1, 1), value, np.uint8))


def test_answers_are_chosen_until_a_domain_has_its_tokens() -> None:
    answers = [made_answer("a", 0, 60, 1), made_answer("a", 0, 60, 1), made_answer("b", 1, 60, 2)]
    answers += [made_answer("a", 2, 60, value) for value in (3, 4)]
    # The second answer begins like the first one. The fifth is not needed: the domain has 120 of 100 tokens.
    assert [each.prompt.tokens for each in choose(answers, 100)] == [[1], [2], [3]]


def test_documents_are_dealt_to_splits_by_their_tokens() -> None:
    answers = [made_answer("csv", i // 2, 50, i) for i in range(200)]
    answers += [made_answer(NEW_DOMAINS[0], 100, 50, 1)]
    splits = deal_splits(answers, seed=0)
    assert splits[0:200:2] == splits[1:200:2], "both answers of a document"
    assert splits[-1] == "new-domain"
    counts = Counter(splits[:-1])
    assert all(abs(counts[name] / 200 - share) <= 0.02 for name, share in SPLITS.items())
    assert deal_splits(answers, seed=0) == splits


@pytest.mark.parametrize("domain", ["csv", "help"])
def test_reserved_documents_are_not_trained_on(domain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tiny_decode, "DOCUMENTS", 5)
    learn, reserved = read_documents(domain, 20_000, seed=0)
    assert len(reserved) == 5
    paragraphs = [{piece for text in part for piece in text.split("\n\n")} for part in (learn, reserved)]
    assert not paragraphs[0] & paragraphs[1]
    assert read_documents(domain, 20_000, seed=0) == (learn, reserved)


def test_documents_have_every_paragraph_once() -> None:
    pieces = [piece for found in islice(documents("csv", 0), 50) for piece in found]
    assert len(set(pieces)) == len(pieces) > 100


def test_recorded_splits_of_a_trace_are_kept(tmp_path: Path) -> None:
    experts = np.arange(12)[:, None, None] % 4
    trace = TokenTrace(
        experts, seq_lens=[3, 4, 5], splits=np.array(["train", "later", "train"]), prompt_lens=np.array([7, 0, 9])
    )
    found = TokenTrace.load(trace.save(tmp_path / "trace.npz"))
    later, train = split_trace(found, "later"), split_trace(found, "train")
    assert (later.n_tokens, later.prompt_lens.tolist()) == (4, [0])
    assert train.experts.ravel().tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert split_trace(found, "all") is found
    joined = TokenTrace.concat([later, train])
    assert joined.splits.tolist() == ["later", "train", "train"]
    assert joined.prompt_lens.tolist() == [0, 7, 9]
    assert TokenTrace.concat([train, TokenTrace(experts)]).splits is None
    with pytest.raises(ValueError, match="unknown split 'test'; expected one of: later, train, all"):
        split_trace(found, "test")
    with pytest.raises(ValueError, match="prompt_lens must be one length of at least 0 for each of the 1 sequences"):
        TokenTrace(experts, prompt_lens=np.array([-1]))
    with pytest.raises(ValueError, match=r"splits has shape \(2,\), but there are 1 sequences"):
        TokenTrace(experts, splits=np.array(["a", "b"]))
