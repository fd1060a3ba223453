"""Engine profiles: how an engine serves, as far as it matters for placement.

One GPU is one expert-parallel rank and one data-parallel attention rank. In a forward pass every rank contributes
tokens of its own requests. The time between two placement decisions is an interval of many passes; some of them are
simulated exactly and averaged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from clustergym.common.choices import index_of_choice

PHASES = ("decode", "prefill")
DECODE, PREFILL = range(2)

TRANSPORTS = ("dedup", "per-expert", "allgather")
DEDUP, PER_EXPERT, ALLGATHER = range(3)
"""dedup: one copy per destination GPU, one per remote node (DeepEP normal). per-expert: one copy per expert (DeepEP low
latency). allgather: every GPU gets every token."""

DISPATCHES = ("rank-nearest", "random", "token-hash", "round-robin", "rank-mod", "local-hash", "lp")
RANK_NEAREST, RANDOM, TOKEN_HASH, ROUND_ROBIN, RANK_MOD, LOCAL_HASH, LP = range(7)
"""Which replica serves a token. See :func:`clustergym.moe_placement.kernels.replicas.write_choices`."""

TOKENS_PER_RANK = {"decode": 32, "prefill": 128}
"""Tokens that each rank contributes to a pass, if the task does not say."""
SAMPLED_PASSES = {"decode": 4, "prefill": 2}
"""Passes of an interval that are simulated, if the task does not say."""


@dataclass(frozen=True)
class EngineProfile:
    """Phase, replica choice and transport of an engine."""

    name: str
    engine: str
    """Engine whose plan format the profile belongs to."""
    phase: str
    dispatch: str
    transport: str
    kernels: tuple[str, ...]
    """Expert kernels that the engine uses, best known first (see :mod:`clustergym.moe_placement.costs`)."""
    about: str
    deals_one_node: bool = False
    """Of the dispatch rank-nearest: if all replicas of an expert are on one node, the ranks of that node are dealt over
    them. Otherwise they all use the first one."""
    draws: bool = False
    """Of the dispatch rank-nearest: ranks without a near replica draw one at random, each for itself, instead of being
    dealt over the replicas evenly. So SGLang serves from its start to its first rebalancing."""

    def __post_init__(self) -> None:
        index_of_choice(self.phase, PHASES, "phase")
        index_of_choice(self.dispatch, DISPATCHES, "dispatch")
        index_of_choice(self.transport, TRANSPORTS, "transport")

    def with_phase(self, phase: str) -> EngineProfile:
        """The same engine in another phase."""
        return self if phase == self.phase else replace(self, name=f"{self.name} ({phase})", phase=phase)


PROFILES = {
    profile.name: profile
    for profile in (
        EngineProfile(
            "sglang-prefill", "sglang", "prefill", "rank-nearest", "dedup", ("deepep-prefill", "sglang"),
            "SGLang prefill: static dispatch, DeepEP normal mode",
        ),
        EngineProfile(
            "sglang-decode", "sglang", "decode", "rank-nearest", "per-expert", ("deepep-decode", "sglang"),
            "SGLang decode: static dispatch, DeepEP low-latency mode",
        ),
        EngineProfile(
            "sglang-lp", "sglang", "prefill", "lp", "dedup", ("deepep-prefill", "sglang"),
            "SGLang prefill: a linear program splits the tokens over the replicas (LPLB)",
        ),
        EngineProfile(
            "vllm", "vllm", "decode", "token-hash", "allgather", ("vllm",),
            "vLLM's default: all-gather and reduce-scatter",
        ),
        EngineProfile(
            "vllm-deepep", "vllm", "decode", "token-hash", "per-expert", ("deepep-decode", "vllm"),
            "vLLM with DeepEP low-latency mode",
        ),
        EngineProfile(
            "tensorrt-llm", "tensorrt-llm", "decode", "round-robin", "dedup", ("vllm",),
            "TensorRT-LLM with attention data parallelism",
        ),
        EngineProfile(
            "vllm-ascend", "vllm-ascend", "decode", "rank-mod", "per-expert", ("vllm",),
            "vllm-ascend",
        ),
    )
}  # fmt: skip
"""Every profile by its name."""

STATES = {
    profile.name: profile
    for suffix, draws, about in (
        ("-start", True, "SGLang 0.5.16 and newer from its start to its first rebalancing"),
        ("-0.5.16", False, "SGLang 0.5.16 and newer after a rebalancing"),
    )
    for profile in (
        replace(
            PROFILES[f"sglang-{phase}"], name=f"sglang-{phase}{suffix}", deals_one_node=True, draws=draws,
            about=f"{PROFILES[f'sglang-{phase}'].about}, {about}",
        )
        for phase in ("prefill", "decode")
    )
}  # fmt: skip
"""How newer versions of an engine serve at their start and later. Results are published for :data:`PROFILES`; these can
be planned for, too."""

DEFAULT_PROFILE = "sglang-prefill"


def get_profile(profile: str | EngineProfile) -> EngineProfile:
    """A profile by name, or the profile itself."""
    if isinstance(profile, EngineProfile):
        return profile
    known = PROFILES | STATES
    if profile not in known:
        raise ValueError(f"unknown profile {profile!r}; the profiles are: {', '.join(known)}")
    return known[profile]


def phases_of(engine: str) -> list[EngineProfile]:
    """The profiles under which an engine serves both phases from one plan, as it does when it has loaded the plan."""
    if engine == "sglang":
        return [STATES["sglang-prefill-start"], STATES["sglang-decode-start"]]
    own = profiles_of(engine)[0]
    return [own, *(own.with_phase(phase) for phase in PHASES if phase != own.phase)]


def profiles_of(engine: str) -> list[EngineProfile]:
    """The profiles of an engine; the first one is its default."""
    return [profile for profile in PROFILES.values() if profile.engine == engine]
