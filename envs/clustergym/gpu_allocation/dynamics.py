"""The shared GPU as compiled functions of ONE environment over arrays of many: arrivals, measurement, reward, history.

``State`` holds everything that changes, one row an environment; :func:`step_range` advances a range of rows in one call,
observation, reward and autoreset included, so that threads can take ranges and no Python runs for a single environment.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from clustergym.gpu_allocation import reward as terms
from clustergym.gpu_allocation import specs
from clustergym.gpu_allocation.space import MAX_CORES, MAX_MEMORY_MB, MAX_PODS, MIN_CORES, MIN_MEMORY_MB

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# Nothing here allocates, so nothing needs counting: reference counts of the arrays' views are atomic, all threads write them to
# the same cache lines, and they cost as much as the simulation on one thread and more on two.
_compiled = numba.njit(cache=True, nogil=True, error_model="numpy", _nrt=False)

# Columns of a running pod: all that a measurement needs without a table or a division, in one cache line.
(
    END, CORES, MEMORY, NEED_MB, SLO, JITTER, SOLO, L2, WATTS, INTENSITY, SENSITIVITY, KERNELS, OWNER, LATENCY, USAGE, MET,
) = range(16)  # fmt: skip
N_POD = 16
# Columns of the pod that has just arrived: what it asks for (visible) and what it is (hidden).
(
    ASK_CORES, ASK_MEMORY, ASK_OWNER, ASK_SENSITIVE, ASK_APP, ASK_BATCH, ASK_RATE, ASK_SLO, ASK_NEED_MB, ASK_JITTER,
    ASK_LIFE, ASK_NEED, ASK_WAIT,
) = range(13)  # fmt: skip
N_ASK = 13
# Columns of an owner: habits (hidden).
HABIT_APP, HABIT_BATCH, HABIT_NEED, HABIT_MEMORY, HABIT_RHO, HABIT_ROW = range(6)
N_TEMPLATES = 3
N_HABIT = HABIT_ROW + N_TEMPLATES
# Columns of an owner's history: what was measured of its earlier pods.
(
    H_COUNT, H_MEAN, H_SPREAD, H_MAX, H_LAST, H_LAST_SHARE, H_MISSED, H_LAST_MISSED, H_WORST_SHARE, H_BEST_SHARE,
    H_MEMORY_MAX, H_OOM,
) = range(12)  # fmt: skip
N_HISTORY = 12
# Columns of what the last step came to.
(
    O_REWARD, O_EFFICIENCY, O_QOS, O_MONOPOLY, O_UNDER, O_CORES, O_MEMORY, O_USAGE, O_MET, O_OOM, O_PODS, O_LATENCY,
    O_OWNER, O_REQUEST, O_REQUEST_MB, O_USED_MB, O_TIME, O_WAIT,
) = range(18)  # fmt: skip
N_OUTCOME = 18
# Columns of an episode's sums.
S_RETURN, S_MET, S_EFFICIENCY, S_OOM, S_MONOPOLY, S_WAIT, S_STEPS = range(7)
N_SUMS = 7

N_STATE = 5
N_HISTORY_FEATURES = 14
LARGE = 1e30
NEEDED_MOST, NEEDED_LIMIT = 0.8, 0.85
"""No owner habitually needs more than this part of a request; no pod alone more than that: hardly anyone asks for too little."""
MEMORY_RATE = 0.15
"""Weight of the newest pod in an owner's running averages, once it has had a few."""
FADE = 0.97
"""The worst share that missed and the best that was met are forgotten at this rate: habits are not for ever."""


class State(NamedTuple):
    """Arrays with one row an environment (B)."""

    random: npt.NDArray[np.uint64]
    """(B,) state of the environment's own generator."""
    counters: npt.NDArray[np.int32]
    """(B, 3) decisions taken, pods running, episode over."""
    time_s: Doubles
    """(B,)"""
    pods: Floats
    """(B, MAX_PODS, N_POD)"""
    ask: Floats
    """(B, N_ASK) the pod that waits for a decision"""
    habits: Floats
    """(B, owners, N_HABIT)"""
    history: Floats
    """(B, owners, N_HISTORY)"""
    outcome: Floats
    """(B, N_OUTCOME)"""
    sums: Doubles
    """(B, N_SUMS) of the running episode"""
    final_sums: Doubles
    """(B, N_SUMS) of the last finished episode"""


