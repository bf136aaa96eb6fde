"""What the kernels of sampling share: float order, a row's parameters, the random number, and searches in registers.

A search bisects over the bits of a float (or of an id): whatever the distribution, 32 sums at most.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# Triton's language is Python with other types.

import triton
import triton.language as tl

from penstock.kernels.sampling.params import WORDS

_WORDS = tl.constexpr(WORDS)


@triton.jit
def key_of(value):
    """Integers in the order of floats."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def of_key(key):
    """The inverse."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def middle(low, high):
    """Between two integers, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def finite_or_nothing(x):
    """Without NaN and +inf, and without -0.0, which would be below 0.0."""
    x = tl.where((x != x) | (x == float("inf")), float("-inf"), x)
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def _long(words):
    low = tl.load(words).to(tl.int64) & 0xFFFFFFFF
    return low | (tl.load(words + 1).to(tl.int64) << 32)


@triton.jit
def temperature_of(table, row):
    return tl.load(table + row * _WORDS + 4).to(tl.float32, bitcast=True)


@triton.jit
def filters_of(table, row):
    """log_min_p, top_k and top_p."""
    words = table + row * _WORDS
    log_min_p = tl.load(words + 5).to(tl.float32, bitcast=True)
    return log_min_p, tl.load(words + 6), _long(words + 2).to(tl.float64, bitcast=True)


@triton.jit
def uniform_of(table, row, position):
    """The number in [0, 1) that `philox.uniform` gives for a row's seed and position, bit for bit."""
    seed = _long(table + row * _WORDS)
    zero = (position * 0).to(tl.uint32)
    # The third counter word is Purpose.SAMPLE; positions are below 2^31, so that the second is 0.
    high, low, _, _ = tl.philox(seed, position.to(tl.uint32), zero, zero, zero)
    bits = (high >> 5).to(tl.int64) * 67108864 + (low >> 6).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def kept(value, ids, limit, last):
    """What a limit leaves: all above it, and of those at it the ids up to `last`."""
    return (value > limit) | ((value == limit) & (ids <= last))


@triton.jit
def highest_reaching(value, key, weight, goal, high):
    """The greatest of the values for which the weights of those at least as great add up to `goal`; those of all do. Keys are
    in the order of the values, up to `high`, and have as few bits as tell them apart: each costs a sum."""
    least, most = tl.min(tl.where(weight > 0, key, high), 0), high + 1
    while least + 1 < most:
        at = middle(least, most)
        reached = tl.sum(tl.where(key >= at, weight, 0.0), 0)
        most = tl.where(reached < goal, at, tl.where(reached == goal, at + 1, most))
        least = tl.where(reached < goal, least, at)
    return tl.min(tl.where((key >= least) & (weight > 0), value, float("inf")), 0)


@triton.jit
def first_exceeding(ids, weight, goal):
    """The smallest id for which the weights up to it are above `goal`, which is not negative; the greatest with a weight where
    none is."""
    high = tl.max(tl.where(weight > 0, ids, 0), 0)
    low = tl.min(tl.where(weight > 0, ids, high), 0) - 1
    while low + 1 < high:
        at = middle(low, high)
        exceeds = tl.sum(tl.where(ids <= at, weight, 0.0), 0) > goal
        high = tl.where(exceeds, at, high)
        low = tl.where(exceeds, low, at)
    return high
