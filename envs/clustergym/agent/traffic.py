"""Simulated pods that talk to an agent: for the quickstart, the benchmarks and the tests."""

from __future__ import annotations

from typing import Any

from clustergym.gpu_allocation import state
from clustergym.gpu_allocation.batch import AllocationBatch
from clustergym.gpu_allocation.space import MAX_MEMORY_MB, MAX_PODS, inverse_transform
from clustergym.gpu_allocation.specs import AllocationConfig, NodeMix


def pressure_of(ask: list[float], out: list[float]) -> float:
    """The pressure that monitoring would report for a pod: the larger of load and latency / objective."""
    latency = out[state.OUTCOME_LATENCY]
    return max(ask[state.ASK_RATE] / ask[state.ASK_BATCH] * latency, latency / ask[state.ASK_SLO])


class SimulatedNode:
    """One GPU with a stream of pods of six owners. Streams with the same seed have the same pods, whatever is granted.

    Ask the agent with :meth:`request`, then apply its grant with :meth:`apply`, which returns the feedback.
    """

    def __init__(self, seed: int, pods: int, name: str = "node", mix: NodeMix | None = None) -> None:
        self.name = name
        self.batch = AllocationBatch(AllocationConfig(history=True, arrivals=pods + 1, mix=mix, reward="seed"), 1)
        self.batch.seed([seed])
        self.batch.reset()

    @property
    def gpu_load(self) -> tuple[int, int, int]:
        """What NVML would report now: utilisation in %, memory used in MB, number of pods."""
        _, _, gpu_util, mem_util, pods, *_ = self.batch.obs[0].tolist()
        return round(100 * gpu_util), round(MAX_MEMORY_MB * mem_util), round(MAX_PODS * pods)

    @property
    def sensitive(self) -> bool:
        """Whether the waiting pod is latency-sensitive."""
        return bool(self.batch.state.ask[0, state.ASK_SENSITIVE] > 0.5)

    def request(self) -> dict[str, Any]:
        """Body of POST /allocate for the waiting pod."""
        ask = self.batch.state.ask[0].tolist()
        return {
            "owner": f"{self.name}/owner-{ask[state.ASK_OWNER]:g}",
            "cores": ask[state.ASK_CORES],
            "memory": ask[state.ASK_MEMORY],
            "qos_class": "latency-sensitive" if self.sensitive else "best-effort",
        }

    def apply(self, cores: float, memory_mb: float) -> tuple[dict[str, Any], float]:
        """Start the waiting pod with this grant. Returns the body of POST /feedback without an id, and the reward."""
        ask = self.batch.state.ask[0].tolist()
        self.batch.step([inverse_transform(cores, memory_mb)])
        out = self.batch.outcome[0].tolist()
        if cores != out[state.OUTCOME_CORES]:
            raise RuntimeError(f"{cores} % were granted, but the simulator applied {out[state.OUTCOME_CORES]} %")
        body = {
            "actual_usage": out[state.OUTCOME_USAGE], "qos_met": out[state.OUTCOME_MET] > 0.5,
            "pods": int(out[state.OUTCOME_PODS]), "pressure": min(pressure_of(ask, out), 1000.0),
            "memory_used": out[state.OUTCOME_USED_MB], "oom": out[state.OUTCOME_OOM] > 0.5,
        }  # fmt: skip
        return body, out[state.OUTCOME_REWARD]
