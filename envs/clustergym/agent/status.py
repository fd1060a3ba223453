"""What the status page shows: the newest pods, the owners, who decides, the versions of the policy, and events."""

from __future__ import annotations

import logging
import time
from collections import deque
from importlib.resources import files
from typing import Any

from clustergym.agent.metrics import CLASSES
from clustergym.agent.service import Service
from clustergym.agent.versions import kept_versions

MAX_PODS, MAX_EVENTS, MAX_OWNERS, MAX_RUNNING = 400, 50, 30, 2000


class EventLog(logging.Handler):
    """Keeps the newest log lines for the page."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        logging.getLogger("clustergym.agent").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append({"time_s": time.time(), "level": record.levelname, "text": record.getMessage()[:300]})


def document(service: Service, events: EventLog) -> dict[str, Any]:
    """Everything that the page needs, as JSON."""
    store = service.store
    owners = [
        {
            "owner": owner, "reduced": state.reduced, "pods": state.pods, "evidence": state.evidence, "qos": state.qos,
            "falls": state.falls, "peak_need": state.peak_need, "peak_memory_mb": state.peak_memory_mb,
        }
        for owner, state in store.owners(MAX_OWNERS)
    ]  # fmt: skip
    pods = [
        {
            "owner": a.owner, "qos_class": CLASSES[a.sensitive], "requested": a.requested.cores,
            "granted": a.granted.cores, "recommended": a.recommended.cores, "vpa": a.vpa.cores, "rule": a.rule.cores,
            "policy": a.policy.cores, "used": f.usage, "met": f.qos_met, "reward": f.reward,
            "rule_reward": f.rule_reward, "policy_reward": f.policy_reward, "rule_met": f.rule_qos,
            "policy_met": f.policy_qos,
            "decided_by": a.decided_by, "why": a.why, "version": a.version,
        }
        for a, f in store.newest(MAX_PODS)
    ]  # fmt: skip
    since = time.time() - service.settings.ttl_s
    running = [a for a in store.open_allocations(MAX_RUNNING) if a.created_s >= since]
    arms = ("granted", "recommended", "rule", "policy", "vpa")
    freed = {name: sum(a.requested.cores - getattr(a, name).cores for a in running) / 100 for name in arms}
    trials = {
        name: {"decides": "policy" if trial.policy_decides else "rule", "pods": trial.pods, "mean": trial.mean}
        for name, trial in service.trials.items()
    }
    loads = service.telemetry.loads if service.telemetry.enabled else {}
    versions = [one._asdict() for one in kept_versions(store.connection)]
    return {
        "policy_version": service.policy.version, "trials": trials, "gpus_freed": freed,
        "running": len(running),
        "shadow": service.settings.shadow, "rails": service.settings.rails, "explore": service.settings.explore,
        "learning": service.learner is not None and service.learner.alive,
        "problems": ([store.problem] if store.problem else []) + service.problems(),
        "gpus": [{"gpu": index, **vars(load)} for index, load in loads.items()],
        "pods": pods, "owners": owners, "versions": versions, "events": list(events.events),
    }  # fmt: skip


def page() -> str:
    """The status page: one file without references to other servers. It asks for /status.json and for a token."""
    return files("clustergym.agent").joinpath("status.html").read_text()
