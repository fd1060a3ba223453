"""Texts of many domains, and the traces that the small language model records from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import make_tiny_moe_domains
import texts
from clustergym.traces import TokenTrace, split_trace
from make_tiny_moe_domains import Args, main, sequences, train
from texts import DOMAINS, FILES, GENERATED, read_domain


@pytest.mark.parametrize("domain", [*GENERATED, "help", "unicode", "stdlib"])
def test_no_paragraph_is_both_trained_on_and_recorded(domain: str) -> None:
    text = read_domain(domain, 4000, 4000)
    assert not set(text.train) & set(text.recorded)
    assert min(sum(map(len, text.train)), sum(map(len, text.recorded))) > 3000
    assert read_domain(domain, 4000, 4000) == text
    # More recorded text changes nothing about the training text.
    more = read_domain(domain, 4000, 9000)
    assert more.train == text.train
    assert more.recorded[: len(text.recorded)] == text.recorded


def test_files_of_packages_are_found() -> None:
    """One text of each kind of file, without reading all of them."""
    assert len(DOMAINS) == len(FILES) + len(GENERATED) >= 30
    rng = texts.random.Random(0)
    for name in ("docstrings", "readmes", "licences", "numpy", "tests", "torch", "stubs", "headers"):
        assert any(len(next(FILES[name](rng))) > 20 for _ in range(3)), name


def test_sequences_hold_the_text_once() -> None:
    rows = sequences(["abc" * 50, "def" * 60], 300, texts.random.Random(0))
    assert sum(map(len, rows)) == 300
    assert max(map(len, rows)) <= make_tiny_moe_domains.SEQUENCE[1]
    assert len(sequences(["ab"], 300, texts.random.Random(0))[0]) == 3


def test_more_tokens_are_recorded_with_the_same_model(tmp_path: Path) -> None:
    args = Args(
        tokens=1500, domains=("csv", "help", "sql"), steps=3, characters=3000, work=tmp_path, output=tmp_path / "a.npz"
    )
    main(args)
    (model,) = tmp_path.glob("*.pt")
    trained = model.read_bytes()
    trace = TokenTrace.load(args.output)
    assert trace.domain_names == ["csv", "help", "sql"]
    assert (trace.n_tokens, trace.model) == (1500, "tiny-moe")
    main(replace(args, tokens=2400, output=tmp_path / "b.npz"))
    assert [path.read_bytes() == trained for path in tmp_path.glob("*.pt")] == [True]
    longer = TokenTrace.load(tmp_path / "b.npz")
    assert np.array_equal(longer.experts[:500], trace.experts[:500])


def test_training_is_resumed(tmp_path: Path) -> None:
    tokens = torch.arange(1000) % 50 + 1
    whole = train(tokens, 3, 0, tmp_path / "a.pt")
    with pytest.raises(KeyboardInterrupt):
        train(tokens, 3, 0, tmp_path / "b.pt", _interrupt)
    resumed = train(tokens, 3, 0, tmp_path / "b.pt")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def _interrupt(step: int, loss: float) -> None:
    if step == 2:
        raise KeyboardInterrupt


def test_unknown_domains_and_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown text domain 'poetry'"):
        Args(domains=("csv", "poetry"))
    with pytest.raises(ValueError, match="tokens is 0"):
        Args(tokens=0)


def test_the_bundled_sample_agrees_with_its_data_card() -> None:
    trace = TokenTrace.load("tiny_moe_domains")
    assert set(trace.domain_names) == set(DOMAINS)
    assert (trace.n_tokens, trace.n_layers, trace.top_k, trace.n_experts) == (198_000, 4, 4, 64)
    assert (trace.loads() > 0).all()
    parts = {name: split_trace(trace, name) for name in ("train", "validation", "test")}
    assert not set(parts["test"].domain_names) & set(parts["train"].domain_names)
    assert parts["test"].n_tokens == 78_000
