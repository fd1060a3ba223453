"""The predictor: both forms agree, nothing leaks, files are safe, and it is worth its fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from clustergym import TokenTrace
from clustergym.moe_offload.predictor import Predictor, ServedSequences, fit_predictor
from clustergym.moe_offload.scores import scores_of
from clustergym.moe_offload.tables import Tables, first_tokens, split_sequences
from clustergym.moe_offload.uses import NEVER, WITHIN, next_use, recall, use

pytestmark = pytest.mark.usefixtures("reproducible")


def small_trace(lengths: tuple[int, ...] = (9, 5, 12), seed: int = 0) -> TokenTrace:
    rng = np.random.default_rng(seed)
    experts = np.array([[rng.permutation(6)[:2] for _ in range(5)] for _ in range(sum(lengths))], np.int16)
    experts[rng.random(experts.shape) < 0.1] = -1
    return TokenTrace(experts, n_experts=6, seq_lens=np.array(lengths))


@pytest.fixture(scope="module")
def fitted() -> Predictor:
    return fit_predictor(small_trace(), steps=40, hidden=8, batch=8)


def test_a_visit_at_a_time_equals_whole_sequences(fitted: Predictor) -> None:
    trace = small_trace((8, 8), seed=1)
    whole = fitted.predict(trace)
    served = fitted.start(2)
    rows = np.stack([trace.experts[:8], trace.experts[8:]])
    for t in range(8):
        for l in range(5):
            ahead, keep = fitted.visit(served, l, rows[:, t, l])
            for s in range(2):
                assert keep[s] == pytest.approx(whole.keep[8 * s + t, l], abs=1e-6)
                for h in (1, 2, 3):
                    token, layer = divmod(t * 5 + l + h, 5)
                    if token < 8:
                        assert ahead[s, h - 1] == pytest.approx(whole.ahead[h - 1, 8 * s + token, layer], abs=1e-6)


def test_a_prediction_does_not_depend_on_what_comes_later(fitted: Predictor) -> None:
    trace = small_trace((12,))
    changed = trace.experts.copy()
    changed[6, 3:] = (changed[6, 3:] + 1) % 6
    changed[7:] = (changed[7:] + 1) % 6
    a, b = fitted.predict(trace), fitted.predict(TokenTrace(changed, 6))
    for h in (1, 2, 3):
        # What is known at the last unchanged visit, layer 2 of token 6: the predictions for 1, 2, 3 visits later.
        for v in range(6 * 5 + 2 + h + 1):
            assert np.array_equal(a.ahead[h - 1, v // 5, v % 5], b.ahead[h - 1, v // 5, v % 5])
        v = 6 * 5 + 3 + h
        assert not np.array_equal(a.ahead[h - 1, v // 5, v % 5], b.ahead[h - 1, v // 5, v % 5])
    assert np.array_equal(a.keep[:6], b.keep[:6])


def test_next_use_by_hand() -> None:
    used = use(np.array([[[0]], [[1]], [[0]], [[0]], [[1]]]), 2)
    assert next_use(used, np.array([0, 3])).tolist() == [[[2, 1]], [[1, NEVER]], [[NEVER, NEVER]], [[NEVER, 1]],
                                                         [[NEVER, NEVER]]]  # fmt: skip


def test_padding_is_no_use() -> None:
    assert use(np.array([[2, -1], [-1, -1]]), 3).tolist() == [[0, 0, 1], [0, 0, 0]]


def test_recall_by_hand() -> None:
    trace = TokenTrace(np.array([[[0, 1]], [[2, -1]]], np.int16), n_experts=4)
    scores = np.array([[[0.9, 0.1, 0.8, 0.0]], [[0.9, 0.1, 0.8, 0.0]]])
    assert recall(scores, trace) == pytest.approx(2 / 3)


def test_it_learns_a_rule_of_the_routing() -> None:
    # Layer 1 uses the expert after that of layer 0; layer 0 draws at random.
    rng = np.random.default_rng(0)
    first = rng.integers(0, 8, (600, 1))
    trace = TokenTrace(np.stack([first, (first + 1) % 8], 1).astype(np.int16), 8, seq_lens=np.full(6, 100))
    predictor = fit_predictor(trace.select(sequences=range(5)), steps=400, hidden=16, batch=64, learning_rate=0.01)
    ahead = predictor.predict(trace.select(sequences=[5])).ahead
    assert recall(ahead[0][:, 1:], trace.select(sequences=[5], layers=[1])) > 0.99


def test_saving_and_loading_is_bit_equal(fitted: Predictor, tmp_path: Path) -> None:
    fitted.save(tmp_path / "predictor")
    assert sorted(path.name for path in (tmp_path / "predictor").iterdir()) == [
        "predictor.json", "predictor.safetensors",
    ]  # fmt: skip
    loaded = Predictor.load(tmp_path / "predictor")
    a, b = fitted.predict(small_trace()), loaded.predict(small_trace())
    assert np.array_equal(a.ahead, b.ahead)
    assert np.array_equal(a.keep, b.keep)
    assert loaded.about == fitted.about
    state = torch.random.get_rng_state()
    Predictor.load(tmp_path / "predictor")
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_same_seed_fits_the_same_predictor() -> None:
    a, b, c = (fit_predictor(small_trace(), steps=5, hidden=4, batch=8, seed=seed) for seed in (3, 3, 4))
    weights = [predictor.net.out_weight.detach().numpy() for predictor in (a, b, c)]
    assert np.array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])


def test_hostile_files_are_refused_with_a_sentence(fitted: Predictor, tmp_path: Path) -> None:
    folder = tmp_path / "predictor"
    with pytest.raises(ValueError, match=r"is no predictor: predictor\.json is missing"):
        Predictor.load(folder)
    fitted.save(folder)
    config, weights = folder / "predictor.json", folder / "predictor.safetensors"
    good, tensors = json.loads(config.read_text()), load_file(weights)

    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=match):
            Predictor.load(folder)

    impossible = [json.dumps(good | sizes) for sizes in ({"n_layers": -1}, {"hidden": 10**9}, {"n_experts": "many"})]
    for text in ("", "[]", "{}", "[" * 5000, "\xff", *impossible):
        config.write_text(text, encoding="latin-1")
        refused("not the description of a predictor")
    config.write_text(json.dumps(good | {"format": 99}))
    refused("format 99, this version reads 1")
    for sizes in ({"n_experts": 7}, {"hidden": 9}):
        config.write_text(json.dumps(good | sizes))
        refused("not the weights of a predictor")
    config.write_text(json.dumps(good))
    for content in (b"", b"\x80\x04pickle", b"\xff" * 64, weights.read_bytes()[:-5]):
        weights.write_bytes(content)
        refused("not the weights of a predictor")
    for name, value in (("popularity", torch.full((5, 6), torch.nan)), ("popularity", torch.zeros(5, 6).double())):
        save_file(tensors | {name: value}, weights)
        refused("must be finite numbers of type float32")
    save_file({name: value for name, value in tensors.items() if name != "out_bias"}, weights)
    refused("out_bias")


def test_another_model_is_refused(fitted: Predictor) -> None:
    trace = TokenTrace(np.zeros((3, 2, 1), np.int16), n_experts=4, name="other")
    with pytest.raises(ValueError, match="is for 5 layers of 6 experts, but other has 2 layers of 4"):
        fitted.predict(trace)


def test_serving_begins_with_an_empty_memory(fitted: Predictor) -> None:
    served = fitted.start(3)
    assert isinstance(served, ServedSequences)
    features = served.history.features()
    assert np.array_equal(features[1, :, 2], fitted.popularity)
    assert features[..., 0, :].max() == 0
    # The chance of a use at the next token, if nothing was served: it does not depend on the sequence.
    assert fitted.at_start().shape == (5, 6, len(WITHIN))
    source = scores_of("predictor", small_trace(), np.arange(3)[:, None], Tables.count(small_trace()), fitted)
    assert len(source.keep) == 9 + 5 + 12 + 3
    assert all(np.array_equal(source.keep[row], fitted.at_start()) for row in (0, 10, 16))
    assert np.array_equal(source.keep[1:10], fitted.predict(small_trace()).keep[:9])


@pytest.mark.slow
def test_it_beats_popularity_and_transitions_on_the_bundled_trace() -> None:
    parts = split_sequences(TokenTrace.load("tiny_decode"))
    predictor = fit_predictor(parts["fit"], steps=400)
    test = first_tokens(parts["test"], 4000)
    tables = Tables.count(parts["fit"])
    groups = np.arange(test.n_sequences)[:, None]
    popular = recall(np.broadcast_to(tables.popularity, (test.n_tokens, *tables.shape)), test)
    found = predictor.recall(test)
    for h, name in ((h, name) for name in ("transitions", "frequency-transitions") for h in range(3)):
        assert found[h] > recall(scores_of(name, test, groups, tables, None).ahead[h], test) + 0.05
    assert found[2] > popular + 0.4
    # Chances are calibrated: what is expected within 1, 2, 4 … tokens is what happens.
    keep = predictor.predict(test).keep
    used = use(test.experts, test.n_experts)
    left = np.repeat(test.seq_starts + test.seq_lens, test.seq_lens) - np.arange(test.n_tokens) - 1
    for i, within in enumerate(WITHIN):
        known = left >= within
        happened = next_use(used, test.seq_starts)[known] <= within
        assert keep[known][..., i].mean() == pytest.approx(happened.mean(), rel=0.1)
