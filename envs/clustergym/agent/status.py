"""What the status page shows: the newest pods, the owners, the versions of the policy, and events."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from clustergym.agent.metrics import CLASSES
from clustergym.agent.owners import LEVELS
from clustergym.agent.store import Allocation, Feedback

if TYPE_CHECKING:
    from clustergym.agent.service import Service

MAX_PODS, MAX_EVENTS, MAX_VERSIONS, MAX_OWNERS = 400, 50, 60, 30


class EventLog(logging.Handler):
    """Keeps the newest log lines about levels, versions and failures for the page."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append({"time_s": time.time(), "level": record.levelname, "text": record.getMessage()[:300]})


class Status:
    """Collects what the page shows. After a restart it has only what the store knows about the owners."""

    def __init__(self) -> None:
        self.pods: deque[tuple[Allocation, Feedback]] = deque(maxlen=MAX_PODS)
        self.versions: OrderedDict[int, list[float]] = OrderedDict()
        self.log = EventLog()
        logging.getLogger("clustergym.agent").addHandler(self.log)

    def add(self, allocation: Allocation, outcome: Feedback) -> None:
        """Add the outcome of an allocation."""
        a, f = allocation, outcome
        self.pods.append((a, f))
        sums = self.versions.setdefault(a.version, [0.0, 0.0, 0.0, 0.0])
        for i, value in enumerate((1.0, f.advised_reward, f.advised_qos, f.recommended_reward)):
            sums[i] += value
        if len(self.versions) > MAX_VERSIONS:
            self.versions.popitem(last=False)

    def document(self, service: Service) -> dict[str, Any]:
        """Everything that the page needs, as JSON."""
        owners = [
            {
                "owner": owner, "level": LEVELS[int(state.level)], "pods": int(state.pods), "qos": state.qos,
                "policy_qos": state.advised_qos, "advantage": state.advantage, "falls": int(state.falls),
                "peak_need": state.peak_need, "peak_memory_mb": state.peak_memory_mb,
            }
            for owner, state in service.store.owner_states(MAX_OWNERS)
        ]  # fmt: skip
        versions = [
            {"version": version, "pods": int(n), "reward": reward / n, "qos": qos / n, "recommended": recommended / n}
            for version, (n, reward, qos, recommended) in self.versions.items()
        ]
        pods = [
            {
                "owner": a.owner, "qos_class": CLASSES[bool(a.sensitive)], "requested": a.requested_cores,
                "granted": a.cores, "recommended": a.recommended_cores, "used": f.usage, "met": bool(f.qos_met),
                "recommended_met": bool(f.recommended_qos), "reward": f.reward, "regret": f.regret,
                "decided_by": a.decided_by, "version": a.version,
            }
            for a, f in self.pods
        ]  # fmt: skip
        gpus = [{"gpu": index, **vars(load)} for index, load in service.telemetry.loads.items()]
        return {
            "policy_version": service.policy.version,
            "good_version": service.champion.version if service.champion else None,
            "test": {"pods": service.test.samples, "mean": service.test.mean},
            "shadow": service.settings.shadow, "rails": service.settings.rails, "explore": service.settings.explore,
            "learning": service.learner is not None and service.learner.alive,
            "problems": ([service.store.problem] if service.store.problem else []) + service.problems(),
            "gpus": gpus, "pods": pods, "owners": owners, "versions": versions,
            "events": list(self.log.events),
        }  # fmt: skip


def page() -> str:
    """The status page: one file without references to other servers. It asks for /status.json and for a token."""
    return files("clustergym.agent").joinpath("status.html").read_text()
