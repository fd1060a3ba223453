"""Exchange experts between tokens until pairs of experts are used together as often as they should be."""

from __future__ import annotations

from clustergym.common.compiling import device
from clustergym.planners.kernels.launch import draw


@device
def _has(token, e):
    for k in range(token.shape[0]):
        if token[k] == e:
            return True
    return False


@device
def _exchange(token, k, e, excess):
    """Replace expert k of a token by ``e``. Returns by how much the sum of squares of ``excess`` changes."""
    change, old = 0.0, token[k]
    for i in range(token.shape[0]):
        z = token[i]
        if i != k and z >= 0:
            change += 2.0 - 2.0 * excess[old, z] + 2.0 * excess[e, z]
            excess[old, z] -= 1.0
            excess[z, old] -= 1.0
            excess[e, z] += 1.0
            excess[z, e] += 1.0
    token[k] = e
    return change


@device
def match_layer(tokens, excess, sweeps, key, b):
    """Exchange experts of random tokens (N, K) if that lowers the squares of ``excess`` (E, E).

    ``excess`` is how often two experts are used together, less how often they should be. Loads stay the same.
    """
    n, top_k = tokens.shape
    for _ in range(sweeps * n * top_k):
        i, j = int(draw(key, b) * n), int(draw(key, b) * n)
        k, m = int(draw(key, b) * top_k), int(draw(key, b) * top_k)
        x, y = tokens[i, k], tokens[j, m]
        if i == j or x < 0 or y < 0 or _has(tokens[j], x) or _has(tokens[i], y):
            continue
        if _exchange(tokens[i], k, y, excess) + _exchange(tokens[j], m, x, excess) > 0.0:
            _exchange(tokens[j], m, y, excess)
            _exchange(tokens[i], k, x, excess)


@device
def match_layers(first, last, tokens, excess, sweeps, key):
    """:func:`match_layer` on layers first … last−1."""
    for b in range(first, last):
        match_layer(tokens[b], excess[b], sweeps, key, b)
