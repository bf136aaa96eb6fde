"""What a pick is made of: who may take a request, and all that is known of them."""

from collections.abc import Collection

import numpy as np

from penstock.api.events import Medium
from penstock.api.fleet import Model
from penstock.gateway.load.reports import ReportStore
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.columns import Columns
from penstock.gateway.picker.coming import Coming
from penstock.gateway.picker.compiled import Compiled
from penstock.gateway.picker.figures import Floats
from penstock.gateway.picker.places import Places
from penstock.gateway.picker.request import RequestView
from penstock.gateway.picker.resident import Resident, ResidentColumn
from penstock.gateway.picker.slate import Slate, slate_of
from penstock.gateway.picker.subset import Subset
from penstock.gateway.residency.index import ResidencyIndex
from penstock.gateway.residency.tiers import Tiers, load_cost


class Slates:
    """Makes slates.

    Args:
        places: The figures of the replicas.
        residency: What their KV caches hold.
        tiers: What they could load.
        coming: What they will hold once they have computed what was sent to them.
        reports: What they say of their load.
        compiled: What prices and ranks; None: Python.
    """

    def __init__(
        self,
        places: Places,
        residency: ResidencyIndex,
        tiers: Tiers,
        coming: Coming,
        reports: ReportStore,
        compiled: Compiled | None,
    ) -> None:
        self._places, self._residency, self._tiers = places, residency, tiers
        self._coming, self._reports, self._compiled = coming, reports, compiled
        self._resident: dict[Columns, Resident] = {}
        self._turns: dict[str, int] = {}

    def update(self) -> None:
        """There may be other columns now."""
        self._resident = {
            columns: self._resident.get(columns) or Resident(self._residency, self._tiers, columns)
            for columns in self._places.all()
        }

    def picked(self, model: Model) -> None:
        """Counts the picks of a model."""
        self._turns[model.id] = self._turns.get(model.id, 0) + 1

    def turn(self, model: Model) -> int:
        """How many picks of a model there have been."""
        return self._turns.get(model.id, 0)

    def cached(self, columns: Columns) -> ResidentColumn:
        """The look-up in what the KV caches of these replicas hold."""
        return self._resident[columns].in_cache

    def of(
        self,
        model: Model,
        request: RequestView,
        now: float,
        *,
        subset: Subset | None = None,
        excluded: Collection[ReplicaKey] = (),
        comparable: Collection[ReplicaKey] | None = None,
    ) -> Slate:
        """The pick of `request`.

        Args:
            model: The model that the request names.
            request: The request.
            now: The moment of the pick.
            subset: The gateway's restriction; None where it made none.
            excluded: Replicas that this request must not go to.
            comparable: Replicas whose hash space is that of the request's hashes; residency elsewhere says nothing. None: all.
        """
        columns = self._places.answering.get(model.id) or Columns(self._compiled)
        resident, found = self._resident_tokens(columns, request, comparable)
        eligible, turn = columns.eligible(subset, excluded, _loaded(model, request.adapter)), self.turn(model)
        return slate_of(request, columns, eligible, resident, now, turn, model.weights, found=found)

    def of_prefill(
        self,
        model: Model,
        request: RequestView,
        now: float,
        *,
        subset: Subset | None = None,
        comparable: Collection[ReplicaKey] | None = None,
    ) -> Slate | None:
        """Return the replicas that may compute the prompt of `request` for the one that answers it; None if there are none. See
        `of` for the arguments."""
        columns, adapter = self._places.prefilling.get(model.id), _loaded(model, request.adapter)
        if columns is None or not columns.open_count or (adapter is not None and not columns.able(adapter).any()):
            return None
        resident, found = self._resident_tokens(columns, request, comparable)
        eligible, turn = columns.eligible(subset, (), adapter), self.turn(model)
        return slate_of(request, columns, eligible, resident, now, turn, model.weights, found=found)

    def lacks(self, model: Model, adapter: str | None) -> bool:
        """Whether no replica that could be picked has the adapter that a request names."""
        adapter = _loaded(model, adapter)
        if adapter is None:
            return False
        columns = self._places.answering.get(model.id)
        return columns is None or not columns.able(adapter).any()

    def _resident_tokens(
        self, columns: Columns, request: RequestView, comparable: Collection[ReplicaKey] | None
    ) -> tuple[Floats, Floats]:
        """`Slate.resident` and `Slate.found`."""
        if columns not in self._resident:  # of a model without replicas
            return np.zeros(0), np.zeros(0)
        of_model = self._resident[columns]
        tokens = of_model.cached(request, comparable)
        if len(request.prompts) == 1 and self._coming:
            found = self._coming.found(request.prompts[0], request.block_size, columns.rows, comparable)
            for space in request.elsewhere:
                found += self._coming.found(space.prompts[0], space.block_size, columns.rows, space.replicas)
            for row, supplied in found:
                tokens[row] = max(tokens[row], supplied)
        return of_model.with_tiers(tokens, request, comparable, self._load_cost)

    def _load_cost(self, key: ReplicaKey, medium: Medium) -> float:
        heard = self._reports.get(key)
        return load_cost(medium, None if heard is None else heard.report)


def _loaded(model: Model, adapter: str | None) -> str | None:
    """The adapter that a replica must have said to have. Of open pools `ServedNames` knows what they serve."""
    return None if model.open else adapter
