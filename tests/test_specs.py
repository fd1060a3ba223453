"""Models, clusters and the numbers that the kernels get from them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clustergym.moe_placement import CLUSTERS, MODELS, ClusterSpec, ModelSpec, Simulator, get_cluster, get_model
from clustergym.moe_placement.specs import Costs, Network

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
    assert spec.kernel_start_us > 0
    assert spec.kernel_expert_us > 0
    assert spec.kernel_pair_us > 0


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


@pytest.mark.parametrize(("n_gpus", "n_nodes"), [(10, 4), (8, 0), (8, -2), (0, 1), (3, 6)])
def test_gpus_must_divide_over_nodes(n_gpus: int, n_nodes: int) -> None:
    with pytest.raises(ValueError, match=r"cluster 'c': "):
        ClusterSpec.from_gpus("c", n_gpus, n_nodes)
    if n_gpus == 10:
        with pytest.raises(ValueError, match=r"10 GPUs do not divide over 4 nodes"):
            ClusterSpec.from_gpus("c", n_gpus, n_nodes)


def test_from_gpus() -> None:
    assert ClusterSpec.from_gpus("c", 12, 3, slots_per_gpu=4) == ClusterSpec("c", 3, 4, 4)


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


def test_kernel_constants_come_from_sizes_only_when_none_is_given() -> None:
    derived = ModelSpec("m", 1, 8, 2, 1000, 10)
    # 60 kB at 0.92 of the time that 3350 GB/s × 0.8 needs; 6·1000·10 FLOP at 0.45 of 989 TFLOP/s.
    assert derived.kernel_start_us == 40
    assert derived.kernel_expert_us == pytest.approx(60e3 / 2.68e6 * 0.92)
    assert derived.kernel_pair_us == pytest.approx(60e3 / 445.05e6)
    assert ModelSpec("m", 1, 8, 2, 1000, 10, weight_bytes=1).kernel_pair_us == pytest.approx(60e3 / 890.1e6)
    assert ModelSpec("m", 1, 8, 2, 1000, 10, kernel_pair_us=1).kernel_start_us == 0


def test_costs_by_hand() -> None:
    model = replace(MODEL, dispatch_bytes=1, combine_bytes=4)
    cluster = ClusterSpec("c", 2, 2, 4, intra_gb_s=100, inter_gb_s=10, intra_latency_us=1, inter_latency_us=2)
    # 1000 B at 100 GB/s = 0.01 µs; 60 kB of weights = 0.6 and 6 µs, in 3 passes.
    known = [3, 0.01, 0.1, 3, 0.04, 0.4, 10, 5, 1, 0.2, 2]
    np.testing.assert_allclose(Costs.of(model, cluster, 3), known, rtol=1e-12)


def test_kernels_scale_with_the_gpu() -> None:
    """An H20 reads weights 4000/3350 times as fast as an H100 and computes 148/989 times as fast."""
    h100, h20 = (Costs.of(MODEL, get_cluster(f"{gpu}-2x8"), 1) for gpu in ("h100", "h20"))
    assert h20.expert_us == pytest.approx(h100.expert_us * 3350 / 4000)
    assert h20.pair_us == pytest.approx(h100.pair_us * 989 / 148)
    assert (h100.expert_us, h100.pair_us) == (MODEL.kernel_expert_us, MODEL.kernel_pair_us)


@pytest.mark.parametrize(("nodes", "per_node", "start"), [(1, 1, 0), (1, 4, 1), (3, 1, 2), (2, 2, 3)])
def test_latency_is_paid_on_the_links_that_exist(nodes: int, per_node: int, start: float) -> None:
    cluster = ClusterSpec("c", nodes, per_node, 8, intra_latency_us=1, inter_latency_us=2)
    costs = Costs.of(MODEL, cluster, 1)
    assert (costs.dispatch_us, costs.combine_us) == (start, start)


@pytest.mark.parametrize("passes", [0, -1])
def test_passes_must_be_positive(passes: int) -> None:
    with pytest.raises(ValueError, match=f"passes_per_window is {passes}: expected at least 1"):
        Costs.of(MODEL, CLUSTER, passes)


def test_weigh_tokens_scales_only_what_each_token_costs() -> None:
    costs = Costs(*(float(x) for x in range(1, 12)))
    assert tuple(costs.weigh_tokens(0.5)) == (1, 1, 1.5, 4, 2.5, 3, 7, 8, 4.5, 10, 11)


def test_network_packs_whole_nodes_into_words() -> None:
    # Counts up to 6 take 3 bits, 21 GPUs per word: two nodes of ten.
    network = Network.of(ClusterSpec("c", 3, 10), 6, 0)
    assert network.node_of.tolist() == [g // 10 for g in range(30)]
    assert (network.field_bits, network.gpus_per_node, network.words_per_node, network.n_words) == (3, 10, 1, 2)
    assert network.word_of.tolist() == [0] * 20 + [1] * 10
    assert network.shift_of.tolist() == [3 * (g % 20) for g in range(30)]
    masks = network.node_mask[[0, 10, 29]]
    assert [hex(mask) for mask in masks] == ["0x3fffffff", "0xfffffffc0000000", "0x3fffffff"]


def test_network_gives_large_nodes_words_of_their_own() -> None:
    # 4 bits, 15 GPUs per word.
    network = Network.of(ClusterSpec("c", 2, 16), 8, 0)
    assert network.word_of.tolist() == [0] * 15 + [1] + [2] * 15 + [3]
    assert network.shift_of.tolist() == ([4 * g for g in range(15)] + [0]) * 2
    assert (network.words_per_node, network.n_words) == (2, 4)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 7, 8, 15, 16, 255])
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (4, 4), (4, 8), (3, 21), (31, 2), (2, 127)])
def test_network_fields_never_overlap(nodes: int, per_node: int, top_k: int) -> None:
    network = Network.of(ClusterSpec("c", nodes, per_node), top_k, 0)
    words: dict[int, int] = {}
    for word, shift in zip(network.word_of.tolist(), network.shift_of.tolist(), strict=True):
        assert words.get(word, 0) & (((1 << network.field_bits) - 1) << shift) == 0
        words[word] = words.get(word, 0) | top_k << shift
    assert sorted(words) == list(range(network.n_words))
    # Never negative, as an int64.
    assert all(w < 2**63 for w in words.values())


def test_clusters_of_any_shape_have_a_name() -> None:
    assert get_cluster("h800-3x8") == ClusterSpec("h800-3x8", 3, 8, None, 160, 40)
    assert get_cluster("h100-8x8", slots_per_gpu=5) == ClusterSpec("h100-8x8", 8, 8, 5, 450, 50)
    for name, spec in CLUSTERS.items():
        assert get_cluster(name) == spec
    assert get_cluster("h800-40x8").n_gpus == 320
    with pytest.raises(ValueError, match="cluster 'h800-40x8' has 320 GPUs: this simulator takes at most 254"):
        Network.of(get_cluster("h800-40x8"), 8, 0)


@pytest.mark.parametrize(
    "name", ["h800-0x8", "h800-3", "h800-3x", "h800-3x8x2", "h800-03x8", " h800-3x8", "h800-3x8\n"]
)
def test_a_name_that_is_no_shape_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"GPU-NODESxGPUS with GPU one of h800, h100, .*, as in h800-3x8"):
        get_cluster(name)


@pytest.mark.parametrize("other", [{"comm": "stay"}, {"passes_per_window": 7}, {"cluster": "h800-2x8"}])
def test_simulators_are_equal_when_their_arguments_are(other: dict[str, Any]) -> None:
    arguments = {"model": "deepseek-v2-lite", "cluster": "h800-4x4"}
    assert Simulator(**arguments) == Simulator(**arguments)
    assert len({Simulator(**arguments), Simulator(**arguments), Simulator(**(arguments | other))}) == 2
