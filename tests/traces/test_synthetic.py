"""The synthetic generator: each parameter has its documented effect, and the presets match the real traces."""

from __future__ import annotations

import runpy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym import cli
from clustergym.moe_placement.presets.models import MODELS, get_model
from clustergym.traces import SyntheticConfig, TokenTrace, synthetic_trace
from clustergym.traces.synthetic import _keep_best_groups, _persistent_topics

SMALL = SyntheticConfig(n_tokens=4000, n_layers=4)
ROOT = Path(__file__).resolve().parents[2]

# From `python benchmarks/placement/trace_statistics.py` on the recorded traces, whose sources are in
# docs/reference/file-formats.md.
REAL = {
    "deepseek_v2_lite": {
        "max_mean_load": 2.699,
        "load_gini": 0.275,
        "gpus_per_token": 5.324,
        "gpus_per_token_independent": 5.211,
        "gpus_per_token_grouped": 4.046,
        "grouped_max_mean_load": 1.908,
        "coactivation_lift": 2.362,
        "next_layer_predictability": 0.547,
        "next_layer_chance": 0.197,
        "next_token_overlap": 0.276,
        "domain_divergence": 0.137,
        "window_divergence": 0.0068,
    },
    "gpt_oss_20b": {
        "max_mean_load": 3.126,
        "load_gini": 0.443,
        "gpus_per_token": 3.855,
        "gpus_per_token_independent": 3.770,
        "gpus_per_token_grouped": 3.255,
        "grouped_max_mean_load": 2.710,
        "coactivation_lift": 1.955,
        "next_layer_predictability": 0.591,
        "next_layer_chance": 0.327,
        "next_token_overlap": 0.443,
        "domain_divergence": 0.0729,
        "window_divergence": 0.0674,
    },
}


class TestShape:
    def test_fields_of_the_trace(self) -> None:
        trace = synthetic_trace(SMALL, first_layer=3, n_domains=3, model="toy")
        assert trace.experts.shape == (4000, 4, 6)
        assert trace.n_experts == 64
        assert trace.layer_ids.tolist() == [3, 4, 5, 6]
        assert trace.domain_names == ["domain0", "domain1", "domain2"]
        assert trace.model == "toy"

    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_every_allowed_configuration_gives_a_valid_trace(self, data: st.DataObject) -> None:
        n_experts = data.draw(st.integers(1, 12))
        drift = data.draw(st.floats(0, 1))
        config = SyntheticConfig(
            n_tokens=data.draw(st.integers(9, 300)),
            n_layers=data.draw(st.integers(1, 3)),
            n_experts=n_experts,
            top_k=data.draw(st.integers(1, n_experts)),
            mean_seq_len=data.draw(st.sampled_from([1.0, 7.5, 1e6])),
            seq_len_spread=data.draw(st.sampled_from([0.0, 0.5, 10.0])),
            n_domains=data.draw(st.integers(1, 9)),
            popularity_skew=data.draw(st.sampled_from([0.0, 1.0, 100.0])),
            n_topics=data.draw(st.integers(1, 8)),
            topic_strength=data.draw(st.floats(0, 1)),
            topic_persistence=data.draw(st.sampled_from([0.0, 0.5, 0.999])),
            layer_affinity=data.draw(st.floats(0, 1)),
            domain_drift=drift,
            sequence_drift=(1 - drift) * data.draw(st.floats(0, 1)),
        )
        trace = synthetic_trace(config, seed=data.draw(st.integers(0, 100)))
        # TokenTrace itself refuses ids out of range and experts used twice.
        assert trace.experts.shape == (config.n_tokens, config.n_layers, config.top_k)
        assert trace.experts.min() >= 0
        tokens = [int(trace.seq_lens[trace.domains == d].sum()) for d in trace.domain_names]
        assert len(tokens) == config.n_domains
        assert max(tokens) - min(tokens) <= 1

    def test_all_experts_are_used_when_top_k_is_all(self) -> None:
        trace = synthetic_trace(n_tokens=50, n_layers=2, n_experts=5, top_k=5, n_domains=1)
        assert np.array_equal(trace.experts, np.broadcast_to(np.arange(5), (50, 2, 5)))

    def test_sequence_lengths(self) -> None:
        trace = synthetic_trace(n_tokens=200_000, n_layers=1, n_experts=2, top_k=1, n_domains=1, mean_seq_len=50.0)
        assert trace.seq_lens.mean() == pytest.approx(50.0, rel=0.05)
        assert trace.seq_lens.std() / trace.seq_lens.mean() == pytest.approx(0.86, rel=0.1)
        even = synthetic_trace(n_tokens=1010, n_layers=1, n_domains=1, mean_seq_len=100.0, seq_len_spread=0.0)
        assert even.seq_lens.tolist() == [100] * 10 + [10]

    def test_deterministic_in_the_seed(self) -> None:
        first, again, other = (synthetic_trace(SMALL, seed=seed) for seed in (3, 3, 4))
        assert np.array_equal(first.experts, again.experts)
        assert np.array_equal(first.seq_lens, again.seq_lens)
        assert not np.array_equal(first.experts[:100], other.experts[:100])

    def test_overrides_equal_a_changed_config(self) -> None:
        a = synthetic_trace(SMALL, seed=1, popularity_skew=0.5)
        b = synthetic_trace(replace(SMALL, popularity_skew=0.5), seed=1)
        assert np.array_equal(a.experts, b.experts)

    def test_one_parameter_does_not_change_the_other_draws(self) -> None:
        """More layers do not change the first ones, and popularity_skew does not change the sequences."""
        deep = synthetic_trace(SMALL, n_layers=5)
        shallow = synthetic_trace(SMALL, n_layers=3)
        assert np.array_equal(deep.experts[:, :3], shallow.experts)
        assert np.array_equal(synthetic_trace(SMALL, popularity_skew=1.0).seq_lens, deep.seq_lens)

    def test_persistent_topics_equal_the_plain_recursion(self) -> None:
        seq_lens, persistence = np.array([3, 1, 4]), 0.7
        found = _persistent_topics(seq_lens, 2, persistence, np.random.default_rng(0))()
        steps = np.random.default_rng(0).standard_normal((8, 2))
        expected = steps.copy()
        for t in range(8):
            if t not in (0, 3, 4):
                expected[t] = persistence * expected[t - 1] + np.sqrt(1 - persistence**2) * steps[t]
        np.testing.assert_allclose(found, expected, rtol=1e-5)


