"""Engine profiles: how an engine serves, as far as it matters for placement."""

from __future__ import annotations

from dataclasses import dataclass

from clustergym.common.choices import one_of

PHASES = ("decode", "prefill")
DECODE, PREFILL = range(2)

TRANSPORTS = ("dedup", "per-expert", "allgather", "stay")
DEDUP, PER_EXPERT, ALLGATHER, STAY = range(4)
"""dedup: one copy per destination GPU, one per remote node (DeepEP normal). per-expert: one copy per expert (DeepEP low
latency). allgather: every GPU gets every token. stay: deduplicated, and a token stays where its first expert ran
(ExFlow)."""

DISPATCHES = ("rank-nearest", "random", "token-hash", "round-robin", "rank-mod", "local-hash")
RANK_NEAREST, RANDOM, TOKEN_HASH, ROUND_ROBIN, RANK_MOD, LOCAL_HASH = range(6)
"""Which replica serves a token. See :func:`clustergym.moe_placement.serving.replicas.write_choices`."""


@dataclass(frozen=True)
class EngineProfile:
    """Phase, replica choice and transport of an engine."""

    name: str
    phase: str
    dispatch: str
    transport: str
    about: str

    def __post_init__(self) -> None:
        one_of(self.phase, PHASES, "phase")
        one_of(self.dispatch, DISPATCHES, "dispatch")
        one_of(self.transport, TRANSPORTS, "transport")


PROFILES = {
    profile.name: profile
    for profile in (
        EngineProfile(
            "sglang-prefill", "prefill", "rank-nearest", "dedup", "SGLang, static dispatch, DeepEP normal mode"
        ),
        EngineProfile(
            "sglang-decode", "decode", "rank-nearest", "per-expert", "SGLang, static dispatch, DeepEP low-latency mode"
        ),
        EngineProfile("vllm", "decode", "token-hash", "allgather", "vLLM's default: all-gather and reduce-scatter"),
        EngineProfile("vllm-deepep", "decode", "token-hash", "per-expert", "vLLM with DeepEP low-latency mode"),
        EngineProfile("tensorrt-llm", "decode", "round-robin", "dedup", "TensorRT-LLM with attention data parallelism"),
        EngineProfile("vllm-ascend", "decode", "rank-mod", "per-expert", "vllm-ascend"),
    )
}
"""Every profile by its name."""


def get_profile(profile: str | EngineProfile) -> EngineProfile:
    """A profile by name, or the profile itself."""
    if isinstance(profile, EngineProfile):
        return profile
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}; the profiles are: {', '.join(PROFILES)}")
    return PROFILES[profile]
