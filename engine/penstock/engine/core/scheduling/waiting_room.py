"""All requests without a row: those that may start, by tenant, and parked ones that wait for a condition.

A request that cannot start for a reason of its own never blocks those behind it, and keeps its place among them.
"""

from collections import Counter
from collections.abc import Collection, Iterator

from penstock.api.load_report import WaitingReason
from penstock.engine.core.scheduling.request import PARKED_STATUS, Request, RequestStatus, order
from penstock.engine.core.scheduling.request_queue import RequestQueue
from penstock.engine.core.scheduling.token_counters import TokenCounters


class WaitingRoom:
    """Who goes next: the smallest priority, then those that have run before, then the tenant that has had the least, then the
    one that came first. Costs follow the number of tenants with something that waits, not the number of requests.

    Args:
        counters: What each tenant has had.
    """

    def __init__(self, counters: TokenCounters) -> None:
        self._counters = counters
        self._queues: dict[str, RequestQueue] = {}
        self._parked: dict[int, Request] = {}
        self._aside: list[Request] = []
        self._held: dict[int, Request] = {}
        self._count = 0
        self._by_tenant = Counter[str]()

    def __len__(self) -> int:
        """Requests, parked ones included."""
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """Iterate in no particular order."""
        for queue in self._queues.values():
            yield from queue
        yield from self._parked.values()
        yield from self._held.values()

    @property
    def has_held(self) -> bool:
        """Whether any request waits for `release_held`."""
        return bool(self._held)

    @property
    def is_ready(self) -> bool:
        """Whether any request may start."""
        return bool(self._queues)

    def reasons(self) -> dict[WaitingReason, int]:
        """Requests by what they wait for; reasons with none are left out."""
        return dict(Counter(request.waits_for for request in self))

    # --- coming and going ---

    def push(self, request: Request, now: float) -> None:
        """Adds a request that may start; `now`, here and below, is Unix time in seconds."""
        self._count += 1
        self._by_tenant[request.tenant] += 1
        self._admit(request, now)

    def peek(self) -> Request:
        """The next one to serve; raises `ValueError` where none is ready."""
        return min((queue.peek() for queue in self._queues.values()), key=self._turn)

    def remove(self, request: Request) -> None:
        """Takes a request from wherever it stands: it starts, or it ends."""
        self._count -= 1
        self._by_tenant[request.tenant] -= 1
        if not self._by_tenant[request.tenant]:
            del self._by_tenant[request.tenant]
        if self._parked.pop(request.index, None) is None and self._held.pop(request.index, None) is None:
            self._dequeue(request)

    @property
    def tenants(self) -> Collection[str]:
        """Tenants with requests that may start."""
        return self._queues.keys()

    @property
    def is_shared(self) -> bool:
        """Whether several tenants have requests here."""
        return len(self._by_tenant) > 1

    def one_too_many(self, newcomer: Request) -> Request:
        """Who leaves a room that is too full since the newcomer came: the one that would be served last, of those that have
        never run, of the tenants with the most requests for their weight; the newcomer itself where its own is one of them."""
        load = {tenant: count / self._counters.weight(tenant) for tenant, count in self._by_tenant.items()}
        most = max(load.values())
        if load[newcomer.tenant] == most:
            return newcomer
        fresh = (request for request in self if load[request.tenant] == most and not request.has_started)
        return max(fresh, key=order, default=newcomer)

    # --- reasons of a request's own ---

    def park(self, request: Request, reason: WaitingReason, now: float) -> None:
        """Lets a member stand aside until `unpark`.

        Raises:
            KeyError: Nothing is parked for this reason.
        """
        request.status = PARKED_STATUS[reason]
        request.wait_for(reason, now)
        if request.index not in self._parked:
            self._dequeue(request)
            self._parked[request.index] = request

    def unpark(self, request: Request, now: float) -> None:
        """What a member was parked for is there."""
        del self._parked[request.index]
        request.status = RequestStatus.PREEMPTED if request.has_started else RequestStatus.WAITING
        self._admit(request, now)

    def is_parked(self, request: Request) -> bool:
        """Whether the request waits for more than its turn."""
        return request.index in self._parked

    def set_aside(self, request: Request, reason: WaitingReason, now: float) -> None:
        """Hides a member for the rest of a step, for a reason that is not its neighbours'."""
        request.wait_for(reason, now)
        self._dequeue(request)
        self._aside.append(request)

    def restore(self) -> None:
        """Puts back those set aside; each takes its old place."""
        for request in self._aside:
            self._enqueue(request)
        self._aside.clear()

    def hold(self, request: Request, reason: WaitingReason, now: float) -> None:
        """Hides a member until `release_held`: what it waits for is looked at again only when that has changed."""
        request.wait_for(reason, now)
        self._dequeue(request)
        self._held[request.index] = request

    def release_held(self, now: float) -> None:
        """Puts back those held; each takes its old place, and waits for its turn until it is held again."""
        for request in self._held.values():
            request.wait_for("capacity", now)
            self._enqueue(request)
        self._held.clear()

    def _turn(self, request: Request) -> tuple[int, bool, float, tuple[int, float, int]]:
        return request.priority, not request.has_started, self._counters[request.tenant], request.key

    def _admit(self, request: Request, now: float) -> None:
        request.wait_for("capacity", now)
        if request.tenant not in self._queues and not request.has_started:
            self._counters.join(request.tenant, self._queues)
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        self._queues.setdefault(request.tenant, RequestQueue()).push(request)

    def _dequeue(self, request: Request) -> None:
        queue = self._queues[request.tenant]
        queue.remove(request)
        if not queue:
            del self._queues[request.tenant]
            self._counters.leave(request.tenant)
