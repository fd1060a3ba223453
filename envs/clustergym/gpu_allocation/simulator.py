"""The simulator: compiled functions of ONE environment, over arrays that hold many.

:func:`step_range` advances a range of environments in one call, including observation and reward, so that threads can
work on ranges without the interpreter.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from clustergym.common.compiling import compiler, imported_sources, source_fingerprint
from clustergym.gpu_allocation import fitted, history, reward, space, specs
from clustergym.gpu_allocation.space import MAX_CORES, MAX_MEMORY_MB, MAX_PODS, MIN_CORES, MIN_MEMORY_MB, N_STATE

# isort: off
from clustergym.gpu_allocation.state import (
    ACTION_CORES, ACTION_MEMORY, ASK_APP, ASK_BATCH, ASK_CORES, ASK_JITTER, ASK_LIFE, ASK_MEMORY, ASK_NEED, ASK_NEED_MB,
    ASK_OWNER, ASK_RATE, ASK_SENSITIVE, ASK_SLO, ASK_WAIT, COUNT_DECISIONS, COUNT_PODS, HABIT_APP,
    HABIT_BATCH, HABIT_LOAD, HABIT_MEMORY, HABIT_NEED, HABIT_TEMPLATE, JOB_CORES, JOB_LIFE, JOB_SENSITIVE, N_POD,
    N_TEMPLATES, OBS_CORES, OBS_MEMORY, OUTCOME_CORES, OUTCOME_EFFICIENCY, OUTCOME_LATENCY, OUTCOME_MEMORY,
    OUTCOME_MET, OUTCOME_MONOPOLY, OUTCOME_OOM, OUTCOME_OWNER, OUTCOME_PODS, OUTCOME_QOS, OUTCOME_REQUEST,
    OUTCOME_REQUEST_MB, OUTCOME_REWARD, OUTCOME_ROOM, OUTCOME_TIME, OUTCOME_UNDER_ALLOCATION, OUTCOME_USAGE,
    OUTCOME_USED_MB, OUTCOME_WAIT, POD_CORES, POD_END, POD_INTENSITY, POD_JITTER, POD_KERNELS, POD_L2, POD_LATENCY,
    POD_MEMORY, POD_MET, POD_NEED_MB, POD_OWNER, POD_SENSITIVITY, POD_SLO, POD_SOLO, POD_USAGE, POD_WATTS,
    SUM_EFFICIENCY, SUM_MET, SUM_MONOPOLY, SUM_OOM, SUM_REWARD, SUM_ROOM, SUM_STEPS, SUM_WAIT,
    Constants, Doubles, Flags, Floats, State,
)  # fmt: skip
# isort: on

compiled = compiler(source_fingerprint(imported_sources(Path(__file__))))

# The formulas of the task, compiled from the plain functions that an agent calls.
remember = compiled(history.remember)
write_features = compiled(history.write_features)
score = compiled(reward.score)
room = compiled(reward.room)
scale_state = compiled(space.scale_state)
scale_action = compiled(space.scale_action)
action_for = compiled(space.action_for)
limit_grant = compiled(space.limit_grant)
solo_latency_ms = compiled(specs.solo_latency_ms)

LARGE = 1e30
MAX_NEED = 0.85
"""Largest part of its request that a pod needs alone on the GPU: no pod requests too little (97.9 % of PAI's instances
use less than they ask for). The rest is for the interference of neighbours."""
NEED_QUANTILES = np.array(fitted.NEED_POD_QUANTILES)
MEMORY_QUANTILES = np.array(fitted.MEMORY_POD_QUANTILES)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)
_S16, _S32, _S48, _LOW16 = np.uint64(16), np.uint64(32), np.uint64(48), np.uint64(0xFFFF)


def stream_keys(seeds: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Initial states of random number generators. Hashed, because similar states would give similar numbers."""
    return _mix(seeds.astype(np.uint64) + _GOLDEN)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Finaliser of splitmix64; compiled below for one number."""
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return z ^ (z >> _S31)


_mix_one = compiled(_mix)


@compiled
def uniform(random: npt.NDArray[np.uint64], b: int) -> float:
    """The environment's next random number in [0, 1): splitmix64."""
    random[b] += _GOLDEN
    return float(_mix_one(random[b]) >> _S11) * (1.0 / 9007199254740992.0)


