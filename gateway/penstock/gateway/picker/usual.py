"""The choice for a usual request: row numbers, and what it was made of until somebody asks."""

from typing import ClassVar

import msgspec
import numpy as np

from penstock.api.fleet import Replica, Weights
from penstock.gateway.picker.choice import JOINT_POLICY, MAX_ENDPOINTS, Choice, second
from penstock.gateway.picker.columns import Columns, Seats
from penstock.gateway.picker.compiled import Picked
from penstock.gateway.picker.disaggregation import Hop
from penstock.gateway.picker.figures import Figures, Rates
from penstock.gateway.picker.request import RequestFigures
from penstock.gateway.picker.slate import slate_of_all


class UsualChoice(msgspec.Struct, frozen=True):
    """What is needed at once of a `Choice` among all rows that may take requests, none of them a last resort, for a request with
    neither an adapter nor images; `told` makes the rest. No prompt is in it."""

    policy: ClassVar[str] = JOINT_POLICY
    hop: ClassVar[Hop | None] = None
    picked: Picked
    rows: list[int]
    """The best candidates in order of preference."""
    scores: list[float]
    """Theirs."""
    resident_tokens: int
    """Prompt tokens that the pick has."""
    ttft_s: float
    """The time to the first token that the pick promises."""
    columns: Columns
    seats: Seats
    """Of those, as they were."""
    request: RequestFigures
    now: float
    turn: int
    weights: Weights
    rates: Rates

    @property
    def replica(self) -> Replica:
        """The pick."""
        replica = self.seats.replicas[self.rows[0]]
        assert replica is not None
        return replica

    @property
    def endpoints(self) -> list[str]:
        """The ordered list for Envoy."""
        endpoints = self.seats.endpoints
        return [endpoints[row] for row in self.rows[:MAX_ENDPOINTS]]

    @property
    def next_best(self) -> tuple[str, float] | None:
        """The second in order of preference, and its score."""
        return second(self.seats.replicas, self.rows, self.scores)


Made = Choice | UsualChoice


def told(made: Made) -> Choice:
    """The choice with all that can be said of it, as it was."""
    if isinstance(made, Choice):
        return made
    picked, resident = made.picked, np.frombuffer(made.picked.resident())
    was = made.columns, made.seats, resident, made.now, made.turn, made.weights, made.rates
    return Choice(
        policy=made.policy,
        replica=made.replica,
        resident_tokens=made.resident_tokens,
        endpoints=made.endpoints,
        whole=slate_of_all(made.request, *was),
        rows=made.rows,
        table=np.frombuffer(picked.table()).reshape(len(Figures._fields), -1),
        scores=made.scores,
        limit=picked.limit,
        subset=None,
        excluded=(),
        ttft_s=made.ttft_s,
    )