class Rules(NamedTuple):
    """What does not change while an environment lives."""

    apps: Doubles
    rows: Doubles
    """(n, 3) cores, life, latency-sensitive: what pods are drawn from."""
    owner_weights: Doubles
    """(owners,) cumulative chance of the next pod's owner"""
    app_weights: Doubles
    """(B, apps) cumulative"""
    over_ask: Doubles
    """(B,) mean logit of the needed part of a request; NaN: drawn anew for each episode"""
    mean_gap_s: float
    n_arrivals: int
    unit_percent: float
    mean_logit: float
    node_spread: float
    owner_spread: float
    pod_spread: float


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)
_S16, _S32, _S48, _LOW16 = np.uint64(16), np.uint64(32), np.uint64(48), np.uint64(0xFFFF)


@_compiled
def uniform(random: npt.NDArray[np.uint64], b: int) -> float:
    """The environment's next number in [0, 1): splitmix64."""
    random[b] += _GOLDEN
    z = random[b]
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    z = z ^ (z >> _S31)
    return float(z >> _S11) * (1.0 / 9007199254740992.0)


@_compiled
def normal(random: npt.NDArray[np.uint64], b: int) -> float:
    """Nearly standard normal: the sum of four uniform numbers of 16 bits from one draw. Never beyond 3.5 deviations."""
    random[b] += _GOLDEN
    z = random[b]
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    z = z ^ (z >> _S31)
    total = (z & _LOW16) + ((z >> _S16) & _LOW16) + ((z >> _S32) & _LOW16) + (z >> _S48)
    return (float(total) - 131070.0) * (1.7320508075688772 / 65535.5)


@_compiled
def pick(cumulative: Doubles, u: float) -> int:
    """Index of the first cumulative weight above u."""
    i = 0
    while i < cumulative.shape[0] - 1 and u >= cumulative[i]:
        i += 1
    return i


@_compiled
def solo_latency_ms(apps: Doubles, app: int, batch: float, share: float) -> float:
    """As :meth:`AppSpec.solo_latency_ms`."""
    return (apps[app, 0] * batch * batch + apps[app, 1] * batch + apps[app, 2]) / (share + apps[app, 3]) + apps[app, 4]


@_compiled
def characterise(pod: Floats, ask: Floats, apps: Doubles) -> None:
    """What a pod is like on the share it was given, as long as it lives: alone, before its neighbours are counted."""
    app, batch = int(ask[ASK_APP]), ask[ASK_BATCH]
    solo = solo_latency_ms(apps, app, batch, pod[CORES])
    rate = 1000.0 * min(ask[ASK_RATE], batch / solo)
    pod[SOLO] = solo
    pod[L2] = max(0.0, apps[app, 7] * rate + apps[app, 8])
    pod[WATTS] = apps[app, 9] * rate + apps[app, 10]
    pod[INTENSITY] = ask[ASK_RATE] / batch
    pod[SENSITIVITY], pod[KERNELS] = apps[app, 5], apps[app, 6]
    pod[SLO], pod[JITTER], pod[NEED_MB] = ask[ASK_SLO], ask[ASK_JITTER], ask[ASK_NEED_MB]


@_compiled
def measure(pods: Floats, n: int) -> float:
    """Latency, usage and QoS of the n pods of one node as they run together; returns the GPU's utilisation in %.

    Cache and power follow from what each pod would serve alone at its rate: one pass, no fixed point.
    """
    l2, watts = 0.0, specs.IDLE_W
    for i in range(n):
        l2 += pods[i, L2]
        watts += pods[i, WATTS]
    clock = 1.0
    if watts > specs.POWER_CAP_W:
        clock = specs.CLOCK_MHZ / (specs.CLOCK_MHZ - specs.CLOCK_PER_WATT * (watts - specs.POWER_CAP_W))
    delay = 0.0
    if n > 1:
        delay = specs.SCHEDULE_SLOPE_MS * min(n, specs.SCHEDULE_PODS) - specs.SCHEDULE_BASE_MS
    total = 0.0
    for i in range(n):
        solo = float(pods[i, SOLO])
        crowded = (solo * (1.0 + pods[i, SENSITIVITY] * (l2 - pods[i, L2])) + pods[i, KERNELS] * delay) * clock
        latency = (solo + specs.INTERFERENCE_SCALE * (crowded - solo)) * pods[i, JITTER]
        busy = pods[i, INTENSITY] * latency
        usage = min(1.0, busy) * pods[i, CORES]
        met = busy < 1.0 and latency <= pods[i, SLO] and pods[i, MEMORY] >= pods[i, NEED_MB]
        pods[i, LATENCY], pods[i, USAGE], pods[i, MET] = latency, usage, 1.0 if met else 0.0
        total += usage
    return total