@compiled
def normal(random: npt.NDArray[np.uint64], b: int) -> float:
    """Approximately standard normal: the sum of four 16-bit uniform numbers from one draw; always within ± 3.5."""
    random[b] += _GOLDEN
    z = _mix_one(random[b])
    total = (z & _LOW16) + ((z >> _S16) & _LOW16) + ((z >> _S32) & _LOW16) + (z >> _S48)
    return (float(total) - 131070.0) * (1.7320508075688772 / 65535.5)


@compiled
def interpolate(quantiles: Doubles, u: float) -> float:
    """The value at u in [0, 1) of equally spaced quantiles."""
    place = u * (len(quantiles) - 1)
    i = int(place)
    value: float = quantiles[i] + (place - i) * (quantiles[i + 1] - quantiles[i])
    return value


@compiled
def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


@compiled
def pick(cumulative: Doubles, u: float) -> int:
    """Index of the first cumulative weight above u."""
    i = 0
    while i < cumulative.shape[0] - 1 and u >= cumulative[i]:
        i += 1
    return i


@compiled
def characterise(pod: Floats, ask: Floats, apps: Doubles) -> None:
    """Write what the pod's share determines for its whole life: latency, cache use and power without neighbours."""
    app, batch = apps[int(ask[ASK_APP])], ask[ASK_BATCH]
    solo = solo_latency_ms(app, batch, pod[POD_CORES])
    rate = 1000.0 * min(ask[ASK_RATE], batch / solo)
    pod[POD_SOLO] = solo
    pod[POD_L2] = max(0.0, app[specs.L2_SLOPE] * rate + app[specs.L2_BASE])
    pod[POD_WATTS] = app[specs.WATT_SLOPE] * rate + app[specs.WATT_BASE]
    pod[POD_INTENSITY] = ask[ASK_RATE] / batch
    pod[POD_SENSITIVITY], pod[POD_KERNELS] = app[specs.CACHE_SENSITIVITY], app[specs.KERNELS]
    pod[POD_SLO], pod[POD_JITTER], pod[POD_NEED_MB] = ask[ASK_SLO], ask[ASK_JITTER], ask[ASK_NEED_MB]


@compiled
def measure(pods: Floats, n: int) -> float:
    """Write latency, usage and QoS of the n pods that run together. Returns the utilisation of the GPU in %.

    Cache use and power are those of each pod without neighbours at its rate, so one pass is enough.
    """
    l2, watts = 0.0, specs.IDLE_W
    for i in range(n):
        l2 += pods[i, POD_L2]
        watts += pods[i, POD_WATTS]
    clock = 1.0
    if watts > specs.POWER_CAP_W:
        clock = specs.CLOCK_MHZ / (specs.CLOCK_MHZ - specs.CLOCK_PER_WATT * (watts - specs.POWER_CAP_W))
    delay = 0.0
    if n > 1:
        delay = specs.SCHEDULE_SLOPE_MS * min(n, specs.SCHEDULE_PODS) - specs.SCHEDULE_BASE_MS
    total = 0.0
    for i in range(n):
        solo, cache = float(pods[i, POD_SOLO]), pods[i, POD_SENSITIVITY] * (l2 - pods[i, POD_L2])
        crowded = (solo * (1.0 + cache) + pods[i, POD_KERNELS] * delay) * clock
        latency = (solo + specs.INTERFERENCE_SCALE * (crowded - solo)) * pods[i, POD_JITTER]
        busy = pods[i, POD_INTENSITY] * latency
        usage = min(1.0, busy) * pods[i, POD_CORES]
        met = busy < 1.0 and latency <= pods[i, POD_SLO] and pods[i, POD_MEMORY] >= pods[i, POD_NEED_MB]
        pods[i, POD_LATENCY], pods[i, POD_USAGE], pods[i, POD_MET] = latency, usage, 1.0 if met else 0.0
        total += usage
    return total


@compiled
def pressure(pod: Floats) -> float:
    """Part of its share that a pod needs to meet its objective; more than 1 if it misses it.

    The larger of its load and latency / SLO. A monitoring system can measure both.
    """
    needed: float = max(pod[POD_INTENSITY] * pod[POD_LATENCY], pod[POD_LATENCY] / pod[POD_SLO])
    return needed


