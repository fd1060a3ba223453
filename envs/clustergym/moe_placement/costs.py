"""What a layer costs: measured constants of expert kernels and transports, and the costs of a model on a cluster.

``python benchmarks/calibration/cost_model.py`` fits these constants to NVIDIA aiconfigurator's H100 tables (Apache-2.0)
and prints the error on rows that were held out: 2–7 % in the median.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from clustergym.moe_placement.kernels.state import Costs
from clustergym.moe_placement.profiles import ALLGATHER, TRANSPORTS, EngineProfile
from clustergym.moe_placement.specs import ClusterSpec, ModelSpec

MIGRATIONS = ("blocking", "async")


class KernelCosts(NamedTuple):
    """Time of a GPU's expert kernel in µs.

    max(floor, start + token · received tokens + Σ (expert + block · ⌈m / block_tokens⌉ + pair · m)), with the sum over
    the GPU's experts that have m > 0 tokens.
    """

    start_us: float
    floor_us: float
    token_us: float
    expert_us: float
    block_us: float
    block_tokens: int
    pair_us: float


class Tile(NamedTuple):
    """Constants of a kernel for passes up to a size. Engines choose another tile for small passes than for large ones.

    The size of a pass is known before it is simulated, so the constants do not change while a placement is searched.
    """

    costs: KernelCosts
    tokens: float = inf
    """Largest pass, in tokens."""
    tokens_per_expert: float = inf
    """Largest pass, in tokens per expert that a GPU holds."""
    local_experts: int = 0
    """Only for GPUs that hold so many experts: engines have tuned settings for some numbers. 0: any."""


def choose_tile(tiles: tuple[Tile, ...], n_tokens: float, local_experts: int) -> Tile:
    """The first tile for passes of ``n_tokens`` tokens on GPUs that hold ``local_experts`` experts of a layer."""
    for tile in tiles:
        if (
            n_tokens <= tile.tokens
            and n_tokens <= tile.tokens_per_expert * local_experts
            and tile.local_experts in (0, local_experts)
        ):
            return tile
    raise ValueError(f"no tile for passes of {n_tokens} tokens: the last tile must have no limit")


MEASURED = {
    # DeepSeek's grouped GEMM kernels behind DeepEP: h100_sxm sglang 0.5.10, wideep_context_moe_perf (128 rows per
    # block) and wideep_generation_moe_perf (masked layout). Kimi-K2 has the same experts. These constants and those of
    # SGLang's gpt-oss-20b are of an earlier fit, at most one point worse than the new one (docs/results/placement.md).
    ("deepep-prefill", "deepseek-v3"): KernelCosts(174.0, 405.0, 0.00876, 11.2, 9.20, 128, 0.0),
    ("deepep-prefill", "kimi-k2"): KernelCosts(174.0, 405.0, 0.00876, 11.2, 9.20, 128, 0.0),
    ("deepep-decode", "deepseek-v3"): KernelCosts(21.1, 35.4, 0.0, 13.0, 2.15, 64, 0.0248),
    ("deepep-decode", "kimi-k2"): KernelCosts(21.1, 35.4, 0.0, 13.0, 2.15, 64, 0.0248),
    # SGLang's fused kernel: h100_sxm sglang 0.5.14, moe_perf.
    ("sglang", "gpt-oss-20b"): KernelCosts(53.0, 92.8, 0.0792, 13.6, 2.66, 64, 0.133),
    ("sglang", "deepseek-v3"): KernelCosts(40.7, 61.4, 0.133, 7.68, 6.56, 64, 0.00406),
    ("sglang", "kimi-k2"): KernelCosts(44.9, 58.9, 0.138, 10.8, 3.51, 64, 0.0315),
    # vLLM's fused kernel: h100_sxm vllm 0.24.0, moe_perf.
    ("vllm", "kimi-k2"): KernelCosts(32.3, 43.6, 0.0296, 10.7, 4.19, 64, 0.0723),
}
"""Constants by (kernel, model), for passes of all sizes."""

TILED: dict[tuple[str, str], tuple[Tile, ...]] = {
    # SGLang's Triton kernel has 16 rows per block for at most one token per expert, else 64, and tuned settings
    # for 64 Qwen3 experts per GPU: h100_sxm sglang 0.5.14, moe_perf.
    ("sglang", "qwen3-30b-a3b"): (
        Tile(KernelCosts(17.6, 22.8, 0.00405, 3.09, 0.231, 16, 0.00965), tokens=192, local_experts=64),
        Tile(KernelCosts(25.1, 22.8, 0.00398, 2.68, 0.615, 64, 0.0105), tokens=768, local_experts=64),
        Tile(KernelCosts(21.7, 292, 0.00409, 2.3, 0.852, 128, 0.0143), local_experts=64),
        Tile(KernelCosts(20.7, 22.8, 0.00463, 3.56, 0.168, 16, 0.00848), tokens_per_expert=1),
        Tile(KernelCosts(33.4, 22.8, 0.0446, 2.51, 1.05, 64, 0.0132)),
    ),
    ("sglang", "qwen3-235b-a22b"): (
        Tile(KernelCosts(22.3, 44.2, 0.00809, 11.2, 1.21, 16, 0.0351), tokens=192, local_experts=64),
        Tile(KernelCosts(45.8, 44.2, 0.0079, 9.74, 2.56, 64, 0.0286), tokens=768, local_experts=64),
        Tile(KernelCosts(42.3, 44.2, 0.00482, 7.67, 4.56, 128, 0.026), local_experts=64),
        Tile(KernelCosts(35.4, 44.2, 0.00719, 10.1, 0.66, 16, 0.663), tokens_per_expert=1),
        Tile(KernelCosts(63.5, 44.2, 0.0724, 8.65, 5.24, 64, 0.0499)),
    ),
    ("sglang", "gpt-oss-120b"): (
        Tile(KernelCosts(32.6, 55.2, 0.0057, 16, 0.951, 16, 0.0729), tokens_per_expert=1),
        Tile(KernelCosts(58, 96.4, 0.0825, 12.1, 7.38, 64, 0.0532)),
    ),
    ("sglang", "mixtral-8x7b"): (
        Tile(KernelCosts(69.9, 181, 0.00812, 111, 6.23, 16, 0.231), tokens_per_expert=1),
        Tile(KernelCosts(69, 285, 0.0035, 60.9, 89.7, 64, 0.00661)),
    ),
    # vLLM's Triton kernel for bf16 weights has 16, 32, 64 or 128 rows per block, by tokens. OpenAI's kernel for mxfp4
    # weights chooses by tokens per expert: h100_sxm vllm 0.24.0, moe_perf.
    ("vllm", "qwen3-30b-a3b"): (
        Tile(KernelCosts(29.1, 32.7, 0.179, 3.22, 0.168, 16, 0.00701), tokens=32),
        Tile(KernelCosts(32.8, 32.7, 0.0879, 2.88, 0.351, 32, 0.0166), tokens=96),
        Tile(KernelCosts(36.6, 32.7, 0.0527, 2.7, 0.547, 64, 0.0043), tokens=512),
        Tile(KernelCosts(41.6, 88.3, 0.0515, 1.65, 1.4, 128, 0.00252)),
    ),
    ("vllm", "qwen3-235b-a22b"): (
        Tile(KernelCosts(40.9, 43.6, 0.00834, 11.2, 0.801, 16, 0.139), tokens=80, local_experts=64),
        Tile(KernelCosts(43.5, 817, 0.00824, 10.1, 2.19, 64, 0.0472), tokens=384, local_experts=64),
        Tile(KernelCosts(42.1, 961, 0.00529, 8.21, 4.21, 128, 0.0313), local_experts=64),
        Tile(KernelCosts(33, 43.6, 0.412, 12.2, 0.669, 16, 0.0161), tokens=32),
        Tile(KernelCosts(35.3, 43.6, 0.318, 11.3, 0.905, 32, 0.00915), tokens=96),
        Tile(KernelCosts(47.9, 91, 0.124, 11.6, 0.829, 64, 0.0048), tokens=512),
        Tile(KernelCosts(51.2, 171, 0.0991, 6.55, 4.8, 128, 0.0168)),
    ),
    ("vllm", "gpt-oss-20b"): (
        Tile(KernelCosts(63.8, 67.6, 0.00432, 3.17, 1.09, 16, 0.11), tokens_per_expert=4),
        Tile(KernelCosts(52.6, 73, 0.00458, 1.6, 4.88, 32, 0.0184), tokens_per_expert=8),
        Tile(KernelCosts(60.7, 83.3, 0.00417, 1.67, 5.92, 64, 0.0139), tokens_per_expert=16),
        Tile(KernelCosts(75.4, 113, 0.00534, 0.343, 10.4, 128, 0.00414)),
    ),
    ("vllm", "gpt-oss-120b"): (
        Tile(KernelCosts(64.1, 66.5, 0.00171, 1.12, 4.32, 16, 0.0417), tokens_per_expert=4),
        Tile(KernelCosts(58.2, 72.9, 0.00428, 1, 4.95, 32, 0.0824), tokens_per_expert=8),
        Tile(KernelCosts(65.3, 83.5, 0.00548, 0.957, 6.26, 64, 0.0438), tokens_per_expert=16),
        Tile(KernelCosts(75.8, 113, 0.0049, 0.291, 10.8, 128, 0.00208)),
    ),
    ("vllm", "mixtral-8x7b"): (
        Tile(KernelCosts(41.8, 164, 0.00803, 32.6, 81.4, 16, 0.426), tokens=32),
        Tile(KernelCosts(53.5, 161, 0.625, 66.9, 26.5, 32, 0.942), tokens=96),
        Tile(KernelCosts(72.7, 252, 0.192, 85.5, 41.2, 64, 0.0342), tokens=512),
        Tile(KernelCosts(85.6, 436, 0.123, 6.41, 38.2, 128, 0.3)),
    ),
    # One tile for fp8 weights.
    ("vllm", "deepseek-v3"): (Tile(KernelCosts(29.7, 43, 0.00831, 6.26, 9.22, 64, 0.0113)),),
}
"""Constants by (kernel, model), for tiles of different sizes."""

_START_US = {"dedup": (26.7, 39.5), "per-expert": (11.7, 11.4), "allgather": (12.2, 11.0)}
"""Start of dispatch and of combine inside a node of 8 H100: DeepEP normal (wideep_deepep_normal_perf), DeepEP low
latency (wideep_deepep_ll_perf), NCCL all-gather and reduce-scatter (nccl_perf)."""


# What the fits share, for models that were not measured. One more active expert takes 0.92 of the time that reading its
# weights takes at the reached HBM bandwidth (3350 GB/s × 0.8). One more token-expert pair takes its FLOPs at 0.45 of
# the bf16 peak (fp8 twice that). On another GPU, times scale with its memory bandwidth and its peak.
_HBM_GB_S, _TFLOPS = 3350.0, 989.0
_HBM_BYTES_PER_US = _HBM_GB_S * 1e3 * 0.8 / 0.92
_FLOPS_PER_US = {1: 0.45 * 2e6 * _TFLOPS, 2: 0.45 * 1e6 * _TFLOPS}
_KERNEL_START_US = 40.0


def measured_tiles(kernel: str, model: str) -> tuple[Tile, ...]:
    """The measured constants of a kernel, or () if the model was not measured with it."""
    if (kernel, model) in MEASURED:
        return (Tile(MEASURED[kernel, model]),)
    return TILED.get((kernel, model), ())


def costs_from_sizes(model: ModelSpec) -> KernelCosts:
    """Constants of a model that was not measured."""
    flops = _FLOPS_PER_US[1 if model.weight_bytes == 1 else 2]
    pair_us = 2 * model.matrices * model.hidden * model.intermediate / flops
    return KernelCosts(_KERNEL_START_US, 0.0, 0.0, model.expert_bytes / _HBM_BYTES_PER_US, 0.0, 64, pair_us)


def kernel_costs(
    model: ModelSpec, profile: EngineProfile, n_tokens: float = inf, local_experts: int = 1
) -> KernelCosts:
    """The model's own constants, else those measured for the engine's kernel, else constants derived from the sizes.

    Measured constants are those for passes of ``n_tokens`` tokens on GPUs that hold ``local_experts`` experts of a
    layer; by default, for large passes.
    """
    own = (model.kernel_start_us, model.kernel_expert_us, model.kernel_pair_us)
    if any(own):
        return KernelCosts(own[0], 0.0, 0.0, own[1], 0.0, 64, own[2])
    for kernel in profile.kernels:
        tiles = measured_tiles(kernel, model.name)
        if tiles:
            return choose_tile(tiles, n_tokens, local_experts).costs
    return costs_from_sizes(model)


def costs_of(
    model: ModelSpec,
    cluster: ClusterSpec,
    profile: EngineProfile,
    n_tokens: int,
    passes_per_interval: int,
    background_share: float = -1.0,
) -> Costs:
    """Costs of passes of ``n_tokens`` tokens. All-gather moves all tokens, whatever the placement."""
    intra_us_per_byte, inter_us_per_byte = 1e-3 / cluster.intra_gb_s, 1e-3 / cluster.inter_gb_s
    out, back = model.hidden * model.dispatch_bytes, model.hidden * model.combine_bytes
    starts = _START_US[profile.transport] if cluster.n_gpus > 1 else (0.0, 0.0)
    latency_us = cluster.intra_latency_us * (cluster.gpus_per_node > 1) + cluster.inter_latency_us * (
        cluster.n_nodes > 1
    )
    dispatch_us, combine_us = starts[0] + latency_us, starts[1] + latency_us
    if TRANSPORTS.index(profile.transport) == ALLGATHER:
        # The slowest link class carries the tokens of all other GPUs, or of all other nodes.
        far = cluster.n_nodes > 1
        share = n_tokens * (1 - 1 / (cluster.n_nodes if far else cluster.n_gpus))
        dispatch_us += share * out * (inter_us_per_byte if far else intra_us_per_byte)
        combine_us += share * back * (inter_us_per_byte if far else intra_us_per_byte)
    kernel = kernel_costs(model, profile, n_tokens, cluster.slots_for(model.n_experts))
    memory, compute = _HBM_GB_S / cluster.hbm_gb_s, _TFLOPS / cluster.bf16_tflops
    return Costs(
        dispatch_us=float(dispatch_us),
        dispatch_intra_us=float(out * intra_us_per_byte),
        dispatch_inter_us=float(out * inter_us_per_byte),
        combine_us=float(combine_us),
        combine_intra_us=float(back * intra_us_per_byte),
        combine_inter_us=float(back * inter_us_per_byte),
        kernel_us=float(kernel.start_us),
        kernel_floor_us=float(kernel.floor_us),
        token_us=float(kernel.token_us * memory),
        expert_us=float(kernel.expert_us * memory),
        block_us=float(kernel.block_us * compute),
        block_tokens=int(kernel.block_tokens),
        pair_us=float(kernel.pair_us * compute),
        receive_intra_us=float(model.expert_bytes * intra_us_per_byte / passes_per_interval),
        receive_inter_us=float(model.expert_bytes * inter_us_per_byte / passes_per_interval),
        background_share=float(background_share),
    )
