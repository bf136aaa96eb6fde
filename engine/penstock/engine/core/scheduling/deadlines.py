"""When requests stop being worth an answer."""

import heapq

from penstock.engine.core.scheduling.request import Request

_Key = tuple[int, float, int]


class Deadlines:
    """The live requests that have one, the nearest deadline first."""

    def __init__(self) -> None:
        self._requests: dict[_Key, Request] = {}
        # Times of requests that have ended stay in the heap until theirs come, or until they are most of it.
        self._heap: list[tuple[float, _Key]] = []

    def __len__(self) -> int:
        """Requests watched."""
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Watches a request, if it has a deadline."""
        if request.deadline is not None:
            self._requests[request.key] = request
            heapq.heappush(self._heap, (request.deadline, request.key))

    def remove(self, request: Request) -> None:
        """Forgets a request, if it is watched."""
        if self._requests.pop(request.key, None) is not None and len(self._heap) > 2 * len(self._requests) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._requests]
            heapq.heapify(self._heap)

    def take_due(self, now: float) -> list[Request]:
        """Requests whose deadline has come, each once."""
        due: list[Request] = []
        while self._heap and self._heap[0][0] <= now:
            if (request := self._requests.pop(heapq.heappop(self._heap)[1], None)) is not None:
                due.append(request)
        return due