@compiled
def remove(pods: Floats, i: int, n: int) -> int:
    """Remove pod i; the last pod takes its row. Returns the new number of pods."""
    if i != n - 1:
        for k in range(N_POD):
            pods[i, k] = pods[n - 1, k]
    return n - 1


@compiled
def expire(pods: Floats, n: int, time_s: float) -> int:
    """Remove the pods whose life is over. Returns the new number of pods."""
    i = 0
    while i < n:
        if pods[i, POD_END] <= time_s:
            n = remove(pods, i, n)
        else:
            i += 1
    return n


@compiled
def fits(pods: Floats, n: int, cores: float, memory: float) -> bool:
    """Whether there is room for one more pod of this size."""
    for i in range(n):
        cores += pods[i, POD_CORES]
        memory += pods[i, POD_MEMORY]
    return n < MAX_PODS and cores <= MAX_CORES and memory <= MAX_MEMORY_MB


@compiled
def draw_owners(s: State, b: int, c: Constants) -> None:
    """Draw the owners of an episode: their applications, how much they over-ask, and three request sizes each."""
    z_node = normal(s.random, b)
    node = c.over_ask[b]
    if math.isnan(node):
        node = c.mean_logit + c.node_spread * z_node
    for o in range(s.habits.shape[1]):
        habit = s.habits[b, o]
        need = node + c.owner_spread * normal(s.random, b)
        memory = fitted.MEMORY_LOGIT + fitted.MEMORY_OWNER_SPREAD * normal(s.random, b)
        habit[HABIT_APP] = pick(c.app_weights[b], uniform(s.random, b))
        habit[HABIT_BATCH] = 2.0 ** (2 + int(4.0 * uniform(s.random, b)))
        habit[HABIT_NEED], habit[HABIT_MEMORY] = need, memory
        habit[HABIT_LOAD] = 0.8 + 0.2 * uniform(s.random, b)
        for k in range(N_TEMPLATES):
            habit[HABIT_TEMPLATE + k] = int(uniform(s.random, b) * c.jobs.shape[0])


@compiled
def draw_pod(s: State, b: int, c: Constants) -> None:
    """Draw the next pod. The number of draws is constant, so the stream of pods does not depend on the actions."""
    owner = pick(c.owner_weights, uniform(s.random, b))
    habit, ask = s.habits[b, owner], s.ask[b]
    job = int(habit[HABIT_TEMPLATE + int(uniform(s.random, b) * N_TEMPLATES)])
    cores, sensitive = c.jobs[job, JOB_CORES], c.jobs[job, JOB_SENSITIVE] > 0.5
    # A life of a pod of the same class.
    first, end = (c.n_best_effort, c.jobs.shape[0]) if sensitive else (0, c.n_best_effort)
    life = c.jobs[first + int(uniform(s.random, b) * (end - first)), JOB_LIFE]
    more_cores = c.pod_spread * interpolate(NEED_QUANTILES, uniform(s.random, b))
    more_memory = c.pod_spread * interpolate(MEMORY_QUANTILES, uniform(s.random, b))
    idle, z_latency = uniform(s.random, b) < c.idle_share, normal(s.random, b)
    app, batch = c.apps[int(habit[HABIT_APP])], float(habit[HABIT_BATCH])
    # The rate of requests is such that the pod, without neighbours, needs this share to serve them in time.
    need = cores * min(sigmoid(habit[HABIT_NEED] + more_cores), MAX_NEED)
    latency = solo_latency_ms(app, batch, need)
    ask[ASK_CORES] = cores
    # A request for a share of the GPU is one for the same share of its memory.
    ask[ASK_MEMORY] = max(math.floor(cores / MAX_CORES * MAX_MEMORY_MB), MIN_MEMORY_MB)
    ask[ASK_OWNER] = owner
    ask[ASK_SENSITIVE] = 1.0 if sensitive else 0.0
    ask[ASK_APP], ask[ASK_BATCH] = habit[HABIT_APP], batch
    ask[ASK_RATE] = 0.0 if idle else batch / latency * (habit[HABIT_LOAD] if sensitive else 1.0)
    ask[ASK_SLO] = latency if sensitive and not idle else LARGE
    ask[ASK_NEED_MB] = ask[ASK_MEMORY] * sigmoid(habit[HABIT_MEMORY] + more_memory)
    ask[ASK_JITTER] = 1.0 + specs.LATENCY_CV * z_latency
    ask[ASK_LIFE], ask[ASK_NEED] = life, 0.0 if idle else need


