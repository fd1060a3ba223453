"""Serving as engines do it: forward passes on balanced ranks, with each engine's rules for replicas and transport.

| module | content |
| --- | --- |
| `profiles` | engine profiles: phase, replica choice, transport |
| `state` | named tuples of arrays that the compiled functions take |
| `token_sets` | sets of tokens, 64 per integer |
| `replicas` | which GPUs hold an expert, and which of them serves a rank's tokens |
| `passes` | counting a pass, from scratch and after a change of placement |
| `cost` | from counts to µs |
| `streams` | drawing the sampled passes of an interval from a trace |
| `simulator` | the Python interface: intervals, streams, served time |

One GPU is one expert-parallel rank and one data-parallel attention rank. In a pass every rank contributes tokens of its
own requests. The time between two placement decisions is an interval of many passes; some are simulated exactly and
averaged. The tokens of a pass are stored rank by rank, so the tokens of a rank are a contiguous range.

Names: E experts, G GPUs on N nodes, S slots per GPU, K experts per token, T tokens per pass, P sampled passes, L layers
"""