@_compiled
def pressure(pod: Floats) -> float:
    """How much of its share a pod would have to use to meet its objective: its load, or its latency against the objective.

    Both are what monitoring shows: below 1 for a pod that met its objective, and then its usage unless latency binds first;
    above 1 by as much as the share was too small.
    """
    return max(pod[INTENSITY] * pod[LATENCY], pod[LATENCY] / pod[SLO])


@_compiled
def remove(pods: Floats, i: int, n: int) -> int:
    """Take pod i off the node; the last takes its row."""
    if i != n - 1:
        for k in range(N_POD):
            pods[i, k] = pods[n - 1, k]
    return n - 1


@_compiled
def expire(pods: Floats, n: int, time_s: float) -> int:
    """Remove pods whose life is over."""
    i = 0
    while i < n:
        if pods[i, END] <= time_s:
            n = remove(pods, i, n)
        else:
            i += 1
    return n


@_compiled
def fits(pods: Floats, n: int, cores: float, memory: float) -> bool:
    """Whether one more pod of this size has room beside the n that run."""
    for i in range(n):
        cores += pods[i, CORES]
        memory += pods[i, MEMORY]
    return n < MAX_PODS and cores <= MAX_CORES and memory <= MAX_MEMORY_MB


@_compiled
def draw_owners(s: State, b: int, r: Rules) -> None:
    """The owners of an episode: what they run, how much they over-ask, the three sizes that their pods come in."""
    z_node = normal(s.random, b)
    node = r.over_ask[b]
    if math.isnan(node):
        node = r.mean_logit + r.node_spread * z_node
    for o in range(s.habits.shape[1]):
        need = node + r.owner_spread * normal(s.random, b)
        memory = 0.3 + 0.5 * (node - r.mean_logit) + 0.6 * normal(s.random, b)
        s.habits[b, o, HABIT_APP] = pick(r.app_weights[b], uniform(s.random, b))
        s.habits[b, o, HABIT_BATCH] = 2.0 ** (2 + int(4.0 * uniform(s.random, b)))
        s.habits[b, o, HABIT_NEED] = NEEDED_MOST / (1.0 + math.exp(-need))
        s.habits[b, o, HABIT_MEMORY] = NEEDED_MOST / (1.0 + math.exp(-memory))
        s.habits[b, o, HABIT_RHO] = 0.8 + 0.2 * uniform(s.random, b)
        for k in range(N_TEMPLATES):
            s.habits[b, o, HABIT_ROW + k] = int(uniform(s.random, b) * r.rows.shape[0])


@_compiled
def draw_pod(s: State, b: int, r: Rules) -> None:
    """The next pod: always the same number of draws, so that a stream does not depend on what the agent did."""
    owner = pick(r.owner_weights, uniform(s.random, b))
    habit, ask = s.habits[b, owner], s.ask[b]
    row = int(habit[HABIT_ROW + int(uniform(s.random, b) * N_TEMPLATES)])
    life = r.rows[int(uniform(s.random, b) * r.rows.shape[0]), 1]
    z_need, z_latency, wiggle = normal(s.random, b), normal(s.random, b), uniform(s.random, b)
    app, batch = int(habit[HABIT_APP]), float(habit[HABIT_BATCH])
    cores, sensitive = r.rows[row, 0], r.rows[row, 2] > 0.5
    # The share at which this pod, alone, just keeps up with its requests (and meets its objective) sets its rate.
    need = cores * min(habit[HABIT_NEED] * max(1.0 + r.pod_spread * z_need, 0.1), NEEDED_LIMIT)
    latency = solo_latency_ms(r.apps, app, batch, need)
    typical_mb = r.apps[app, 11] + r.apps[app, 12] * batch
    ask[ASK_CORES] = cores
    ask[ASK_MEMORY] = min(max(math.ceil(typical_mb / habit[HABIT_MEMORY]), MIN_MEMORY_MB), MAX_MEMORY_MB)
    ask[ASK_OWNER] = owner
    ask[ASK_SENSITIVE] = 1.0 if sensitive else 0.0
    ask[ASK_APP], ask[ASK_BATCH] = app, batch
    ask[ASK_RATE] = batch / latency * (habit[HABIT_RHO] if sensitive else 1.0)
    ask[ASK_SLO] = latency if sensitive else LARGE
    ask[ASK_NEED_MB] = typical_mb * (0.95 + 0.1 * wiggle)
    ask[ASK_JITTER] = 1.0 + specs.LATENCY_CV * z_latency
    ask[ASK_LIFE], ask[ASK_NEED] = life, need