@compiled
def next_arrival(s: State, b: int, c: Constants, utilisation: float) -> float:
    """Advance time to the next pod. Takes and returns the utilisation of the GPU in %.

    As in Kubernetes, a pod is sent to the node when its request fits. Until then it waits for other pods to end. So a
    request can always be granted, and granting less than requested makes room for the next pod.
    """
    draw_pod(s, b, c)
    arrived = s.time_s[b] - c.mean_gap_s * math.log(1.0 - uniform(s.random, b))
    pods, ask, now = s.pods[b], s.ask[b], arrived
    n = expire(pods, s.counters[b, COUNT_PODS], now)
    while not fits(pods, n, ask[ASK_CORES], ask[ASK_MEMORY]):
        now = LARGE
        for i in range(n):
            now = min(now, pods[i, POD_END])
        n = expire(pods, n, now)
    s.time_s[b] = now
    ask[ASK_WAIT] = now - arrived
    if n != s.counters[b, COUNT_PODS]:
        utilisation = measure(pods, n)
        s.counters[b, COUNT_PODS] = n
    return utilisation


@compiled
def observe(s: State, b: int, utilisation: float, obs: Floats) -> None:
    """Write the observation: the five numbers of the state and, if ``obs`` has room, the history of the owner."""
    n, ask, row = s.counters[b, COUNT_PODS], s.ask[b], obs[b]
    used_mb = 0.0
    for i in range(n):
        used_mb += s.pods[b, i, POD_NEED_MB]
    state = scale_state(ask[ASK_CORES], ask[ASK_MEMORY], utilisation / 100.0, used_mb / MAX_MEMORY_MB, n)
    for k in range(N_STATE):
        row[k] = state[k]
    if len(row) > N_STATE:
        known = s.history[b, int(ask[ASK_OWNER])]
        write_features(known, row[OBS_CORES], row[OBS_MEMORY], ask[ASK_SENSITIVE] > 0.5, row[N_STATE:])


@compiled
def allocate(s: State, b: int, c: Constants, cores: float, memory: float) -> float:
    """Start the waiting pod with these resources; measure, score and remember it. Returns the utilisation in %."""
    pods, n = s.pods[b], s.counters[b, COUNT_PODS]
    ask, out = s.ask[b], s.outcome[b]
    pod = pods[n]
    pod[POD_END], pod[POD_OWNER] = s.time_s[b] + ask[ASK_LIFE], ask[ASK_OWNER]
    pod[POD_CORES], pod[POD_MEMORY] = cores, memory
    characterise(pod, ask, c.apps)
    n += 1
    utilisation = measure(pods, n)
    oom = memory < ask[ASK_NEED_MB]
    usage = 0.0 if oom else pod[POD_USAGE]
    met = pod[POD_MET] > 0.5
    efficiency, qos, monopoly, under = score(cores, usage, met, n + c.with_room)
    out[OUTCOME_REWARD] = efficiency + qos + monopoly + under
    out[OUTCOME_EFFICIENCY], out[OUTCOME_QOS] = efficiency, qos
    out[OUTCOME_MONOPOLY], out[OUTCOME_UNDER_ALLOCATION] = monopoly, under
    out[OUTCOME_CORES], out[OUTCOME_MEMORY], out[OUTCOME_USAGE] = cores, memory, usage
    out[OUTCOME_MET], out[OUTCOME_OOM] = 1.0 if met else 0.0, 1.0 if oom else 0.0
    out[OUTCOME_PODS], out[OUTCOME_LATENCY] = n, pod[POD_LATENCY]
    out[OUTCOME_OWNER], out[OUTCOME_REQUEST], out[OUTCOME_REQUEST_MB] = ask[ASK_OWNER], ask[ASK_CORES], ask[ASK_MEMORY]
    out[OUTCOME_USED_MB] = min(ask[ASK_NEED_MB], memory)
    out[OUTCOME_TIME], out[OUTCOME_WAIT], out[OUTCOME_ROOM] = s.time_s[b], ask[ASK_WAIT], 0.0
    remember(
        s.history[b, int(ask[ASK_OWNER])],
        min(pressure(pod) * cores / ask[ASK_CORES], 1.0),
        cores / ask[ASK_CORES],
        met,
        oom,
        out[OUTCOME_USED_MB] / ask[ASK_MEMORY],
    )
    if oom:  # killed at once
        n -= 1
        utilisation = measure(pods, n)
    s.counters[b, COUNT_PODS] = n
    sums = s.sums[b]
    sums[SUM_REWARD] += out[OUTCOME_REWARD]
    sums[SUM_MET] += out[OUTCOME_MET]
    sums[SUM_EFFICIENCY] += usage / cores
    sums[SUM_OOM] += out[OUTCOME_OOM]
    sums[SUM_MONOPOLY] += 1.0 if monopoly < 0.0 else 0.0
    sums[SUM_WAIT] += out[OUTCOME_WAIT]
    sums[SUM_STEPS] += 1.0
    return utilisation


