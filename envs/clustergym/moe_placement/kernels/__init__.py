"""The simulator's compiled functions: what happens to one environment, as plain functions over arrays.

| module | content |
| --- | --- |
| `state` | named tuples of arrays that all functions take, and names for their columns |
| `replicas` | which GPUs hold an expert, and which of them serves a token |
| `passes` | counting a pass: who computes what, and which copies are sent |
| `token_sets` | sets of tokens as integers of 64 bits |
| `operations` | changes of a placement, and what an action means |
| `cost` | from counts to µs |
| `lookahead` | what operations would save |
| `candidates` | a short list of promising operations |
| `streams` | drawing the passes of an interval from a trace |
| `observation` | observations and masks |
| `episode` | reset and step of one environment |
| `eplb` | the EPLB algorithm |

All functions work on one environment ``b`` of a batch. The launchers (:mod:`clustergym.moe_placement.launchers`) run
them over a batch on all CPU cores or on a CUDA grid.

Names: E experts, G GPUs on N nodes, S slots per GPU, K experts per token, T tokens per window, L layers.
"""
