"""Whether requests were served and refused in the order that flow control promises, as seen from the connection. Pure.

One connection delivers requests in the order of their numbers, and brings the answers in the order in which they were decided.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.gatewaybench.streams import ANSWERED, Asked
from penstock.gateway.flow.queue import PATIENCE

FULL, DISPLACED = "queue_full", "displaced"


@dataclass
class Disorder:
    """How many times each rule was broken."""

    overtaken: int = 0
    """Answers that came after that of a later request of the same priority."""
    refused_early: int = 0
    """Refusals as `queue_full` that came after that of a later request of the same priority: the newest was not the one."""
    displaced_wrongly: int = 0
    """Requests that were displaced while a later one of their priority waited, or a less important one did."""
    impatient: int = 0
    """Less important requests that were answered before their turn came: one in 33 at most while others wait."""


def disorder(settled: Sequence[Asked]) -> Disorder:
    """That of all requests, in the order in which they were settled."""
    return Disorder(
        overtaken=_inversions(it for it in settled if it.outcome == ANSWERED),
        refused_early=_inversions(it for it in settled if it.outcome == FULL),
        displaced_wrongly=_displaced_wrongly(settled),
    )


def _inversions(settled: Iterable[Asked]) -> int:
    """Requests after a later one of their own priority."""
    latest: dict[int, int] = {}
    count = 0
    for asked in settled:
        before = latest.get(asked.priority, -1)
        count += asked.number < before
        latest[asked.priority] = max(before, asked.number)
    return count


def _displaced_wrongly(settled: Sequence[Asked]) -> int:
    """A request waits for sure from the moment when one that was sent after it is settled, until it is settled itself."""
    by_number = sorted(settled, key=lambda it: it.number)
    waiting: dict[int, list[int]] = {}
    count = arrived = 0
    for asked in settled:
        while arrived < len(by_number) and by_number[arrived].number <= asked.number:
            waiting.setdefault(by_number[arrived].priority, []).append(by_number[arrived].number)
            arrived += 1
        its = waiting[asked.priority]
        if asked.outcome == DISPLACED:
            less_important = any(numbers for priority, numbers in waiting.items() if priority > asked.priority)
            count += its[-1] != asked.number or less_important
        del its[bisect_left(its, asked.number)]
    return count


def impatient(answered: Sequence[Asked]) -> int:
    """How many of `answered`, which all waited already when the first of them was answered, were answered before their turn."""
    count = in_order = 0
    left = [it.priority for it in answered]
    for asked in answered:
        first = min(left)
        left.remove(asked.priority)
        if asked.priority == first:
            in_order += 1
        else:
            count += in_order < PATIENCE
            in_order = 0
    return count
