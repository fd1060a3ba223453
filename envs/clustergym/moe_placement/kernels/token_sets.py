"""Sets of tokens, 64 per integer."""

from __future__ import annotations

import numpy as np

from clustergym.common.compiling import PLAIN_PYTHON, device, index

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
def transpose(square):
    """Let row i, word w of ``square`` (64, words) have its bits from the rows: bit j becomes bit i of row j, word w."""
    words = square.shape[1]
    flat, distance, half = square.reshape(64 * words), 32, index(0xFFFFFFFF)
    # Exchange the off-diagonal quarters of each block of bits, then those of its quarters, and so on.
    while distance > 0:
        shift, length = index(distance), distance * words
        for first in range(0, 64 * words, 2 * length):
            upper, lower = flat[first : first + length], flat[first + length : first + 2 * length]
            for i in range(length):
                exchanged = ((upper[index(i)] >> shift) ^ lower[index(i)]) & half
                lower[index(i)] ^= exchanged
                upper[index(i)] ^= exchanged << shift
        distance >>= 1
        half ^= half << index(distance)


@device
def copy_set(source, target):
    for word in range(target.shape[0]):
        target[index(word)] = source[index(word)]