@_compiled
def next_arrival(s: State, b: int, r: Rules, utilisation: float) -> float:
    """Time passes to the next pod; returns the GPU's utilisation then, in %, which was the given one until now.

    As in Kubernetes, a pod is sent to the node once its request fits what is free there; until then it waits for others to
    end. So a request can always be granted, and who gives less than was asked for makes room for the next.
    """
    draw_pod(s, b, r)
    arrived = s.time_s[b] - r.mean_gap_s * math.log(1.0 - uniform(s.random, b))
    pods, ask, now = s.pods[b], s.ask[b], arrived
    n = expire(pods, s.counters[b, 1], now)
    while not fits(pods, n, ask[ASK_CORES], ask[ASK_MEMORY]):
        now = LARGE
        for i in range(n):
            now = min(now, pods[i, END])
        n = expire(pods, n, now)
    s.time_s[b] = now
    ask[ASK_WAIT] = now - arrived
    if n != s.counters[b, 1]:
        utilisation = measure(pods, n)
        s.counters[b, 1] = n
    return utilisation


@_compiled
def observe(s: State, b: int, utilisation: float, obs: npt.NDArray[np.float32]) -> None:
    """Write the observation: five numbers, and the owner's history where there is room for it."""
    n = s.counters[b, 1]
    used_mb = 0.0
    for i in range(n):
        used_mb += s.pods[b, i, NEED_MB]
    obs[b, 0] = s.ask[b, ASK_CORES] / MAX_CORES
    obs[b, 1] = s.ask[b, ASK_MEMORY] / MAX_MEMORY_MB
    obs[b, 2] = min(utilisation / 100.0, 1.0)
    obs[b, 3] = min(used_mb / MAX_MEMORY_MB, 1.0)
    obs[b, 4] = n / MAX_PODS
    if obs.shape[1] > N_STATE:
        h = s.history[b, int(s.ask[b, ASK_OWNER])]
        cores, memory = obs[b, 0], obs[b, 1]
        obs[b, 5] = h[H_COUNT] / (h[H_COUNT] + 4.0)
        obs[b, 6] = h[H_MEAN]
        obs[b, 7] = h[H_SPREAD]
        obs[b, 8] = h[H_MISSED]
        obs[b, 9] = h[H_LAST_MISSED]
        obs[b, 10] = h[H_OOM]
        obs[b, 11] = s.ask[b, ASK_SENSITIVE]
        # In units of the GPU, for a pod of the size that waits: an allocation is near a linear function of these.
        obs[b, 12] = h[H_MEAN] * cores
        obs[b, 13] = h[H_MAX] * cores
        obs[b, 14] = h[H_LAST] * cores
        obs[b, 15] = h[H_LAST_SHARE] * cores
        obs[b, 16] = h[H_WORST_SHARE] * cores
        obs[b, 17] = h[H_BEST_SHARE] * cores
        obs[b, 18] = h[H_MEMORY_MAX] * memory


