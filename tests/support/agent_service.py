"""The service of the allocation agent without HTTP, learner and GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from clustergym.agent.credentials import Access
from clustergym.agent.policy import Policy
from clustergym.agent.service import Service
from clustergym.agent.settings import ServerSettings
from clustergym.agent.store import Store
from clustergym.agent.telemetry import Telemetry
from trainers import load_trainer


def make_service(folder: Path, share: float = 1.0, **changes: Any) -> Service:
    """A service whose policy's best action is this share of the request."""
    online = load_trainer("ppo_gpu_alloc_online")
    server = dataclasses.replace(ServerSettings(store=folder, telemetry_s=0), **changes)
    state = dict(online.initial_state(online.Args(levels=10)))
    if share < 1:
        state["agent"]["actor.4.bias"][round(10 * share) - 1] = 20.0
    policy = Policy(state | {"version": 0})
    return Service(server, Store(folder), Telemetry((), 0), policy, None, Access(None), seed=0)
