"""When requests stop being worth an answer."""

import heapq

from penstock.engine.core.scheduling.request import Request


class Deadlines:
    """A heap; requests that ended in time stay in it until theirs comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, tuple[int, float, int], Request]] = []

    def add(self, request: Request) -> None:
        """Watches a request, if it has a deadline."""
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, request.key, request))

    def take_due(self, now: float) -> list[Request]:
        """Requests whose deadline has come, and which have not ended, each once."""
        due: list[Request] = []
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if not request.status.is_finished:
                due.append(request)
        return due