class TestParameters:
    """A statistic rises or falls when only its parameter changes."""

    @pytest.mark.parametrize(
        ("parameter", "values", "statistic"),
        [
            ("popularity_skew", [0.0, 0.15, 0.3, 0.6, 1.2], "max_mean_load"),
            ("popularity_skew", [0.0, 0.15, 0.3, 0.6, 1.2], "load_gini"),
            ("topic_strength", [0.0, 0.3, 0.6, 0.9, 1.0], "coactivation_lift"),
            ("layer_affinity", [0.0, 0.5, 0.8, 0.95, 1.0], "next_layer_predictability"),
            ("topic_persistence", [0.0, 0.3, 0.6, 0.9], "next_token_overlap"),
            ("domain_drift", [0.0, 0.05, 0.15, 0.4, 0.9], "domain_divergence"),
        ],
    )
    @pytest.mark.parametrize("seed", [0, 1])
    def test_statistic_rises_with_its_parameter(
        self, parameter: str, values: list[float], statistic: str, seed: int
    ) -> None:
        found = [synthetic_trace(SMALL, seed, **{parameter: value}).statistics()[statistic] for value in values]
        assert (np.diff(found) > 0).all(), found

    @pytest.mark.parametrize("seed", [0, 1])
    def test_sequence_drift_makes_windows_of_one_domain_differ(self, seed: int) -> None:
        one = replace(SMALL, n_domains=1, n_tokens=8000)
        traces = [synthetic_trace(one, seed, sequence_drift=value) for value in (0.0, 0.05, 0.2, 0.6)]
        found = [trace.statistics()["window_divergence"] for trace in traces]
        assert (np.diff(found) > 0).all(), found

    @pytest.mark.parametrize(
        ("parameter", "values", "statistic"),
        [
            ("n_topics", [3, 6, 12, 24], "coactivation_lift"),
            ("topic_strength", [0.0, 0.3, 0.6, 0.9, 1.0], "gpus_per_token_grouped"),
        ],
    )
    def test_statistic_falls_with_its_parameter(self, parameter: str, values: list[float], statistic: str) -> None:
        found = [synthetic_trace(SMALL, 0, **{parameter: value}).statistics()[statistic] for value in values]
        assert (np.diff(found) < 0).all(), found

    def test_all_effects_off_is_uniform_routing(self) -> None:
        trace = synthetic_trace(
            SMALL, popularity_skew=0.0, topic_strength=0.0, layer_affinity=0.0, n_tokens=20_000, n_layers=2
        )
        stats = trace.statistics()
        # Drawn without repeats from 64: lift 64/63, 6/64 predicted by chance, and even loads up to sampling noise.
        assert stats["coactivation_lift"] == pytest.approx(64 / 63, abs=0.01)
        assert stats["next_layer_predictability"] == pytest.approx(6 / 64, abs=0.01)
        assert stats["next_token_overlap"] == pytest.approx(6 / 64, abs=0.01)
        assert stats["max_mean_load"] == pytest.approx(1.0, abs=0.1)
        assert stats["domain_divergence"] == pytest.approx(0.0, abs=1e-3)

    def test_domain_drift_is_more_than_sampling_noise(self) -> None:
        """Without drift the divergence is about 0. With drift it is much larger than with shuffled labels."""
        assert abs(synthetic_trace(SMALL, domain_drift=0.0).statistics()["domain_divergence"]) < 0.01
        stats = synthetic_trace(SMALL, n_tokens=20_000).statistics()
        assert stats["domain_divergence"] > 10 * stats["domain_divergence_shuffled"]

    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_grouping_by_half_of_the_sequences_helps_on_the_other_half(self, seed: int) -> None:
        stats = synthetic_trace(replace(SMALL, n_tokens=10_000), seed).statistics(n_gpus=8)
        # On the real DeepSeek-V2-Lite traces: from 4.56 to 3.31, with 1.70 times the mean load on the busiest GPU.
        assert stats["gpus_per_token"] == pytest.approx(4.56, rel=0.03)
        assert stats["gpus_per_token_grouped"] == pytest.approx(3.31, rel=0.05)
        assert stats["grouped_max_mean_load"] == pytest.approx(1.70, rel=0.15)


