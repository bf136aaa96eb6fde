"""The plans whose results are still to come, oldest first."""

from collections import deque

import msgspec
import numpy as np

from penstock.engine.core.plan import NONE, Bool, Int32, Int64, SampleInputs, StepPlan
from penstock.engine.core.scheduling.tenancy import Tenancy


class Flight(msgspec.Struct, frozen=True):
    """One plan, and who had its rows when it was made."""

    plan: StepPlan
    rows: Int64
    """[r]: the plan's, in the type that numpy indexes with at once."""
    tenancies: Int64
    """[r]: of the requests that had them."""
    masked: Int32
    """[g]: indexes of its rows that sample under a mask."""


class InFlight:
    """A queue of flights.

    Args:
        tenancy: Who has the rows now.
        exclusive: Whether a request whose token is in flight waits for it.
    """

    def __init__(self, tenancy: Tenancy, *, exclusive: bool = False) -> None:
        self._tenancy, self._exclusive = tenancy, exclusive
        self._flights = deque[Flight]()

    def __len__(self) -> int:
        return len(self._flights)

    def submit(self, plan: StepPlan) -> None:
        """The plan leaves for the runner."""
        masked = self._tenancy.guides.masked(plan) if self._tenancy.guides else NONE
        rows = plan.rows.astype(np.int64)
        self._flights.append(Flight(plan, rows, self._tenancy.tenancies[rows], masked))

    def retire(self) -> Flight:
        """Takes the oldest flight out: its result is there."""
        return self._flights.popleft()

    def is_live(self, flight: Flight) -> Bool:
        """[r]: which of the flight's rows still belong to the requests it was planned for."""
        return self._tenancy.tenancies[flight.rows] == flight.tenancies

    def holds(self, rows: Int64) -> Bool:
        """[m]: which of these rows' requests have a plan in flight."""
        held = np.zeros(len(self._tenancy.tenancies), np.bool_)
        for flight in self._flights:
            held[flight.rows[self.is_live(flight)]] = True
        return held[rows]

    @property
    def is_masked(self) -> bool:
        """Whether the newest plan has rows that sample under a mask."""
        return len(self._flights[-1].masked) > 0

    @property
    def awaits_masks(self) -> bool:
        """Whether the newest plan cannot be sampled before the result of the one before it is taken in."""
        return not self._exclusive and len(self._flights) > 1 and self.is_masked

    def sample_inputs(self) -> SampleInputs:
        """What the sampling of the newest plan needs; not while `awaits_masks`."""
        flight = self._flights[-1]
        return self._tenancy.guides.inputs(flight.plan, flight.masked, self.is_live(flight))
