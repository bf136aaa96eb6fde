"""The choice of a replica for a request: by the compiled parts at once where the request is like most, else step by step.

The steps are the statement. The short way takes a request with one prompt of text, for a model whose replicas are of one pool,
none of them troubled, without tiers and without prefill replicas, by the usual policy.
"""

from collections.abc import Collection

import numpy as np

from penstock.api.fleet import Model
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.choice import JOINT_POLICY, MAX_ENDPOINTS, RANKED, Choice, choose
from penstock.gateway.picker.columns import Columns
from penstock.gateway.picker.coming import Coming
from penstock.gateway.picker.compiled import Compiled
from penstock.gateway.picker.cost import horizon
from penstock.gateway.picker.places import Places
from penstock.gateway.picker.policies import POLICIES
from penstock.gateway.picker.request import RequestView
from penstock.gateway.picker.slate import Sketch, word_of
from penstock.gateway.picker.slates import Slates
from penstock.gateway.picker.subset import Subset
from penstock.gateway.residency.tiers import Tiers

_TOLERANCE = POLICIES[JOINT_POLICY].tolerance


class Picks:
    """Chooses; books nothing.

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
    ) -> Choice | None:
        """The choice; None where no replica may be picked. See `Slates.of` for the arguments.

        Raises:
            ValueError: there is no policy like the model's.
        """
        columns, compiled = self._places.answering.get(model.id), self._compiled
        if (
            compiled is not None
            and columns is not None
            and subset is None
            and not excluded
            and self._usual(model, request, columns)
        ):
            return self._at_once(compiled, model, request, columns, now, comparable)
        slate = self._slates.of(model, request, now, subset=subset, excluded=excluded, comparable=comparable)
        if not slate.candidates:
            return None
        prefill = self._slates.of_prefill(model, request, now, subset=subset, comparable=comparable)
        return choose(slate, model.policy, subset, excluded, prefill=prefill)

    def _usual(self, model: Model, request: RequestView, columns: Columns) -> bool:
        """Whether there is nothing about the request and the replicas but what the compiled parts look at."""
        return (
            model.policy == JOINT_POLICY
            and request.adapter is None
            and len(request.prompts) == 1
            and not request.elsewhere
            and not request.prompts[0].images
            and columns.open_count > 0
            and len(columns.pools) == 1
            and not columns.troubled
            and not self._tiers
            and model.id not in self._places.prefilling
        )

    def _at_once(
        self,
        compiled: Compiled,
        model: Model,
        request: RequestView,
        columns: Columns,
        now: float,
        comparable: Collection[ReplicaKey] | None,
    ) -> Choice:
        (prompt,), block_size = request.prompts, request.block_size
        cached, rates = self._slates.cached(columns), columns.rates(now)
        among = None if comparable is None else cached.mask(comparable)
        coming = self._coming.found(prompt, block_size, columns.rows, comparable) if self._coming else ()
        folded, changed = columns.to_fold(rates, block_size)
        resident = np.zeros(len(columns.replicas))
        rows, scores, limit, ttft_s = compiled.pick(
            cached.residency,
            prompt.block_hashes,
            max(prompt.tokens - 1, 0) // block_size,
            block_size,
            cached.rows_by_bit(),
            None if among is None else among.view(np.uint8),
            coming,
            resident,
            columns.table,
            folded,
            columns.common,
            now,
            changed,
            prompt.tokens,
            horizon(request.max_tokens),
            columns.seeds,
            word_of(request.id),
            _TOLERANCE,
            RANKED,
            None if columns.open_count == len(resident) else columns.open.view(np.uint8),
        )
        replica = columns.replicas[rows[0]]
        assert replica is not None
        return Choice(
            policy=JOINT_POLICY,
            replica=replica,
            resident_tokens=int(resident[rows[0]]),
            endpoints=[columns.endpoints[row] for row in rows[:MAX_ENDPOINTS]],
            made_of=Sketch(request, columns, columns.seats, resident, now, self._slates.turn(model), model.weights, rates),
            rows=rows,
            table=columns.table.take(rows, axis=1),
            scores=scores,
            limit=limit,
            subset=None,
            excluded=(),
            ttft_s=ttft_s,
        )