@_compiled
def remember(h: Floats, usage: float, share: float, met: bool, oom: bool, memory: float) -> None:
    """Add a pod to its owner's history: the parts of its request that it used, got, and used of the memory."""
    h[H_COUNT] += 1.0
    rate = max(1.0 / h[H_COUNT], MEMORY_RATE)
    missed = 0.0 if met else 1.0
    h[H_OOM] += rate * ((1.0 if oom else 0.0) - h[H_OOM])
    h[H_MEMORY_MAX] = max(memory, h[H_MEMORY_MAX])
    h[H_MISSED] += rate * (missed - h[H_MISSED])
    h[H_LAST_MISSED] = missed
    if oom:
        return
    if h[H_LAST] == 0.0:
        h[H_MEAN], h[H_MAX], h[H_BEST_SHARE] = usage, usage, 1.0
    gap = usage - h[H_MEAN]
    h[H_MEAN] += rate * gap
    h[H_SPREAD] += rate * (abs(gap) - h[H_SPREAD])
    h[H_MAX] = max(usage, FADE * h[H_MAX])
    h[H_LAST], h[H_LAST_SHARE] = usage, share
    h[H_WORST_SHARE] = max(FADE * h[H_WORST_SHARE], 0.0 if met else share)
    relaxed = min(1.0, h[H_BEST_SHARE] / FADE)
    h[H_BEST_SHARE] = min(relaxed, share) if met else relaxed


@_compiled
def allocate(s: State, b: int, r: Rules, cores: float, memory: float) -> float:
    """Give the waiting pod what was decided, never more than it asked for; measure, score, remember.

    Returns the GPU's utilisation, in %.
    """
    pods, n = s.pods[b], s.counters[b, 1]
    ask, out = s.ask[b], s.outcome[b]
    cores, memory = min(cores, ask[ASK_CORES]), min(memory, ask[ASK_MEMORY])
    pod = pods[n]
    pod[END], pod[OWNER] = s.time_s[b] + ask[ASK_LIFE], ask[ASK_OWNER]
    pod[CORES], pod[MEMORY] = cores, memory
    characterise(pod, ask, r.apps)
    n += 1
    utilisation = measure(pods, n)
    oom = memory < ask[ASK_NEED_MB]
    usage = 0.0 if oom else pod[USAGE]
    met = pod[MET] > 0.5
    efficiency = terms.EFFICIENCY_WEIGHT * usage / cores
    qos = terms.QOS_MET if met else terms.QOS_MISSED
    monopoly = -terms.MONOPOLY_PENALTY if cores > terms.MONOPOLY_FACTOR * 100.0 / n else 0.0
    under = -terms.UNDER_PENALTY if cores < terms.UNDER_PERCENT else 0.0
    out[O_REWARD] = efficiency + qos + monopoly + under
    out[O_EFFICIENCY], out[O_QOS], out[O_MONOPOLY], out[O_UNDER] = efficiency, qos, monopoly, under
    out[O_CORES], out[O_MEMORY], out[O_USAGE] = cores, memory, usage
    out[O_MET], out[O_OOM] = 1.0 if met else 0.0, 1.0 if oom else 0.0
    out[O_PODS], out[O_LATENCY] = n, pod[LATENCY]
    out[O_OWNER], out[O_REQUEST], out[O_REQUEST_MB] = ask[ASK_OWNER], ask[ASK_CORES], ask[ASK_MEMORY]
    out[O_USED_MB], out[O_TIME], out[O_WAIT] = min(ask[ASK_NEED_MB], memory), s.time_s[b], ask[ASK_WAIT]
    remember(
        s.history[b, int(ask[ASK_OWNER])],
        min(pressure(pod) * cores / ask[ASK_CORES], 1.0),
        cores / ask[ASK_CORES],
        met,
        oom,
        out[O_USED_MB] / ask[ASK_MEMORY],
    )
    if oom:  # killed: it leaves at once
        n -= 1
        utilisation = measure(pods, n)
    s.counters[b, 1] = n
    sums = s.sums[b]
    sums[S_RETURN] += out[O_REWARD]
    sums[S_MET] += out[O_MET]
    sums[S_EFFICIENCY] += usage / cores
    sums[S_OOM] += out[O_OOM]
    sums[S_MONOPOLY] += 1.0 if monopoly < 0.0 else 0.0
    sums[S_WAIT] += out[O_WAIT]
    sums[S_STEPS] += 1.0
    return utilisation


