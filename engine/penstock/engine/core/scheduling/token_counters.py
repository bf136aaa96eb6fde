"""Fairness between tenants: a virtual token counter each (VTC: Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024).

A counter holds the service that a tenant has had, in weighted tokens over the tenant's weight. Whoever waits with the smallest
counter goes next, so the counters of tenants that all have something waiting stay within a bound of each other, however much
more one of them asks for. Nothing is kept back: a tenant alone has the whole engine.
"""

from collections.abc import Collection, Mapping

import numpy as np

from penstock.engine.core.plan import Int64

PROMPT_COST = 1.0
"""Cost of a computed prompt token. Tokens from the prefix cache cost nothing."""
OUTPUT_COST = 2.0
"""Cost of a generated token."""
MAX_REMEMBERED = 1024
"""Tenants beyond which those are forgotten whose counter would make no difference."""


class TokenCounters:
    """A counter for each tenant, addressed by a small number (its slot) from array code.

    Args:
        weights: Share of each tenant in comparison with the others; 1 for those that are not named.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._slots: dict[str, int] = {}
        self._free = [3, 2, 1, 0]
        self._counters = np.zeros(4)
        self._output_costs = np.zeros(4)
        self._last = ""

    def __getitem__(self, tenant: str) -> float:
        """Service that the tenant has had, in weighted tokens; 0 for one that is not known."""
        slot = self._slots.get(tenant)
        return float(self._counters[slot]) if slot is not None else 0.0

    def weight(self, tenant: str) -> float:
        """The tenant's weight."""
        return self._weights.get(tenant, 1.0)

    def slot(self, tenant: str) -> int:
        """The tenant's number, good for as long as it has requests."""
        if tenant not in self._slots:
            if not self._free:
                size = len(self._counters)
                self._free += range(2 * size - 1, size - 1, -1)
                self._counters, self._output_costs = np.resize(self._counters, 2 * size), np.resize(self._output_costs, 2 * size)
            slot = self._slots[tenant] = self._free.pop()
            self._counters[slot] = 0.0
            self._output_costs[slot] = OUTPUT_COST / self.weight(tenant)
        return self._slots[tenant]

    def join(self, tenant: str, waiting: Collection[str]) -> None:
        """Record that a tenant without waiting requests has one now. Its idle time earns it nothing: its counter is raised to the
        smallest
        of the waiting tenants'.

        Args:
            tenant: The tenant.
            waiting: The tenants with waiting requests, this one not among them.
        """
        slot = self.slot(tenant)
        self._counters[slot] = max(self._counters[slot], self._floor(waiting))

    def leave(self, tenant: str) -> None:
        """Record that the tenant has no waiting requests any more."""
        self._last = tenant

    def charge_prompt(self, tenant: str, num_tokens: int) -> None:
        """Charge the tenant for prompt tokens that are about to be computed."""
        slot = self.slot(tenant)
        self._counters[slot] += PROMPT_COST * num_tokens / self.weight(tenant)

    def charge_outputs(self, slots: Int64) -> None:
        """One generated token for each of these slots, [s], which may repeat."""
        counts = np.bincount(slots, minlength=len(self._counters))
        self._counters += counts * self._output_costs

    @property
    def is_crowded(self) -> bool:
        """Whether it is time to `prune`."""
        return len(self._slots) > MAX_REMEMBERED

    def prune(self, waiting: Collection[str], live: Collection[str]) -> None:
        """Forgets tenants without requests whose counter would be lifted anyway.

        Args:
            waiting: Tenants with something that waits.
            live: Tenants with any request.
        """
        floor = self._floor(waiting)
        for tenant, slot in list(self._slots.items()):
            if tenant not in live and tenant != self._last and self._counters[slot] <= floor:
                del self._slots[tenant]
                self._free.append(slot)

    def _floor(self, waiting: Collection[str]) -> float:
        return min((self[tenant] for tenant in waiting), default=self[self._last])
