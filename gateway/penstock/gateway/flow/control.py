"""Flow control: who waits, who goes next, and who is sent away when too many wait. Pure: no clock, no I/O."""

from collections import Counter
from collections.abc import Mapping
from typing import Literal

import msgspec

from penstock.gateway.flow.queue import ModelQueue
from penstock.gateway.flow.ticket import Ticket

ShedReason = Literal["tenant_queue_full", "queue_full"]


class FlowLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much may wait."""

    requests: int = 5_000
    """Most waiting requests of all tenants, for all models."""
    bytes: int = 512 * 2**20
    tenant_requests: int = 1_000
    """Most waiting requests of one tenant without a limit of its own."""
    tenant_bytes: int = 128 * 2**20


DEFAULT_LIMITS = FlowLimits()


class Shed(Exception):
    """There is no room for a request. `reason` names the limit."""

    def __init__(self, reason: ShedReason) -> None:
        super().__init__(reason)
        self.reason: ShedReason = reason


class FlowControl:
    """The queues of all models."""

    def __init__(self, limits: FlowLimits) -> None:
        self._limits = limits
        self._queues: dict[str, ModelQueue] = {}
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self.requests = 0
        """All that wait."""
        self.bytes = 0
        """What they keep in memory."""
        self.made = 0
        """Queues that were ever made: none without pressure."""

    @property
    def queues(self) -> Mapping[str, ModelQueue]:
        """Queues that are not empty, by model."""
        return self._queues

    def requests_of(self, tenant: str) -> int:
        """How many requests of a tenant wait."""
        return self._requests[tenant]

    def offer(self, ticket: Ticket, tenant_requests: int | None = None) -> list[Ticket]:
        """Queue a ticket.

        Args:
            ticket: The new ticket.
            tenant_requests: Most waiting requests of its tenant; None: the common limit.

        Returns:
            The tickets evicted for it, of the least important band.

        Raises:
            Shed: there is no room, and no ticket to evict.
        """
        limits, tenant = self._limits, ticket.tenant
        most = limits.tenant_requests if tenant_requests is None else tenant_requests
        if self._requests[tenant] >= most or self._bytes[tenant] + ticket.size > limits.tenant_bytes:
            raise Shed("tenant_queue_full")
        displaced: list[Ticket] = []
        while self.requests >= limits.requests or self.bytes + ticket.size > limits.bytes:
            victim = self._victim(ticket)
            if victim is None:
                for other in displaced:
                    self._push(other)
                raise Shed("queue_full")
            self.leave(victim)
            displaced.append(victim)
        self._push(ticket)
        return displaced

    def leave(self, ticket: Ticket) -> None:
        """Frees the place of one that waits."""
        self._queues[ticket.model].remove(ticket)
        self._forget(ticket)

    def take(self, model: str) -> Ticket | None:
        """The next one for `model`, which waits no more; None where nothing waits."""
        queue = self._queues.get(model)
        if queue is None:
            return None
        ticket = queue.pop()
        self._forget(ticket)
        return ticket

    def charge(self, model: str, priority: int, tenant: str, cost: float) -> None:
        """Corrects what a tenant has been served; see `ModelQueue.charge`."""
        if model in self._queues:
            self._queues[model].charge(priority, tenant, cost)

    def _push(self, ticket: Ticket) -> None:
        queue = self._queues.get(ticket.model)
        if queue is None:
            queue = self._queues[ticket.model] = ModelQueue()
            self.made += 1
        queue.push(ticket)
        self._count(ticket, 1)

    def _forget(self, ticket: Ticket) -> None:
        self._count(ticket, -1)
        if not self._requests[ticket.tenant]:
            del self._requests[ticket.tenant], self._bytes[ticket.tenant]
        if not self._queues[ticket.model]:
            del self._queues[ticket.model]

    def _count(self, ticket: Ticket, sign: int) -> None:
        self.requests += sign
        self.bytes += sign * ticket.size
        self._requests[ticket.tenant] += sign
        self._bytes[ticket.tenant] += sign * ticket.size

    def _victim(self, newcomer: Ticket) -> Ticket | None:
        """Choose the ticket to evict for `newcomer`: the last of the least important band. In the newcomer's own band only a
        ticket of a tenant that would still have more waiting for its weight than the newcomer's. None: no such ticket."""
        least = max((number for queue in self._queues.values() for number in queue.bands), default=newcomer.priority)
        if least < newcomer.priority:
            return None
        lasts: list[Ticket] = []
        loads: Counter[str] = Counter()
        for queue in self._queues.values():
            if least in queue.bands:
                for tenant, tickets in queue.bands[least].tenants().items():
                    lasts.append(tickets[-1])
                    loads[tenant] += len(tickets)
        if least == newcomer.priority:
            own = (loads[newcomer.tenant] + 1) / newcomer.weight
            lasts = [last for last in lasts if (loads[last.tenant] - 1) / last.weight >= own and last.tenant != newcomer.tenant]
        return max(lasts, key=lambda last: (loads[last.tenant] / last.weight, last.ordinal), default=None)
