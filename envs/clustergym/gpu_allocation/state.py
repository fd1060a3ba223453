"""The arrays that the simulator reads and writes, and names for their columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

# Columns of actions.
ACTION_CORES, ACTION_MEMORY = range(2)
# The first columns of observations; all are in space.STATE_NAMES.
OBS_CORES, OBS_MEMORY = range(2)
# Columns of State.counters.
COUNT_DECISIONS, COUNT_PODS = range(2)
N_COUNTS = 2
# Columns of State.pods: everything that a measurement needs, in one cache line.
(
    POD_END, POD_CORES, POD_MEMORY, POD_NEED_MB, POD_SLO, POD_JITTER, POD_SOLO, POD_L2, POD_WATTS, POD_INTENSITY,
    POD_SENSITIVITY, POD_KERNELS, POD_OWNER, POD_LATENCY, POD_USAGE, POD_MET,
) = range(16)  # fmt: skip
N_POD = 16
# Columns of State.ask. Visible are cores, memory, owner and whether the pod is latency-sensitive; the rest is hidden.
(
    ASK_CORES, ASK_MEMORY, ASK_OWNER, ASK_SENSITIVE, ASK_APP, ASK_BATCH, ASK_RATE, ASK_SLO, ASK_NEED_MB, ASK_JITTER,
    ASK_LIFE, ASK_NEED, ASK_WAIT,
) = range(13)  # fmt: skip
N_ASK = 13
# Columns of State.habits. From HABIT_TEMPLATE on: rows of the workload with the requests that the owner repeats.
# HABIT_NEED and HABIT_MEMORY are logits of the parts of the requested cores and memory that the median pod needs.
HABIT_APP, HABIT_BATCH, HABIT_NEED, HABIT_MEMORY, HABIT_LOAD, HABIT_TEMPLATE = range(6)
N_TEMPLATES = 3
N_HABIT = HABIT_TEMPLATE + N_TEMPLATES
# Columns of State.outcome.
(
    OUTCOME_REWARD, OUTCOME_EFFICIENCY, OUTCOME_QOS, OUTCOME_MONOPOLY, OUTCOME_UNDER_ALLOCATION, OUTCOME_CORES,
    OUTCOME_MEMORY, OUTCOME_USAGE, OUTCOME_MET, OUTCOME_OOM, OUTCOME_PODS, OUTCOME_LATENCY, OUTCOME_OWNER,
    OUTCOME_REQUEST, OUTCOME_REQUEST_MB, OUTCOME_USED_MB, OUTCOME_TIME, OUTCOME_WAIT, OUTCOME_ROOM,
) = range(19)  # fmt: skip
N_OUTCOME = 19
# Columns of State.sums.
SUM_REWARD, SUM_MET, SUM_EFFICIENCY, SUM_OOM, SUM_MONOPOLY, SUM_WAIT, SUM_ROOM, SUM_STEPS = range(8)
N_SUMS = 8
# Columns of Constants.jobs.
JOB_CORES, JOB_LIFE, JOB_SENSITIVE = range(3)


class State(NamedTuple):
    """Everything that changes, one row per environment (B)."""

    random: npt.NDArray[np.uint64]
    """(B,) state of the environment's random number generator"""
    counters: npt.NDArray[np.int32]
    """(B, 2) decisions so far, running pods"""
    time_s: Doubles
    """(B,)"""
    pods: Floats
    """(B, MAX_PODS, N_POD) running pods"""
    ask: Floats
    """(B, N_ASK) the pod that waits for a decision"""
    habits: Floats
    """(B, owners, N_HABIT) what the owners run and need (hidden)"""
    history: Floats
    """(B, owners, N_HISTORY) what was measured of the owners' earlier pods"""
    outcome: Floats
    """(B, N_OUTCOME) result of the last decision"""
    sums: Doubles
    """(B, N_SUMS) over the decisions of the episode"""


class Constants(NamedTuple):
    """Everything that stays the same."""

    apps: Doubles
    """(applications, 11) fields of :class:`AppSpec`"""
    jobs: Doubles
    """(n, 3) cores, life in seconds, whether latency-sensitive: pods are drawn from these; best-effort pods first"""
    n_best_effort: int
    """number of best-effort rows in ``jobs``"""
    owner_weights: Doubles
    """(owners,) cumulative probability of the next pod's owner"""
    app_weights: Doubles
    """(B, applications) cumulative probability of an owner's application"""
    over_ask: Doubles
    """(B,) mean logit of the needed part of a request; NaN: drawn for each episode"""
    mean_gap_s: float
    """mean time between arrivals"""
    unit_percent: float
    with_room: bool
    """whether the waiting time of the next pod is part of the reward"""
    idle_share: float
    mean_logit: float
    node_spread: float
    owner_spread: float
    pod_spread: float
