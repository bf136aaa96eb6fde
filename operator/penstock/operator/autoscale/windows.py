"""What was seen lately: samples with their times, and what is made of them. Pure."""

from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")

Samples = tuple[tuple[float, T], ...]
"""(time, value), oldest first."""


def kept(samples: Samples[T], since: float) -> Samples[T]:
    """Return the samples taken at or after `since`."""
    return tuple(sample for sample in samples if sample[0] >= since)


def mean(samples: Samples[float], since: float) -> float:
    """Over the time since then; 0 where there are no samples. Between two of them the value is taken to change evenly: looks come
    ten times as often while something is urgent, and each must not count for as much as one of a calm time."""
    inside = [sample for sample in samples if sample[0] >= since]
    spans = [(end - begin, 0.5 * (first + last)) for (begin, first), (end, last) in pairwise(inside)]
    total = sum(span for span, _ in spans)
    if total == 0:
        return inside[-1][1] if inside else 0.0
    return sum(span * value for span, value in spans) / total
