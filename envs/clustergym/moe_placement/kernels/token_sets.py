"""Sets of tokens, 64 per integer."""

from __future__ import annotations

import numpy as np

from clustergym.moe_placement.kernels.compile import PLAIN_PYTHON, device, index

ALL = index(0xFFFFFFFFFFFFFFFF)
_PAIRS, _FOURS = index(0x5555555555555555), index(0x3333333333333333)
_EIGHTS, _SUM = index(0x0F0F0F0F0F0F0F0F), index(0x0101010101010101)

if PLAIN_PYTHON:

    def popcount(x):
        """Number of bits of a uint64 that are set."""
        return index(int(x).bit_count())

else:

    @device
    def popcount(x):
        """Number of bits of a uint64 that are set. The compiler recognises this form and emits one instruction."""
        x = x - ((x >> index(1)) & _PAIRS)
        x = (x & _FOURS) + ((x >> index(2)) & _FOURS)
        x = (x + (x >> index(4))) & _EIGHTS
        return (x * _SUM) >> index(56)


@device
def range_word(first, last, word):
    """Tokens ``first`` … ``last``−1 that lie in a word. At least one must."""
    return (ALL << index(max(first - 64 * word, 0))) & (ALL >> index(64 - min(last - 64 * word, 64)))


@device
def count_common(some, others):
    """How many tokens are in both sets."""
    total = index(0)
    for word in range(some.shape[0]):
        total += popcount(some[index(word)] & others[index(word)])
    return np.int64(total)


@device
def clear(tokens):
    for word in range(tokens.shape[0]):
        tokens[index(word)] = index(0)


@device
def add_all(tokens, others):
    """Add the tokens of another set."""
    for word in range(tokens.shape[0]):
        tokens[index(word)] |= others[index(word)]


@device
def copy_set(source, target):
    for word in range(target.shape[0]):
        target[index(word)] = source[index(word)]