@compiled
def begin(s: State, b: int, c: Constants, obs: Floats) -> None:
    """Begin an episode: an empty GPU, new owners without history, and the first pod waiting."""
    s.counters[b] = 0
    s.time_s[b] = 0.0
    s.history[b] = 0.0
    s.sums[b] = 0.0
    draw_owners(s, b, c)
    observe(s, b, next_arrival(s, b, c, 0.0), obs)


@compiled
def step_one(s: State, b: int, c: Constants, action: Floats, obs: Floats) -> None:
    """One decision, and the way to the next one."""
    cores, memory = scale_action(float(action[b, ACTION_CORES]), float(action[b, ACTION_MEMORY]))
    cores, memory = limit_grant(cores, memory, s.ask[b, ASK_CORES], s.ask[b, ASK_MEMORY], c.unit_percent)
    utilisation = allocate(s, b, c, cores, memory)
    s.counters[b, COUNT_DECISIONS] += 1
    utilisation = next_arrival(s, b, c, utilisation)
    if c.with_room:
        penalty = room(s.ask[b, ASK_WAIT])
        s.outcome[b, OUTCOME_ROOM] = penalty
        s.outcome[b, OUTCOME_REWARD] += penalty
        s.sums[b, SUM_REWARD] += penalty
        s.sums[b, SUM_ROOM] += penalty
    observe(s, b, utilisation, obs)


@compiled
def step_range(first: int, end: int, s: State, c: Constants, action: Floats, obs: Floats, where: Flags) -> None:
    """Advance environments first … end − 1 where ``where`` is true."""
    for b in range(first, end):
        if where[b]:
            step_one(s, b, c, action, obs)


@compiled
def begin_range(first: int, end: int, s: State, c: Constants, obs: Floats, where: Flags) -> None:
    """Begin episodes in environments first … end − 1 where ``where`` is true."""
    for b in range(first, end):
        if where[b]:
            begin(s, b, c, obs)


@compiled
def oracle_range(first: int, end: int, s: State, c: Constants, action: Floats) -> None:
    """The actions with the highest reward for the waiting pods, given their hidden needs: tries every unit of cores.

    Of equal rewards it takes the smallest share, and the smallest memory that is enough. It does not consider the
    waiting time of later pods, but leaves as much room as a pod that meets its objective can.
    """
    unit = c.unit_percent if c.unit_percent > 0 else 1.0
    for b in range(first, end):
        pods, n, ask = s.pods[b], s.counters[b, COUNT_PODS], s.ask[b]
        pod = pods[n]
        memory = min(math.ceil(ask[ASK_NEED_MB]), ask[ASK_MEMORY])
        pod[POD_MEMORY] = memory
        best, chosen = -LARGE, MIN_CORES
        level = math.ceil(MIN_CORES / unit)
        while True:
            cores = min(level * unit, ask[ASK_CORES])
            pod[POD_CORES] = cores
            characterise(pod, ask, c.apps)
            measure(pods, n + 1)
            efficiency, qos, monopoly, under = score(cores, pod[POD_USAGE], pod[POD_MET] > 0.5, n + 1 + c.with_room)
            value = efficiency + qos + monopoly + under
            if value > best + 1e-6:
                best, chosen = value, level * unit
            if level * unit >= ask[ASK_CORES]:
                break
            level += 1
        action[b, ACTION_CORES], action[b, ACTION_MEMORY] = action_for(min(chosen, MAX_CORES), memory)
