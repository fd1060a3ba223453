"""Models, clusters and the numbers that the kernels get from them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clustergym.moe_placement import CLUSTERS, MODELS, ClusterSpec, ModelSpec, Simulator, get_cluster, get_model
from clustergym.moe_placement.costs import MEASURED, KernelCosts, costs_of, kernel_costs
from clustergym.moe_placement.kernels.state import Costs
from clustergym.moe_placement.profiles import PROFILES, get_profile, profiles_of

MODEL = ModelSpec("m", 2, 8, 2, 1000, 10, kernel_start_us=10, kernel_expert_us=5, kernel_pair_us=1)
CLUSTER = ClusterSpec("c", 2, 4, 3)


@pytest.mark.parametrize("gpu", ["h800", "h100"])
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (2, 8), (4, 4), (4, 8)])
def test_cluster_presets(gpu: str, nodes: int, per_node: int) -> None:
    spec = get_cluster(f"{gpu}-{nodes}x{per_node}")
    assert (spec.n_nodes, spec.gpus_per_node, spec.n_gpus) == (nodes, per_node, nodes * per_node)
    assert (spec.intra_gb_s, spec.inter_gb_s) == {"h800": (160, 40), "h100": (450, 50)}[gpu]


def test_h800_4x4_has_five_slots_for_64_experts() -> None:
    assert get_cluster("h800-4x4").slots_for(64) == 5
    assert Simulator("deepseek-v2-lite", "h800-4x4").n_slots == 5


@pytest.mark.parametrize(
    ("n_gpus", "n_experts", "slots"),
    # About a quarter more than needed, at least one spare, never more than there are experts.
    [(16, 64, 5), (8, 64, 10), (32, 256, 10), (32, 384, 15), (16, 60, 5), (16, 8, 2), (1, 8, 8), (4, 4, 2), (2, 1, 1)],
)
def test_default_slots(n_gpus: int, n_experts: int, slots: int) -> None:
    assert ClusterSpec("c", 1, n_gpus).slots_for(n_experts) == slots


def test_more_slots_than_experts_would_stay_empty() -> None:
    assert ClusterSpec("c", 1, 2, slots_per_gpu=100).slots_for(6) == 6


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mixtral-8x7b", (32, 8, 2)),
        ("qwen3-30b-a3b", (48, 128, 8)),
        ("qwen3-235b-a22b", (94, 128, 8)),
        ("deepseek-v2-lite", (26, 64, 6)),
        ("deepseek-v3", (58, 256, 8)),
        ("kimi-k2", (60, 384, 8)),
        ("gpt-oss-20b", (24, 32, 4)),
        ("gpt-oss-120b", (36, 128, 4)),
        ("olmoe-1b-7b", (16, 64, 8)),
        ("tiny-moe", (4, 64, 4)),
    ],
)
def test_model_presets(name: str, shape: tuple[int, int, int]) -> None:
    spec = get_model(name)
    assert (spec.n_layers, spec.n_experts, spec.top_k) == shape
    for profile in PROFILES.values():
        costs = kernel_costs(spec, profile)
        assert costs.start_us > 0
        assert costs.expert_us > 0
        assert costs.pair_us + costs.block_us > 0


def test_a_spec_is_returned_as_it_is() -> None:
    assert get_model(MODEL) is MODEL
    assert get_cluster(CLUSTER) is CLUSTER
    assert get_cluster("h800-4x4", slots_per_gpu=6) == replace(CLUSTERS["h800-4x4"], slots_per_gpu=6)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'gpt-9'") as model_error:
        get_model("gpt-9")
    assert all(name in str(model_error.value) for name in MODELS)
    with pytest.raises(ValueError, match=r"unknown cluster 'b9000-1x8'") as cluster_error:
        get_cluster("b9000-1x8")
    assert all(name in str(cluster_error.value) for name in CLUSTERS)
    with pytest.raises(ValueError, match=r"a cluster has no field 'slots'; it has name, .*slots_per_gpu"):
        get_cluster("h800-4x4", slots=6)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_layers", 0, "model 'm': n_layers is 0: expected at least 1"),
        ("n_experts", -1, "model 'm': n_experts is -1: expected at least 1"),
        ("top_k", 0, "model 'm': top_k is 0: expected at least 1"),
        ("top_k", 9, "model 'm': top_k is 9, but there are only 8 experts"),
        ("hidden", 0, "model 'm': hidden is 0: expected at least 1"),
        ("intermediate", 0, "model 'm': intermediate is 0: expected at least 1"),
        ("weight_bytes", 0.0, "model 'm': weight_bytes is 0.0: expected more than 0"),
        ("dispatch_bytes", -1.0, "model 'm': dispatch_bytes is -1.0: expected more than 0"),
        ("combine_bytes", float("nan"), "model 'm': combine_bytes is nan: expected more than 0"),
        ("kernel_pair_us", -0.5, "model 'm': kernel_pair_us is -0.5: expected 0 or more"),
        ("n_groups", 3, "model 'm': 8 experts do not divide into 3 groups"),
        ("group_limit", 2, "model 'm': group_limit is 2, but there are 1 groups"),
        ("layers", (1, 2, 4), "model 'm': layers has 3 entries: expected 2 distinct indices in ascending order"),
        ("layers", (4, 2), "model 'm': layers has 2 entries: expected 2 distinct indices in ascending order"),
        ("layers", (-1, 2), "model 'm': layer -1 given: indices are 0 or more"),
        ("n_hidden_layers", 1, "model 'm': n_hidden_layers is 1, but layer 1 is an MoE layer"),
        ("n_mtp", -1, "model 'm': n_mtp is -1: expected 0 or more"),
        ("kv_bytes", -1.0, "model 'm': kv_bytes is -1.0: expected 0 or more"),
    ],
)
def test_bad_models_are_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(MODEL, **{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_nodes", 0, "cluster 'c': n_nodes is 0: expected at least 1"),
        ("gpus_per_node", 0, "cluster 'c': gpus_per_node is 0: expected at least 1"),
        ("gpus_per_node", 20_000, "cluster 'c' has 40000 GPUs: the simulator takes at most 32767"),
        ("slots_per_gpu", 0, "cluster 'c': slots_per_gpu is 0: expected at least 1"),
        ("intra_gb_s", 0.0, "cluster 'c': intra_gb_s is 0.0: a bandwidth must be more than 0 GB/s"),
        ("inter_gb_s", -40.0, "cluster 'c': inter_gb_s is -40.0: a bandwidth must be more than 0 GB/s"),
        ("intra_latency_us", -1.0, "cluster 'c': intra_latency_us is -1.0: expected 0 µs or more"),
        ("inter_latency_us", float("nan"), "cluster 'c': inter_latency_us is nan: expected 0 µs or more"),
        ("memory_gb", 0.0, "cluster 'c': memory_gb is 0.0: expected more than 0"),
        ("hbm_gb_s", 0.0, "cluster 'c': hbm_gb_s is 0.0: a bandwidth must be more than 0 GB/s"),
        ("bf16_tflops", float("nan"), "cluster 'c': bf16_tflops is nan: expected more than 0"),
    ],
)
def test_bad_clusters_are_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(CLUSTER, **{field: value})


def test_too_few_slots_are_refused() -> None:
    message = "cluster 'c' has too few slots: 8 GPUs × 3 slots = 24 for 25 experts; at least 4 slots per GPU are needed"
    assert CLUSTER.slots_for(24) == 3
    with pytest.raises(ValueError, match=re.escape(message)):
        CLUSTER.slots_for(25)
    with pytest.raises(ValueError, match="too few slots"):
        Simulator("deepseek-v2-lite", CLUSTER)


def test_expert_bytes_counts_three_projections() -> None:
    assert MODEL.expert_bytes == 3 * 1000 * 10 * 2
    # DeepSeek-V3 in fp8: 3 · 7168 · 2048 = 44,040,192 bytes.
    assert MODELS["deepseek-v3"].expert_bytes == 44_040_192


def test_kernel_constants_of_a_model_come_first_then_measured_then_derived_ones() -> None:
    own = replace(MODEL, name="deepseek-v3")
    profile = get_profile("sglang-decode")
    assert kernel_costs(own, profile) == KernelCosts(10, 0, 0, 5, 0, 64, 1)
    # The first kernel of the profile that was measured for the model.
    assert kernel_costs(get_model("deepseek-v3"), profile) is MEASURED["deepep-decode", "deepseek-v3"]
    assert kernel_costs(get_model("gpt-oss-20b"), profile) is MEASURED["sglang", "gpt-oss-20b"]
    derived = kernel_costs(ModelSpec("m", 1, 8, 2, 1000, 10), profile)
    # 60 kB at 0.92 of the time that 3350 GB/s × 0.8 needs; 6·1000·10 FLOP at 0.45 of 989 TFLOP/s.
    assert derived[:5] == (40, 0, 0, pytest.approx(60e3 / 2.68e6 * 0.92), 0)
    assert derived.pair_us == pytest.approx(60e3 / 445.05e6)
    fp8 = kernel_costs(ModelSpec("m", 1, 8, 2, 1000, 10, weight_bytes=1), profile)
    assert fp8.pair_us == pytest.approx(60e3 / 890.1e6)


def test_measured_constants_are_of_models_and_kernels_that_exist() -> None:
    kernels = {kernel for profile in PROFILES.values() for kernel in profile.kernels}
    for (kernel, model), costs in MEASURED.items():
        assert kernel in kernels
        assert model in MODELS
        assert costs.block_tokens in (64, 128)
        assert min(costs) >= 0
        assert costs.expert_us > 0


def test_costs_by_hand() -> None:
    model = replace(MODEL, dispatch_bytes=1, combine_bytes=4)
    cluster = ClusterSpec("c", 2, 2, 4, intra_gb_s=100, inter_gb_s=10, intra_latency_us=1, inter_latency_us=2)
    found = costs_of(model, cluster, get_profile("sglang-prefill"), 512, 3)
    # DeepEP starts in 26.7 and 39.5 µs, links add 3. 1000 B at 100 GB/s = 0.01 µs; 60 kB of weights = 0.6 and 6 µs, in
    # 3 passes.
    known = Costs(
        dispatch_us=29.7, dispatch_intra_us=0.01, dispatch_inter_us=0.1, combine_us=42.5, combine_intra_us=0.04,
        combine_inter_us=0.4, kernel_us=10, kernel_floor_us=0, token_us=0, expert_us=5, block_us=0, block_tokens=64,
        pair_us=1, receive_intra_us=0.2, receive_inter_us=2, background_share=-1,
    )  # fmt: skip
    np.testing.assert_allclose(found, known, rtol=1e-12)


def test_measured_costs_scale_with_the_gpu() -> None:
    profile, model = get_profile("sglang-prefill"), get_model("deepseek-v3")
    cluster = ClusterSpec("c", 1, 8, hbm_gb_s=6700.0, bf16_tflops=989 / 4)
    found, known = costs_of(model, cluster, profile, 1, 1), MEASURED["deepep-prefill", "deepseek-v3"]
    assert (found.kernel_us, found.kernel_floor_us, found.block_tokens) == (174, 405, 128)
    assert (found.expert_us, found.token_us) == (known.expert_us / 2, known.token_us / 2)
    assert (found.block_us, found.pair_us) == (known.block_us * 4, 0)


@pytest.mark.parametrize(("nodes", "per_node", "links"), [(1, 1, 0), (1, 4, 1), (3, 1, 2), (2, 2, 3)])
def test_latency_is_paid_on_the_links_that_exist(nodes: int, per_node: int, links: float) -> None:
    """One GPU exchanges nothing, so that there is not even a start."""
    cluster = ClusterSpec("c", nodes, per_node, 8, intra_latency_us=1, inter_latency_us=2)
    costs = costs_of(MODEL, cluster, get_profile("sglang-decode"), 64, 1)
    starts = (11.7, 11.4) if nodes * per_node > 1 else (0, 0)
    assert (costs.dispatch_us, costs.combine_us) == (starts[0] + links, starts[1] + links)


@pytest.mark.parametrize(("nodes", "per_node", "share", "gb_s"), [(1, 4, 0.75, 100), (4, 2, 0.75, 10), (2, 1, 0.5, 10)])
def test_all_gather_moves_all_tokens(nodes: int, per_node: int, share: float, gb_s: float) -> None:
    """To every GPU those of all other GPUs, or to every node those of all other nodes."""
    cluster = ClusterSpec("c", nodes, per_node, 8, intra_gb_s=100, inter_gb_s=10, inter_latency_us=0)
    costs = costs_of(replace(MODEL, combine_bytes=4), cluster, get_profile("vllm"), 64, 1)
    assert costs.dispatch_us == pytest.approx(12.2 + 64 * share * 2000 / (gb_s * 1e3))
    assert costs.combine_us == pytest.approx(11.0 + 64 * share * 4000 / (gb_s * 1e3))


# Profiles


def test_profiles_are_those_of_the_engines() -> None:
    found = {p.name: (p.engine, p.phase, p.dispatch, p.transport) for p in PROFILES.values()}
    assert found == {
        "sglang-prefill": ("sglang", "prefill", "rank-nearest", "dedup"),
        "sglang-decode": ("sglang", "decode", "rank-nearest", "per-expert"),
        "sglang-lp": ("sglang", "prefill", "lp", "dedup"),
        "vllm": ("vllm", "decode", "token-hash", "allgather"),
        "vllm-deepep": ("vllm", "decode", "token-hash", "per-expert"),
        "tensorrt-llm": ("tensorrt-llm", "decode", "round-robin", "dedup"),
        "vllm-ascend": ("vllm-ascend", "decode", "rank-mod", "per-expert"),
    }
    assert [p.name for p in profiles_of("vllm")] == ["vllm", "vllm-deepep"]


def test_profiles_are_found_by_name() -> None:
    profile = get_profile("vllm")
    assert get_profile(profile) is profile
    assert profile.with_phase("decode") is profile
    newer = get_profile("sglang-decode-0.5.16")
    assert newer.deals_one_node
    assert replace(newer, name="sglang-decode", deals_one_node=False, about="") == replace(
        get_profile("sglang-decode"), about=""
    )
    assert profile.with_phase("prefill") == replace(profile, name="vllm (prefill)", phase="prefill")
    with pytest.raises(ValueError, match="unknown profile 'sglang'; the profiles are: sglang-prefill"):
        get_profile("sglang")


# Clusters by name


def test_clusters_of_any_shape_have_a_name() -> None:
    assert get_cluster("h800-3x8") == ClusterSpec("h800-3x8", 3, 8, None, 160, 40)
    assert get_cluster("h100-8x8", slots_per_gpu=5) == ClusterSpec("h100-8x8", 8, 8, 5, 450, 50)
    for name, spec in CLUSTERS.items():
        assert get_cluster(name) == spec
    assert get_cluster("h800-40x8").n_gpus == 320


@pytest.mark.parametrize(
    "name", ["h800-0x8", "h800-3", "h800-3x", "h800-3x8x2", "h800-03x8", " h800-3x8", "h800-3x8\n"]
)
def test_a_name_that_is_no_shape_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"GPU-NODESxGPUS with GPU one of h800, h100, .*, as in h800-3x8"):
        get_cluster(name)


@pytest.mark.parametrize(
    "other",
    [
        {"profile": "vllm"},
        {"passes_per_interval": 7},
        {"cluster": "h800-2x8"},
        {"migration": "async"},
    ],
)
def test_simulators_are_equal_when_their_arguments_are(other: dict[str, Any]) -> None:
    arguments = {"model": "deepseek-v2-lite", "cluster": "h800-4x4"}
    assert Simulator(**arguments) == Simulator(**arguments)
    assert len({Simulator(**arguments), Simulator(**arguments), Simulator(**(arguments | other))}) == 2