class TestPresets:
    def test_the_default_is_deepseek_v2_lite(self) -> None:
        config = SyntheticConfig()
        assert SyntheticConfig.deepseek_v2_lite() == config
        assert (config.n_layers, config.n_experts, config.top_k, config.model) == (26, 64, 6, "deepseek-v2-lite")

    def test_gpt_oss_20b(self) -> None:
        config = SyntheticConfig.gpt_oss_20b()
        assert (config.n_layers, config.n_experts, config.top_k, config.model) == (24, 32, 4, "gpt-oss-20b")

    @pytest.mark.parametrize("preset", sorted(REAL))
    def test_presets_have_the_statistics_of_the_real_traces(self, preset: str) -> None:
        trace = synthetic_trace(getattr(SyntheticConfig, preset)())
        stats = trace.statistics()
        for key, real in REAL[preset].items():
            # The median over 20 to 40 pairs of windows varies by a sixth between seeds, the others hardly.
            assert stats[key] == pytest.approx(real, rel=0.35 if key == "window_divergence" else 0.15), key

    def test_the_bundled_sample_is_the_output_of_its_script(self) -> None:
        made = runpy.run_path(str(ROOT / "traces" / "make_synthetic.py"))["bundled_sample"]()
        bundled = TokenTrace.load("synthetic")
        assert np.array_equal(made.seq_lens, bundled.seq_lens)
        assert np.array_equal(made.domains, bundled.domains)
        # Another processor may sum the scores in another order and break ties differently.
        assert (made.experts == bundled.experts).mean() > 0.999
        assert (ROOT / "traces" / "synthetic.npz").stat().st_size < 900_000


