"""All that a gateway process knows of the fleet: what discovery says, what replicas report, what they cache and what was sent to
them. No I/O; time is an argument (monotonic seconds)."""

from bisect import bisect_left
from collections.abc import Collection

import msgspec
import numpy as np

from penstock.api.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, Medium, RequestFinished
from penstock.api.fleet import LATENCY_EDGES_S, Engine, Fleet, InferencePool, Model, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.load.adapters import LoadedAdapters
from penstock.gateway.load.reports import ReportStore
from penstock.gateway.load.traits import Traits
from penstock.gateway.models.names import Names
from penstock.gateway.models.outcomes import Outcomes
from penstock.gateway.picker.bookings import Booking, Bookings
from penstock.gateway.picker.candidates import Booked, ReplicaKey, key_of
from penstock.gateway.picker.columns import Columns
from penstock.gateway.picker.coming import Coming
from penstock.gateway.picker.compiled import Compiled, index_of
from penstock.gateway.picker.figures import Floats
from penstock.gateway.picker.outliers import Outliers
from penstock.gateway.picker.pooled import takes_requests
from penstock.gateway.picker.request import RequestView
from penstock.gateway.picker.resident import Resident
from penstock.gateway.picker.slate import Slate, slate_of
from penstock.gateway.picker.subset import Subset, spelled
from penstock.gateway.residency.beliefs import Beliefs
from penstock.gateway.residency.index import MAX_BLOCKS, Knowledge
from penstock.gateway.residency.tiers import Tiers, load_cost


