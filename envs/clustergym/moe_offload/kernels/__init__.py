"""The simulator of expert offloading: numba functions on environment ``b`` of a batch of N.

One source serves single and vector environments and the rules (N = 1). Functions allocate nothing. Experts are a layer
``l`` and an id ``e``; an expert is on one GPU at most. Times are in ms.

| module | content |
| --- | --- |
| `state` | arrays of the task (:class:`Task`, constant) and of environments (:class:`State`), names of columns |
| `memory` | one visit: router result, demand loads, links, evictions, prefetches, moves |
| `rows` | the table of experts that the agents choose from |
| `episode` | steps of the two agents: what a pair means, when the visit ends, events |
| `observation` | features, graphs and the mask |
| `rules` | a rule that plays whole episodes |

A rule is a loop of these functions (``memory``):

```
begin(task, s, b, group)            warm start; ``group`` is a row of task.groups (one sequence, or a batch of them)
while next_visit(task, s, b):       the next router result: demand loads, waiting, stall; False after the last visit
    while (g := over(task, s, b)) >= 0:         GPU g holds more than its slots (in pool s.clock[b, POOL])
        evict(task, s, b, l, e)                 any resident with s.where[b, l, e] == g and pool_of(task, l) == POOL
    while window(task, s, b, g) > 0:            ms from the time the link of g is free to the next router result
        prefetch(task, s, b, l, e, g)           a missing expert (s.where[b, l, e] < 0); then over() again
    move(task, s, b, l, e, g)                   from a peer, if can_move(task, s, b, l, e, g)
```

``next_visit`` may be called while a GPU holds too much (rules must not do it; nothing checks). The visit at hand is
token ``s.clock[b, TOKEN]`` of the episode and layer ``s.clock[b, LAYER]``. The experts it uses are those with
``s.last[b, l, e] == token``; ``each stream j < B with token < s.lengths[b, j]`` is at row ``s.starts[b, j] + token`` of
``task.experts`` (T, L, K; −1 is padding). ``count(task, s, b, l, e, h)`` is the decayed count of half-life h, and
``distance(task, s, b, l)`` the visits until layer l comes (1 … L). ``task.prior`` (L, E) is the chance of use by the
training split. Results: ``s.time[b, STALL]`` and ``s.time[b, COMPUTE]`` in ms, ``s.stats[b, …]``.
"""