class TestBadParameters:
    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ({"n_tokens": 0}, "n_tokens must be at least 1, found 0"),
            ({"n_tokens": 3, "n_domains": 4}, "n_tokens must be at least n_domains = 4, found 3"),
            ({"n_tokens": 10.0}, r"n_tokens must be an integer, found 10\.0"),
            ({"n_layers": 0}, "n_layers must be at least 1, found 0"),
            ({"n_layers": True}, "n_layers must be an integer, found True"),
            ({"first_layer": -1}, "first_layer must be at least 0, found -1"),
            ({"n_experts": 40_000}, "n_experts must be 1 … 32767, found 40000"),
            ({"top_k": 65}, "top_k must be at most n_experts = 64, found 65"),
            ({"top_k": 0}, "top_k must be at least 1, found 0"),
            ({"mean_seq_len": 0.5}, r"mean_seq_len must be finite and at least 1, found 0\.5"),
            ({"mean_seq_len": float("inf")}, "mean_seq_len must be finite"),
            ({"seq_len_spread": -0.1}, r"seq_len_spread must be 0 … 10, found -0\.1"),
            ({"n_domains": 0}, "n_domains must be at least 1, found 0"),
            ({"popularity_skew": -1.0}, r"popularity_skew must be 0 … 100, found -1\.0"),
            ({"popularity_skew": float("nan")}, "popularity_skew must be 0 … 100, found nan"),
            ({"popularity_skew": "high"}, "popularity_skew must be a number, found 'high'"),
            ({"n_topics": 0}, "n_topics must be at least 1, found 0"),
            ({"topic_strength": 1.1}, r"topic_strength must be 0 … 1, found 1\.1"),
            ({"topic_persistence": 1.0}, "topic_persistence must be below 1"),
            ({"layer_affinity": -0.1}, r"layer_affinity must be 0 … 1, found -0\.1"),
            ({"domain_drift": 2}, "domain_drift must be 0 … 1, found 2"),
            ({"domain_drift": 0.7, "sequence_drift": 0.4}, r"at most 1 .* found 0\.7 \+ 0\.4"),
            ({"model": None}, "model must be a string, found None"),
            ({"skew": 1.0}, "unknown parameter 'skew' of a synthetic trace; the parameters are: n_tokens, n_layers"),
        ],
    )
    def test_errors_name_the_value_and_the_allowed_range(self, overrides: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            synthetic_trace(**overrides)

    def test_numpy_scalars_are_accepted(self) -> None:
        assert synthetic_trace(SMALL, n_tokens=np.int64(40), popularity_skew=np.float32(0.5)).n_tokens == 40

    def test_every_parameter_is_explained_in_the_docs(self) -> None:
        tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
        page = tables["fill"]((ROOT / "docs" / "reference" / "file-formats.md").read_text())
        assert [f.name for f in fields(SyntheticConfig) if f"`{f.name}`" not in page] == []


class TestModels:
    """``for_model`` and ``trace synth --model`` take the sizes of a model."""

    def test_group_limited_routing(self) -> None:
        """DeepSeek-V3: 8 groups of 32 experts, the 8 experts of a token from at most 4 groups."""
        config = SyntheticConfig.for_model(get_model("deepseek-v3"), n_tokens=500, n_layers=3, n_domains=2)
        trace = synthetic_trace(config)
        groups = trace.experts // 32
        used = np.array([[len(set(row)) for row in token] for token in groups.tolist()])
        assert used.max() == 4
        assert len(np.unique(groups)) == 8
        free = synthetic_trace(config, group_limit=0).experts // 32
        assert np.mean([[len(set(row)) > 4 for row in token] for token in free.tolist()]) > 0.5

    def test_best_groups_by_hand(self) -> None:
        """A group scores its best two experts: (9 + 1), (6 + 5), (8 + 0): the first is chosen last."""
        scores = np.array([[9, 1, 0, 6, 5, 4, 8, 0, -1]], np.float32)
        _keep_best_groups(scores, 3, 1)
        assert scores[0].tolist() == [-np.inf] * 3 + [6, 5, 4] + [-np.inf] * 3

    @pytest.mark.parametrize("name", MODELS)
    def test_every_preset(self, name: str) -> None:
        model = get_model(name)
        trace = synthetic_trace(SyntheticConfig.for_model(model, n_tokens=6, n_domains=1))
        assert trace.layer_ids.tolist() == list(model.layer_ids)
        assert (trace.n_experts, trace.top_k, trace.model) == (model.n_experts, model.top_k, name)

    def test_command(self, tmp_path: Path) -> None:
        path = tmp_path / "t.npz"
        small = ["--n-tokens", "40", "--n-domains", "2"]
        assert cli.main(["trace", "synth", str(path), "--model", "kimi-k2", *small]) == 0
        trace = TokenTrace.load(path)
        assert (trace.n_layers, trace.n_experts, trace.top_k, trace.model) == (60, 384, 8, "kimi-k2")
        assert trace.layer_ids[0] == 1
        assert cli.main(["trace", "synth", str(path), "--model=llama-4-maverick", "--n-layers=2", *small]) == 0
        trace = TokenTrace.load(path)
        assert (trace.layer_ids.tolist(), trace.n_experts) == ([1, 2], 128)
        spec = tmp_path / "mine.yaml"
        spec.write_text("n_layers: 2\nn_experts: 12\ntop_k: 3\nhidden: 64\nintermediate: 32\nlayers: [2, 5]\n")
        assert cli.main(["trace", "synth", str(path), "--model", str(spec), *small]) == 0
        trace = TokenTrace.load(path)
        assert (trace.layer_ids.tolist(), trace.n_experts, trace.top_k, trace.model) == ([2, 5], 12, 3, "mine")
        assert cli.main(["trace", "synth", str(path), *small, "--n-layers", "2"]) == 0
        assert TokenTrace.load(path).model == "deepseek-v2-lite"
        assert cli.main(["trace", "synth", str(path), "--model", "nope"]) == 2

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"n_groups": 5}, "n_groups must divide n_experts = 64, found 5"),
            ({"n_groups": 8, "group_limit": 9}, "group_limit must be at most n_groups = 8"),
            ({"n_groups": 32, "group_limit": 2}, "leave top_k = 6 experts, found 2"),
            ({"layers": (1, 2)}, "layers must name n_layers = 26 layers, found 2"),
        ],
    )
    def test_refused(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            SyntheticConfig(**change)