class FleetState:
    """The picker's view of the world.

    Args:
        residency_blocks: KV blocks that the residency index knows at most.
        compiled: What looks prompts up, prices and ranks; None: Python.
    """

    def __init__(self, residency_blocks: int = MAX_BLOCKS, *, compiled: Compiled | None = None) -> None:
        self.compiled = compiled
        self.fleet = Fleet()
        self.version = 0
        """Rises when replicas change or a hold begins: what must wake an autoscaler."""
        self.reports = ReportStore()
        self._loaded = LoadedAdapters()
        self.residency = index_of(compiled, total=residency_blocks)
        self.tiers = Tiers(self.residency, lambda: index_of(compiled, total=residency_blocks))
        self.beliefs = Beliefs(self.residency)
        self.outliers = Outliers()
        self._traits: dict[ReplicaKey, Traits] = {}
        self.bookings = Bookings(self._booked, self._left)
        self._coming = Coming(self.bookings)
        self.held: dict[str, int] = {}
        """Requests held by model id."""
        self._replicas: dict[ReplicaKey, Replica] = {}
        self._by_endpoint: dict[str, ReplicaKey] = {}
        self._by_model: dict[str, list[Replica]] = {}
        self.names = Names(self.fleet)
        """Owners of names."""
        self.outcomes = Outcomes()
        self._inference_pools: dict[str, InferencePool] = {}
        self._columns: dict[str, Columns] = {}
        """Columns of the replicas that answer requests, by model id."""
        self._prefill: dict[str, Columns] = {}
        self._resident: dict[Columns, Resident] = {}
        """What caches and tiers hold of prompts, at the same."""
        self._places: dict[ReplicaKey, tuple[Columns, int]] = {}
        """By replica, the columns and the row of its figures."""
        self._turns: dict[str, int] = {}
        self.ttft_counts: dict[str, list[int]] = {}
        """Counts of first tokens by pool."""

    def update(self, fleet: Fleet) -> None:
        """Takes in what discovery sees now."""
        if msgspec.structs.replace(fleet, scaling=self.fleet.scaling) == self.fleet:
            self.fleet = fleet  # the autoscaler has said something, which changes nothing here
            return
        replicas = {key_of(replica): replica for replica in fleet.replicas}
        for key in [key for key in self._replicas if key not in replicas]:
            self.bookings.release_all(key, "replica_gone")
            self.beliefs.drop(key)
            self.tiers.drop(key)
            self.reports.drop(key)
            self._loaded.forget(key)
            self._traits.pop(key, None)
            self.outliers.drop(key)
        # A process may have ended, whose place another takes under the same key: what that one has, it has to say.
        fallen = [key for key, old in self._replicas.items() if old.ready and key in replicas and not replicas[key].ready]
        if replicas != self._replicas:
            self.version += 1
        self.fleet, self._replicas = fleet, replicas
        # A terminating replica's address may have been given to a new one already: the new one owns it.
        order = sorted(replicas.items(), key=lambda item: not item[1].terminating)
        self._by_endpoint = {spelled(replica.endpoint): key._replace(rank=None) for key, replica in order}
        self.names = Names(fleet)
        self._inference_pools = {pool.id: pool for pool in fleet.inference_pools}
        pools = {pool.id: pool for pool in fleet.pools}
        self.ttft_counts = {pool: counts for pool, counts in self.ttft_counts.items() if pool in pools}
        self._by_model = {}
        prefill: dict[str, list[Replica]] = {}
        for replica in fleet.replicas:
            if (pool := pools.get(replica.pool)) is not None:
                (self._by_model if takes_requests(pool) else prefill).setdefault(pool.model, []).append(replica)
        before, self._places = self._places, {}
        self._columns = self._placed(self._columns, self._by_model, before)
        self._prefill = self._placed(self._prefill, prefill, before)
        for key in fallen:
            self._loaded.forget(key)
            self._serve(key)
        current = {*self._columns.values(), *self._prefill.values()}
        self._resident = {
            columns: self._resident.get(columns) or Resident(self.residency, self.tiers, columns) for columns in current
        }

    def _placed(
        self, old: dict[str, Columns], members: dict[str, list[Replica]], before: dict[ReplicaKey, tuple[Columns, int]]
    ) -> dict[str, Columns]:
        """Gives every replica its row, and a new row what is known already."""
        placed = {model: old.get(model) or Columns(self.compiled) for model in members}
        for model, columns in placed.items():
            columns.update(members[model])
            for key, row in columns.rows.items():
                self._places[key] = columns, row
                if before.get(key) != (columns, row):
                    if (heard := self.reports.get(key)) is not None:
                        columns.report(row, heard.report, heard.at)
                    self._booked(key, self.bookings.outstanding(key))
                    self._stand(key)
                    self._serve(key)
        return placed

    def inference_pool(self, pool: str) -> InferencePool | None:
        """An InferencePool by its id."""
        return self._inference_pools.get(pool)

    def replicas(self) -> dict[ReplicaKey, Replica]:
        """All replicas."""
        return self._replicas

    def replicas_of(self, model: Model) -> list[Replica]:
        """The replicas that requests for `model` may go to, ready or not."""
        return self._by_model.get(model.id, [])

    def names_at(self, replica: Replica) -> list[str]:
        """What the model that `replica` serves is called."""
        models = {pool.model for pool in self.fleet.pools if pool.id == replica.pool}
        return [name for model in self.fleet.models if model.id in models for name in (*model.served_names, model.id)]

    def engine(self, key: ReplicaKey) -> Engine:
        """Return the engine of `key`; `auto` until it is known."""
        return self.traits(key).engine

    def traits(self, key: ReplicaKey) -> Traits:
        """The settings of the engine at `key`."""
        known = self._traits.get(key)
        if known is None:
            replica = self._replicas.get(key)
            known = Traits(engine=replica.engine if replica else "auto")
        return known

    def learned(self, key: ReplicaKey, traits: Traits) -> None:
        """The engine at `key` has told its settings."""
        if key in self._replicas:
            self._traits[key] = traits
            if not self.tells(key):
                self.beliefs.history.set_blocks(key, traits.num_blocks)
            self._serve(key)

    def tells(self, key: ReplicaKey) -> bool:
        """Whether `key` says by events what it caches."""
        replica = self._replicas.get(key)
        return replica is not None and replica.events_port != 0

    def key_at(self, endpoint: str, rank: int | None = None) -> ReplicaKey | None:
        """The replica at an `ip:port`, however the address is written.

        Args:
            endpoint: The address.
            rank: The data-parallel rank that is meant, where the replica there is one of several.
        """
        whole = self._by_endpoint.get(endpoint) or self._by_endpoint.get(spelled(endpoint))
        if whole is None or whole in self._replicas:
            return whole
        key = whole._replace(rank=rank)
        return key if key in self._replicas else None

    def picked(self, model: Model) -> None:
        """Counts the picks of a model."""
        self._turns[model.id] = self._turns.get(model.id, 0) + 1

    def routed(
        self, model: Model, request: RequestView, key: ReplicaKey, resident_tokens: int, now: float, ttft_s: float = 0.0
    ) -> None:
        """`request` goes to `key`, which is believed to cache so many of its prompt tokens and promises its first token in
        `ttft_s` seconds (0: nobody has asked)."""
        self.beliefs.routed(key, model.id, request, resident_tokens, now, tells=self.tells(key), ttft_s=ttft_s)

    def book(self, request: RequestView, key: ReplicaKey, resident_tokens: int, now: float, *, answers: int = 1) -> Booking:
        """A booking of `request` at `key`, which computes all but `resident_tokens` of it; what it then caches counts at once."""
        fresh = request.prompt_tokens - resident_tokens + request.encoder_tokens(resident_tokens)
        booking = self.bookings.book(request.id, key, fresh, now, answers=answers)
        self._sent(key)
        if len(request.prompts) == 1 and self.tells(key):  # of others `beliefs` takes the same for granted
            (prompt,), block_size = request.space_of(key)
            self._coming.expect(booking, prompt.block_hashes, resident_tokens // block_size)
        return booking

    def book_pair(
        self,
        request: RequestView,
        key: ReplicaKey,
        resident_tokens: int,
        prefill: tuple[ReplicaKey, int],
        now: float,
        *,
        answers: int = 1,
    ) -> tuple[Booking, Booking]:
        """Book `request` at `key`, and at the prefill replica that computes so many of its tokens there first."""
        fresh, (prefill_key, fresh_there) = request.prompt_tokens - resident_tokens, prefill
        decode = self.bookings.book(request.id, key, 0, now, transfer_tokens=fresh, answers=answers)
        there = fresh_there + request.encoder_tokens(request.prompt_tokens - fresh_there)
        booked = decode, self.bookings.book(request.id, prefill_key, there, now)
        self.beliefs.truth.expect(prefill_key, request.id, None)
        self._sent(key)
        self._sent(prefill_key)
        return booked

    def _sent(self, key: ReplicaKey) -> None:
        if key in self._places:
            columns, _ = self._places[key]
            columns.sent()

    # --- what replicas say ---

    def reported(
        self, key: ReplicaKey, report: LoadReport, now: float, asked_at: float | None = None, *, in_header: bool = False
    ) -> None:
        """A load report of `key`, received at `now`; a poll says when it asked. `in_header`: a short one, without adapters."""
        if key not in self._replicas:
            return
        if self.reports.observe(key, report, now):
            self.restarted(key)
        self.bookings.reported(key, report.epoch, report.seq, now if asked_at is None else asked_at)
        self.outliers.heard(key, now)
        self._stand(key)
        if key in self._places:
            columns, row = self._places[key]
            heard = self.reports.get(key)
            if heard is not None and heard.report is report:
                columns.report(row, report, heard.at)
        current = self.reports.get(key)
        of_this_process = current is not None and current.report.epoch == report.epoch
        if not in_header and of_this_process and self._loaded.said(key, report.seq, report.adapters):
            self._serve(key)

    def mute(self, key: ReplicaKey) -> None:
        """Record that `key` answered its load poll with something else, so that its adapters stay unknown."""
        if key in self._replicas and self._loaded.mute(key):
            self._serve(key)

    def restarted(self, key: ReplicaKey) -> None:
        """`key` is a new process: what the old one ran and cached is gone."""
        self.bookings.release_all(key, "new_epoch")
        self.beliefs.restarted(key)
        self.tiers.drop(key)
        self.outliers.drop(key)
        self._stand(key)
        self._loaded.forget(key)
        self._serve(key)
        if key in self._places:
            columns, row = self._places[key]
            columns.trust_again(row)

    def events_lost(self, key: ReplicaKey) -> None:
        """Block events of `key` are gone for good: what it stores from now on is all that counts."""
        if key in self._replicas:
            self._clear(key)
            self.residency.set_knowledge(key, Knowledge.PARTIAL)

    def events_complete(self, key: ReplicaKey) -> None:
        """The block events of `key` are complete."""
        if key in self._replicas:
            self.residency.set_knowledge(key, Knowledge.EXACT)

    def event(self, key: ReplicaKey, event: Event, now: float) -> None:
        """One event of the stream of `key`."""
        if key not in self._replicas:
            return
        match event:
            case BlockStored(hashes, medium):
                if medium is None:
                    self.residency.store(key, hashes)
                self.tiers.stored(key, hashes, medium)
            case BlockRemoved(hashes, medium):
                if medium is None:
                    self.residency.remove(key, hashes)
                self.tiers.removed(key, hashes, medium)
            case AllBlocksCleared():
                self._clear(key)
            case RequestFinished():
                self._finished(key, event)
            case LoadReport():
                self.reported(key, event, now)

    def _clear(self, key: ReplicaKey) -> None:
        self.residency.clear(key)
        self.tiers.clear(key)

    def _finished(self, key: ReplicaKey, event: RequestFinished) -> None:
        awaited = self.beliefs.truth.awaits(key, event.request_id)
        if not self.bookings.finished(key, event.request_id) and not awaited:
            self._sent(key)  # by another gateway or none, and to be counted among the replicas' arrivals now at the latest
        if event.ttft_s:
            counts = self.ttft_counts.setdefault(self._replicas[key].pool, [0] * (len(LATENCY_EDGES_S) + 1))
            counts[bisect_left(LATENCY_EDGES_S, event.ttft_s)] += 1
        prediction = self.beliefs.finished(key, event)
        if key in self._places and event.output_tokens:
            columns, row = self._places[key]
            columns.finished(event.output_tokens)
            if prediction is not None and prediction.times(event):
                columns.first_token(row, prediction.ttft_s, event.ttft_s)

    def correction(self, key: ReplicaKey) -> float:
        """Return the factor on the times that `key` promises."""
        if key not in self._places:
            return 1.0
        columns, row = self._places[key]
        return float(columns.figures.correction[row])

    def unreachable(self, key: ReplicaKey, now: float) -> None:
        """`key` could not be connected to, or gave no answer."""
        if key in self._replicas:
            self.outliers.unreachable(key, now)
            self._stand(key)

    def refused(self, key: ReplicaKey, now: float) -> None:
        """`key` would not take a request, and says so."""
        if key in self._replicas:
            self.outliers.refused(key, now)
            self._stand(key)

    def answered(self, key: ReplicaKey, now: float, *, error: bool) -> None:
        """`key` answered a request; `error`: with a failure of its own."""
        if key in self._replicas:
            (self.outliers.error if error else self.outliers.answered)(key, now)
            self._stand(key)

    def _stand(self, key: ReplicaKey) -> None:
        if key in self._places:
            columns, row = self._places[key]
            columns.stand(row, self.outliers.standing(key))

    def _serve(self, key: ReplicaKey) -> None:
        """Update the adapters of `key`. Other engines do not report them. A Penstock engine with events will, and has none until
        then."""
        if key in self._places:
            columns, row = self._places[key]
            unsaid = () if self.tells(key) else None
            columns.serves(row, self._loaded.at(key, unsaid) if self.engine(key) == "penstock" else None)

    def _booked(self, key: ReplicaKey, booked: Booked) -> None:
        if key in self._places:
            columns, row = self._places[key]
            columns.booked(row, booked)

    def _left(self, key: ReplicaKey) -> None:
        if key in self._places:
            columns, row = self._places[key]
            columns.left(row)

    # --- what the picker asks ---

    def slate(
        self,
        model: Model,
        request: RequestView,
        now: float,
        *,
        subset: Subset | None = None,
        excluded: Collection[ReplicaKey] = (),
        comparable: Collection[ReplicaKey] | None = None,
    ) -> Slate:
        """The pick of `request`: who may take it, and all that is known of them.

        Args:
            model: The model that the request names.
            request: The request.
            now: The moment of the pick.
            subset: The gateway's restriction; None where it made none.
            excluded: Replicas that this request must not go to.
            comparable: Replicas whose hash space is that of the request's hashes; residency elsewhere says nothing. None: all.
        """
        columns = self._columns.get(model.id) or Columns(self.compiled)
        resident, found = self._resident_tokens(columns, request, comparable)
        eligible, turn = columns.eligible(subset, excluded, _loaded(model, request.adapter)), self._turns.get(model.id, 0)
        return slate_of(request, columns, eligible, resident, now, turn, model.weights, found=found)

    def prefill_slate(
        self,
        model: Model,
        request: RequestView,
        now: float,
        *,
        subset: Subset | None = None,
        comparable: Collection[ReplicaKey] | None = None,
    ) -> Slate | None:
        """Return the replicas that may compute the prompt of `request` for the one that answers it; None if there are none. See
        `slate` for
        the arguments."""
        columns, adapter = self._prefill.get(model.id), _loaded(model, request.adapter)
        if columns is None or not columns.open_count or (adapter is not None and not columns.able(adapter).any()):
            return None
        resident, found = self._resident_tokens(columns, request, comparable)
        eligible, turn = columns.eligible(subset, (), adapter), self._turns.get(model.id, 0)
        return slate_of(request, columns, eligible, resident, now, turn, model.weights, found=found)

    def lacks(self, model: Model, adapter: str | None) -> bool:
        """Whether no replica that could be picked has the adapter that a request names."""
        adapter = _loaded(model, adapter)
        if adapter is None:
            return False
        columns = self._columns.get(model.id)
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
            self._coming.add_to(tokens, request.prompts[0], request.block_size, columns.rows, comparable)
            for space in request.elsewhere:
                self._coming.add_to(tokens, space.prompts[0], space.block_size, columns.rows, space.replicas)
        return of_model.with_tiers(tokens, request, comparable, self._load_cost)

    def _load_cost(self, key: ReplicaKey, medium: Medium) -> float:
        heard = self.reports.get(key)
        return load_cost(medium, None if heard is None else heard.report)

    # --- what the autoscaler asks, besides `penstock.gateway.picker.pooled` ---

    def hold_began(self, model: Model) -> None:
        """A request waits for a replica of `model`."""
        self.held[model.id] = self.held.get(model.id, 0) + 1
        self.version += 1

    def hold_ended(self, model: Model) -> None:
        """A held request was routed, refused or given up."""
        self.held[model.id] -= 1
        if not self.held[model.id]:
            del self.held[model.id]


def _loaded(model: Model, adapter: str | None) -> str | None:
    """The adapter that a replica must have said to have. Of open pools `ServedNames` knows what they serve."""
    return None if model.open else adapter
