"""The engine profile of a command line."""

from __future__ import annotations

from clustergym.moe_placement.profiles import EngineProfile, get_profile, profiles_of
from clustergym.plans.engines import get_engine


def chosen_profile(profile: str | None, engine: str, phase: str | None) -> EngineProfile:
    """The profile asked for; by default the first of the engine that serves the phase, if a phase is given."""
    own = profiles_of(get_engine(engine).name)
    if profile is not None:
        chosen = get_profile(profile)
    else:
        chosen = next((one for one in own if phase in (None, one.phase)), own[0])
    return chosen if phase is None else chosen.with_phase(phase)
