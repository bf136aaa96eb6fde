"""The choice of a replica for a request: by the compiled parts at once where the request is like most, else step by step.

The steps are the statement. The short way takes a request with one prompt of text, for a model whose replicas are of one pool,
none of them troubled, without tiers and without prefill replicas, by the usual policy.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from penstock.api.fleet import Model
from penstock.gateway.picker.bookings import Booking
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.choice import JOINT_POLICY, RANKED, choose
from penstock.gateway.picker.columns import Columns
from penstock.gateway.picker.coming import Coming
from penstock.gateway.picker.compiled import Compiled, Picked
from penstock.gateway.picker.cost import horizon
from penstock.gateway.picker.figures import Rates
from penstock.gateway.picker.folded import Folding
from penstock.gateway.picker.places import Places
from penstock.gateway.picker.policies import POLICIES
from penstock.gateway.picker.request import RequestFigures, RequestView
from penstock.gateway.picker.slate import word_of
from penstock.gateway.picker.slates import Slates
from penstock.gateway.picker.subset import Subset
from penstock.gateway.picker.usual import Made, UsualChoice
from penstock.gateway.residency.index import ResidencyIndex
from penstock.gateway.residency.tiers import Tiers

TOLERANCE = POLICIES[JOINT_POLICY].tolerance
"""Of the usual policy."""


class Picks:
    """Chooses; books only what goes the short way, and where it is asked to.

    Args:
        places: The figures of the replicas.
        slates: What picks are made of.
        tiers: What replicas could load.
        coming: What they will hold.
        compiled: What goes the short way; None: nothing does.
    """

    def __init__(self, places: Places, slates: Slates, tiers: Tiers, coming: Coming, compiled: Compiled | None) -> None:
        self._places, self._slates, self._tiers = places, slates, tiers
        self._coming, self._compiled = coming, compiled

    def of(
        self,
        model: Model,
        request: RequestView,
        now: float,
        *,
        subset: Subset | None = None,
        excluded: Collection[ReplicaKey] = (),
        comparable: Collection[ReplicaKey] | None = None,
        answers: int | None = None,
    ) -> tuple[Made, Booking | None] | None:
        """The choice, and the booking where the request went the short way and was booked; None where no replica may be picked.
        See `Slates.of` for the arguments.

        Args:
            answers: What `FleetState.book`, the statement of bookings, is to book where the request goes the short way; None:
                nothing.

        Raises:
            ValueError: there is no policy like the model's.
        """
        alone = len(request.prompts) == 1 and not request.elsewhere and not request.prompts[0].images
        columns = self.usual(model) if alone and request.adapter is None and subset is None and not excluded else None
        if columns is not None:
            books = None if answers is None else (request.id, answers)
            return self._at_once(model, request, columns, now, comparable, books)
        slate = self._slates.of(model, request, now, subset=subset, excluded=excluded, comparable=comparable)
        if not slate.candidates:
            return None
        prefill = self._slates.of_prefill(model, request, now, subset=subset, comparable=comparable)
        return choose(slate, model.policy, subset, excluded, prefill=prefill), None

    def usual(self, model: Model) -> Columns | None:
        """The replicas of a model, where there is nothing about them but what the compiled parts look at."""
        columns = self._places.answering.get(model.id)
        usual = (
            self._compiled is not None
            and columns is not None
            and model.policy == JOINT_POLICY
            and columns.open_count > 0
            and len(columns.pools) == 1
            and not columns.troubled
            and not self._tiers
            and model.id not in self._places.prefilling
        )
        return columns if usual else None

    def looked_at(
        self, columns: Columns, comparable: Collection[ReplicaKey] | None
    ) -> tuple[Folding, ResidencyIndex, Coming, NDArray[np.uint8] | None]:
        """What the compiled parts look at where they pick among these replicas: the first arguments of `Compiled.pick`, and its
        `among`."""
        cached = self._slates.cached(columns)
        among = None if comparable is None else cached.mask(comparable)
        return columns.prices, cached.residency, self._coming, None if among is None else among.view(np.uint8)

    def made(
        self, model: Model, request: RequestFigures, columns: Columns, picked: Picked, now: float, rates: Rates
    ) -> UsualChoice:
        """The choice that the compiled parts have made among all of `columns`."""
        return UsualChoice(
            *(picked, picked.rows, picked.scores, picked.resident_tokens, picked.ttft_s, columns, columns.seats),
            *(request, now, self._slates.turn(model), model.weights, rates),
        )

    def _at_once(
        self,
        model: Model,
        request: RequestView,
        columns: Columns,
        now: float,
        comparable: Collection[ReplicaKey] | None,
        books: tuple[str, int] | None,
    ) -> tuple[Made, Booking | None]:
        compiled = self._compiled
        assert compiled is not None
        (prompt,), rates = request.prompts, columns.rates(now)
        prices, index, coming, among = self.looked_at(columns, comparable)
        picked = compiled.pick(
            prices,
            index,
            coming,
            prompt.block_hashes,
            request.block_size,
            among,
            rates,
            now,
            prompt.tokens,
            horizon(request.max_tokens),
            word_of(request.id),
            TOLERANCE,
            RANKED,
            books,
        )
        if books is not None:
            columns.sent()
        return self.made(model, request.figures, columns, picked, now, rates), picked.booking
