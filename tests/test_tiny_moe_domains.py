"""Texts of many domains, and the traces that the small language model records from them on demand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from clustergym import cli
from clustergym.common.cache import cache_folder
from clustergym.traces import TokenTrace, split_trace, texts, tiny_moe_domains
from clustergym.traces.texts import DOMAINS, FILES, GENERATED, read_domain
from clustergym.traces.tiny_moe_domains import Recording, make_trace, sequences, train

TINY = Recording(tokens=1500, domains=("csv", "help", "sql"), steps=3, characters=3000)


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
    assert max(map(len, rows)) <= tiny_moe_domains.SEQUENCE[1]
    assert len(sequences(["ab"], 300, texts.random.Random(0))[0]) == 3


def test_a_trace_is_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    path = make_trace(TINY, tmp_path, on_step=lambda step, loss: steps.append(step))
    assert steps == [1, 2, 3]
    trace = TokenTrace.load(path)
    assert trace.domain_names == ["csv", "help", "sql"]
    assert trace.n_tokens == 1500
    assert trace.model == "tiny-moe"
    before = path.stat().st_mtime_ns
    assert make_trace(TINY, tmp_path, on_step=lambda step, loss: steps.append(step)) == path
    assert path.stat().st_mtime_ns == before
    # More tokens need no new training, and begin with the same ones.
    longer = TokenTrace.load(
        make_trace(replace(TINY, tokens=2400), tmp_path, on_step=lambda step, loss: steps.append(step))
    )
    assert steps == [1, 2, 3]
    assert np.array_equal(longer.experts[:500], trace.experts[:500])
    monkeypatch.setenv("CLUSTERGYM_CACHE", str(tmp_path))
    assert np.array_equal(TokenTrace.load(path.stem).experts, trace.experts), "found by name in the cache"


def test_training_is_bounded_and_resumed(tmp_path: Path) -> None:
    tokens = torch.arange(1000) % 50 + 1
    whole, done = train(tokens, 3, 10.0, 0, tmp_path / "a.pt")
    assert done == 3
    # 1e-9 minutes: no step at all; then one step at a time, as if interrupted.
    assert train(tokens, 3, 1e-9, 0, tmp_path / "b.pt")[1] == 0
    with pytest.raises(KeyboardInterrupt):
        train(tokens, 3, 10.0, 0, tmp_path / "b.pt", _interrupt)
    resumed, done = train(tokens, 3, 10.0, 0, tmp_path / "b.pt")
    assert done == 3
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def _interrupt(step: int, loss: float) -> None:
    if step == 2:
        raise KeyboardInterrupt


def test_unknown_domains_and_bad_sizes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "tiny-moe", "--domains", "csv", "poetry"]) == 2
    assert "unknown text domain 'poetry'" in capsys.readouterr().err
    assert cli.main(["trace", "tiny-moe", "--tokens", "0"]) == 2
    assert "tokens is 0" in capsys.readouterr().err


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLUSTERGYM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/clustergym")
    monkeypatch.setenv("CLUSTERGYM_CACHE", "/y")
    assert cache_folder() == Path("/y")


def test_the_bundled_sample_agrees_with_its_data_card() -> None:
    trace = TokenTrace.load("tiny_moe_domains")
    assert set(trace.domain_names) == set(DOMAINS)
    assert (trace.n_tokens, trace.n_layers, trace.top_k, trace.n_experts) == (198_000, 4, 4, 64)
    assert (trace.loads() > 0).all()
    parts = {name: split_trace(trace, name) for name in ("train", "validation", "test")}
    assert not set(parts["test"].domain_names) & set(parts["train"].domain_names)
    assert parts["test"].n_tokens == 78_000