@_compiled
def begin(s: State, b: int, r: Rules, obs: npt.NDArray[np.float32]) -> None:
    """A new episode: an empty GPU, owners nobody has met, the first pod waiting."""
    s.counters[b, 0] = s.counters[b, 1] = s.counters[b, 2] = 0
    s.time_s[b] = 0.0
    s.history[b] = 0.0
    s.sums[b] = 0.0
    draw_owners(s, b, r)
    observe(s, b, next_arrival(s, b, r, 0.0), obs)


@_compiled
def step_one(
    s: State,
    b: int,
    r: Rules,
    action: npt.NDArray[np.float32],
    obs: npt.NDArray[np.float32],
    last: npt.NDArray[np.float32],
    autoreset: bool,
) -> None:
    """One decision. Where the episode ends, ``last`` gets its last observation and, with autoreset, a new one begins."""
    cores = min(max(float(action[b, 0]), 0.0), 1.0) * (MAX_CORES - MIN_CORES) + MIN_CORES
    memory = min(max(float(action[b, 1]), 0.0), 1.0) * (MAX_MEMORY_MB - MIN_MEMORY_MB) + MIN_MEMORY_MB
    if r.unit_percent > 0:
        cores = math.floor(cores / r.unit_percent + 0.5) * r.unit_percent
    utilisation = allocate(s, b, r, cores, math.floor(memory + 0.5))
    s.counters[b, 0] += 1
    observe(s, b, next_arrival(s, b, r, utilisation), obs)
    if s.counters[b, 0] >= r.n_arrivals:
        s.counters[b, 2] = 1
        for k in range(obs.shape[1]):
            last[b, k] = obs[b, k]
        for k in range(N_SUMS):
            s.final_sums[b, k] = s.sums[b, k]
        if autoreset:
            begin(s, b, r, obs)


@_compiled
def step_range(
    first: int,
    end: int,
    s: State,
    r: Rules,
    action: npt.NDArray[np.float32],
    obs: npt.NDArray[np.float32],
    last: npt.NDArray[np.float32],
    reward: Floats,
    ended: npt.NDArray[np.bool_],
    autoreset: bool,
) -> None:
    """Advance environments first … end−1."""
    for b in range(first, end):
        steps = s.counters[b, 0]
        step_one(s, b, r, action, obs, last, autoreset)
        reward[b] = s.outcome[b, O_REWARD]
        ended[b] = steps + 1 >= r.n_arrivals


@_compiled
def begin_range(
    first: int, end: int, s: State, r: Rules, obs: npt.NDArray[np.float32], where: npt.NDArray[np.bool_]
) -> None:
    """Begin episodes in environments first … end−1 where ``where`` is true."""
    for b in range(first, end):
        if where[b]:
            begin(s, b, r, obs)


@_compiled
def oracle_range(first: int, end: int, s: State, r: Rules, action: npt.NDArray[np.float32]) -> None:
    """The action that earns most now, for someone who knows what the waiting pod needs: every unit of cores is tried.

    Of equal rewards the smallest share is taken. It does not look at pods to come.
    """
    unit = r.unit_percent if r.unit_percent > 0 else 1.0
    for b in range(first, end):
        pods, n, ask = s.pods[b], s.counters[b, 1], s.ask[b]
        pod = pods[n]
        memory = min(math.ceil(ask[ASK_NEED_MB]), ask[ASK_MEMORY])
        pod[MEMORY] = memory
        best, chosen = -LARGE, MIN_CORES
        level = math.ceil(MIN_CORES / unit)
        while True:
            cores = min(level * unit, ask[ASK_CORES])
            pod[CORES] = cores
            characterise(pod, ask, r.apps)
            measure(pods, n + 1)
            value = terms.EFFICIENCY_WEIGHT * pod[USAGE] / cores
            value += terms.QOS_MET if pod[MET] > 0.5 else terms.QOS_MISSED
            if cores > terms.MONOPOLY_FACTOR * 100.0 / (n + 1):
                value -= terms.MONOPOLY_PENALTY
            if value > best + 1e-6:
                best, chosen = value, level * unit
            if level * unit >= ask[ASK_CORES]:
                break
            level += 1
        action[b, 0] = (min(chosen, MAX_CORES) - MIN_CORES) / (MAX_CORES - MIN_CORES)
        action[b, 1] = (memory - MIN_MEMORY_MB) / (MAX_MEMORY_MB - MIN_MEMORY_MB)
