"""Waiting requests of one tenant in the order in which they are served: by priority, those that have run before, then arrival.

With equal priorities that is first come, first served, and a preempted request stands at the front again.
"""

import heapq
from collections.abc import Iterator

from penstock.engine.core.scheduling.request import Request


class RequestQueue:
    """A heap; removed requests stay in it until they come to its top."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, bool, float, int], Request]] = []
        self._members: dict[int, Request] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in no particular order."""
        return iter(self._members.values())

    def push(self, request: Request) -> None:
        """Adds a request."""
        priority, arrival_time, ordinal = request.key
        heapq.heappush(self._heap, ((priority, not request.has_started, arrival_time, ordinal), request))
        self._members[request.index] = request

    def peek(self) -> Request:
        """The next one to serve; raises `IndexError` where none waits."""
        while self._members.get(self._heap[0][1].index) is not self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def remove(self, request: Request) -> None:
        """Takes a member from wherever it stands."""
        del self._members[request.index]
        if self._heap[0][1] is request:
            heapq.heappop(self._heap)
