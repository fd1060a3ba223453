"""Episodes of the two agents: one step is one pair (row, node)."""

from __future__ import annotations

from clustergym.common.compiling import inlined
from clustergym.moe_offload.kernels.memory import (
    begin,
    can_move,
    evict,
    move,
    next_visit,
    over,
    prefetch,
    window,
)
from clustergym.moe_offload.kernels.rows import EMPTY, choose_evictions, choose_loads, clear_rows, uniform
from clustergym.moe_offload.kernels.state import (
    ADD,
    DELETE,
    GROUP,
    MODE,
    MODE_EVICT,
    MODE_LOAD,
    MODE_OVER,
    OUT_EXPERT,
    OUT_ILLEGAL,
    OUT_NO_OP,
    OUT_VISITS,
    OVER,
    PLACE,
    STEP,
    UNPAID,
    VISITS,
)


@inlined
def settle(task, s, b, leaves):
    """Go on to the next decision: an eviction while a GPU holds too much, then a prefetch while a link has time.

    ``leaves``: the visit at hand is over, whatever could be prefetched.
    """
    while True:
        if leaves and not next_visit(task, s, b):
            s.clock[b, MODE] = MODE_OVER
            clear_rows(task, s, b)
            return
        leaves = True
        s.clock[b, OVER] = over(task, s, b)
        if s.clock[b, OVER] >= 0:
            s.clock[b, MODE] = MODE_EVICT
            choose_evictions(task, s, b)
            return
        free = False
        for g in range(task.gpus):
            free = free or window(task, s, b, g) > 0
        if free and s.stats[b, VISITS] > 0 and choose_loads(task, s, b) > 0:
            s.clock[b, MODE] = MODE_LOAD
            return


@inlined
def legal(task, s, b, row, node):
    """Whether a pair is legal: the action mask."""
    operation, gpu, mode = node // task.gpus, node % task.gpus, s.clock[b, MODE]
    if mode == MODE_OVER:
        # Nothing can be done any more, but some action must be legal.
        return row == 0 and operation == PLACE
    if row >= s.n_rows[b]:
        return False
    if mode == MODE_EVICT:
        return operation == DELETE and gpu == s.clock[b, OVER]
    expert = s.rows[b, row]
    l, e = expert // s.where.shape[2], expert % s.where.shape[2]
    at = s.where[b, l, e]
    if operation == PLACE:
        return at < 0 or at == gpu or can_move(task, s, b, l, e, gpu)
    return operation == ADD and at < 0 and window(task, s, b, gpu) > 0


@inlined
def draw(task, s, b):
    """Draw the sequences of the next episode."""
    s.clock[b, GROUP] = int(uniform(s.random, b) * task.groups.shape[0])


@inlined
def apply(task, s, b, expert, node):
    """Do what a legal pair says. False if it is a no-op."""
    l, e, gpu = expert // s.where.shape[2], expert % s.where.shape[2], node % task.gpus
    if s.clock[b, MODE] == MODE_EVICT:
        evict(task, s, b, l, e)
    elif s.clock[b, MODE] == MODE_LOAD and node // task.gpus == ADD:
        prefetch(task, s, b, l, e, gpu)
    elif s.clock[b, MODE] == MODE_LOAD and s.where[b, l, e] >= 0 and s.where[b, l, e] != gpu:
        move(task, s, b, l, e, gpu)
    else:
        return False
    return True


@inlined
def advance(task, s, b, begins, row, node):
    """Begin an episode with the group that was drawn, or apply a pair; then go to the next decision.

    An illegal pair evicts nothing; while the links have time it ends the visit, as the no-op does. One function does
    both, because each is compiled together with all that it calls.
    """
    expert, no_op, allowed, settles = EMPTY, False, True, True
    if begins:
        begin(task, s, b, s.clock[b, GROUP])
    else:
        s.n_events[b] = 0
        s.clock[b, STEP] += 1
        inside = 0 <= row < s.rows.shape[1] and 0 <= node < 3 * task.gpus
        expert = s.rows[b, row] if inside else EMPTY
        allowed = inside and legal(task, s, b, row, node)
        no_op = not (allowed and apply(task, s, b, expert, node))
        settles = s.clock[b, MODE] == MODE_LOAD or (s.clock[b, MODE] == MODE_EVICT and allowed)
    visits, leaves = s.stats[b, VISITS], no_op
    if settles:
        settle(task, s, b, leaves)
    s.outcome[b, OUT_EXPERT], s.outcome[b, OUT_NO_OP], s.outcome[b, OUT_ILLEGAL] = expert, no_op, not allowed
    s.outcome[b, OUT_VISITS], s.reward[b] = 0, 0.0
    if not begins:
        s.outcome[b, OUT_VISITS] = s.stats[b, VISITS] - visits
        s.reward[b] = -s.time[b, UNPAID] / task.load_ms
        s.time[b, UNPAID] = 0.0
