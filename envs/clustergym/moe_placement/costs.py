"""What a layer costs: measured constants of expert kernels and transports, and the costs of a model on a cluster.

``python benchmarks/cost_model.py`` fits these constants to NVIDIA aiconfigurator's H100 tables (Apache-2.0) and prints
the error on rows that were held out: 4–13 % in the median.
"""

from __future__ import annotations

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


MEASURED = {
    # DeepSeek's grouped GEMM kernels behind DeepEP: h100_sxm sglang 0.5.10, wideep_context_moe_perf (128 rows per
    # block) and wideep_generation_moe_perf (masked layout). Kimi-K2 has the same experts.
    ("deepep-prefill", "deepseek-v3"): KernelCosts(174.0, 405.0, 0.00876, 11.2, 9.20, 128, 0.0),
    ("deepep-prefill", "kimi-k2"): KernelCosts(174.0, 405.0, 0.00876, 11.2, 9.20, 128, 0.0),
    ("deepep-decode", "deepseek-v3"): KernelCosts(21.1, 35.4, 0.0, 13.0, 2.15, 64, 0.0248),
    ("deepep-decode", "kimi-k2"): KernelCosts(21.1, 35.4, 0.0, 13.0, 2.15, 64, 0.0248),
    # SGLang's fused kernel: h100_sxm sglang 0.5.14, moe_perf.
    ("sglang", "qwen3-30b-a3b"): KernelCosts(31.6, 32.5, 0.0502, 3.00, 0.0, 64, 0.0228),
    ("sglang", "qwen3-235b-a22b"): KernelCosts(63.7, 48.4, 0.0778, 9.83, 1.28, 64, 0.101),
    ("sglang", "gpt-oss-20b"): KernelCosts(53.0, 92.8, 0.0792, 13.6, 2.66, 64, 0.133),
    ("sglang", "gpt-oss-120b"): KernelCosts(60.9, 67.8, 0.0822, 15.9, 0.818, 64, 0.158),
    ("sglang", "mixtral-8x7b"): KernelCosts(59.6, 283.0, 0.120, 30.2, 120.0, 64, 0.567),
    ("sglang", "deepseek-v3"): KernelCosts(34.5, 69.3, 0.261, 13.5, 0.0, 64, 0.101),
    ("sglang", "kimi-k2"): KernelCosts(40.8, 62.6, 0.141, 13.3, 0.0, 64, 0.0855),
    # vLLM's fused kernel: h100_sxm vllm 0.24.0, moe_perf.
    ("vllm", "qwen3-30b-a3b"): KernelCosts(33.0, 0.0, 0.0556, 2.99, 0.22, 64, 0.00762),
    ("vllm", "qwen3-235b-a22b"): KernelCosts(43.6, 24.6, 0.109, 11.7, 0.106, 64, 0.0412),
    ("vllm", "gpt-oss-20b"): KernelCosts(80.5, 67.9, 0.00426, 3.91, 0.0, 64, 0.0878),
    ("vllm", "gpt-oss-120b"): KernelCosts(84.8, 66.5, 0.00268, 5.07, 0.0, 64, 0.0949),
    ("vllm", "mixtral-8x7b"): KernelCosts(73.2, 161.0, 0.115, 108.0, 0.0, 64, 0.571),
    ("vllm", "deepseek-v3"): KernelCosts(22.6, 48.7, 0.163, 14.3, 0.0, 64, 0.178),
    ("vllm", "kimi-k2"): KernelCosts(33.1, 37.2, 0.0287, 12.9, 0.621, 64, 0.132),
}
"""Constants by (kernel, model)."""

_START_US = {"dedup": (26.7, 39.5), "stay": (26.7, 39.5), "per-expert": (11.7, 11.4), "allgather": (12.2, 11.0)}
"""Start of dispatch and of combine inside a node of 8 H100: DeepEP normal (wideep_deepep_normal_perf), DeepEP low
latency (wideep_deepep_ll_perf), NCCL all-gather and reduce-scatter (nccl_perf)."""


# What the fits share, for models that were not measured. One more active expert takes 0.92 of the time that reading its
# weights takes at the reached HBM bandwidth (3350 GB/s × 0.8). One more token-expert pair takes its FLOPs at 0.45 of
# the bf16 peak (fp8 twice that). On another GPU, times scale with its memory bandwidth and its peak.
_HBM_GB_S, _TFLOPS = 3350.0, 989.0
_HBM_BYTES_PER_US = _HBM_GB_S * 1e3 * 0.8 / 0.92
_FLOPS_PER_US = {1: 0.45 * 2e6 * _TFLOPS, 2: 0.45 * 1e6 * _TFLOPS}
_KERNEL_START_US = 40.0


def kernel_costs(model: ModelSpec, profile: EngineProfile) -> KernelCosts:
    """The model's own constants, else those measured for the engine's kernel, else constants derived from the sizes."""
    own = (model.kernel_start_us, model.kernel_expert_us, model.kernel_pair_us)
    if any(own):
        return KernelCosts(own[0], 0.0, 0.0, own[1], 0.0, 64, own[2])
    for kernel in profile.kernels:
        if (kernel, model.name) in MEASURED:
            return MEASURED[kernel, model.name]
    flops = _FLOPS_PER_US[1 if model.weight_bytes == 1 else 2]
    pair_us = 2 * model.matrices * model.hidden * model.intermediate / flops
    return KernelCosts(_KERNEL_START_US, 0.0, 0.0, model.expert_bytes / _HBM_BYTES_PER_US, 0.0, 64, pair_us)


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
    kernel, memory, compute = kernel_costs(model, profile), _HBM_GB_S / cluster.hbm_gb_s, _TFLOPS / cluster.bf16_tflops
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
