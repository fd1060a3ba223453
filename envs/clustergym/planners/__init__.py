"""Planners: recorded traffic and the current placement in, the next placement out.

| module | content |
| --- | --- |
| `registry` | all planners by name |
| `base` | the class ``Planner`` |
| `eplb`, `flashlb`, `swift`, `hot`, `groups` | planners of serving engines |
| `greedy`, `anneal` | searches; `search` says what they plan on |
| `survive` | placements for annealing to begin with that lose no expert with a GPU or a node |
| `traffic_model`, `topics` | what a search knows of past traffic, and of other mixtures of topics |
| `exact`, `exact_nodes` | proven optima of small instances |
| `oracle` | bounds: planners that know the future |
| `recorded` | planning on counts of an engine instead of tokens |
| `evaluation` | planners and policies on streams of intervals, with migration (``clustergym eval``, the benchmark) |
| `heldout` | the time of one placement on held-out traffic (``clustergym plan``) |
| `kernels` | compiled parts |
"""
