"""Requests of one model and one priority: fair between tenants, in tokens.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) over a counter of served tokens a tenant, divided by its weight; the
engine's own counters (VTC) are the same idea. While two tenants both have something waiting, what they have been served differs,
in tokens over weight, by at most one request of each. Nothing is kept back: a tenant alone gets everything.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from penstock.gateway.flow.ticket import Ticket


class Band:
    """Waiting requests, tenant by tenant."""

    def __init__(self) -> None:
        self._queues: dict[str, list[Ticket]] = {}
        self._served: dict[str, float] = {}
        self._virtual = 0.0
        """Counter of the tenant that was served last, before it was served: where who comes now begins."""
        self.tokens = 0
        """Tokens of all waiting requests."""
        self.passed_over = 0
        """Requests of more important bands that have gone since one of this band last did."""

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[Ticket]:
        for queue in self._queues.values():
            yield from queue

    def tenants(self) -> dict[str, list[Ticket]]:
        """The tenants with something that waits, each with its tickets in order."""
        return self._queues

    def push(self, ticket: Ticket) -> None:
        """One more. The time in which a tenant asked for nothing earns it nothing."""
        queue = self._queues.get(ticket.tenant)
        if queue is None:
            queue = self._queues[ticket.tenant] = []
            self._served[ticket.tenant] = max(self._served.get(ticket.tenant, 0.0), self._virtual)
        insort(queue, ticket, key=_key)
        self.tokens += ticket.tokens

    def pop(self) -> Ticket:
        """The next one, charged to its tenant."""
        tenant = min(self._queues, key=lambda name: (self._served[name], self._queues[name][0].ordinal))
        queue = self._queues[tenant]
        ticket = queue[0]
        self.remove(ticket)
        self._virtual = max(self._virtual, self._served[tenant])
        self.charge(tenant, ticket.tokens / ticket.weight)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Takes out one that waits here."""
        queue = self._queues[ticket.tenant]
        del queue[bisect_left(queue, ticket.key, key=_key)]
        self.tokens -= ticket.tokens
        if not queue:
            del self._queues[ticket.tenant]

    def charge(self, tenant: str, cost: float) -> None:
        """Corrects what a tenant has been served by `cost`, in tokens over weight: more, or less where it is negative."""
        if tenant in self._served:
            self._served[tenant] += cost


def _key(ticket: Ticket) -> tuple[float, int]:
    return ticket.key
