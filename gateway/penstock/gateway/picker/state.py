"""All that a gateway process knows of the fleet: what discovery says, what replicas report, what they cache and what was sent to
them. No I/O; time is an argument (monotonic seconds)."""

from bisect import bisect_left
from collections.abc import Collection
from typing import NamedTuple

from penstock.api import headers
from penstock.api.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, RequestFinished
from penstock.api.fleet import LATENCY_EDGES_S, Engine, Fleet, Model
from penstock.api.load_report import LoadReport
from penstock.gateway.load.adapters import LoadedAdapters
from penstock.gateway.load.reports import ReportStore
from penstock.gateway.load.traits import Traits
from penstock.gateway.models.outcomes import Outcomes
from penstock.gateway.picker.bookings import Booking, bookings_of
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.choice import Choice
from penstock.gateway.picker.coming import coming_of
from penstock.gateway.picker.compiled import Compiled, ReportReader, Said, UsualResponses, index_of
from penstock.gateway.picker.directory import Directory
from penstock.gateway.picker.outliers import Outliers
from penstock.gateway.picker.picks import Picks
from penstock.gateway.picker.places import Places
from penstock.gateway.picker.request import RequestView
from penstock.gateway.picker.slates import Slates
from penstock.gateway.picker.subset import Subset
from penstock.gateway.picker.usual import Made, told
from penstock.gateway.residency.beliefs import Beliefs
from penstock.gateway.residency.index import MAX_BLOCKS, Knowledge
from penstock.gateway.residency.tiers import Tiers


class Sent(NamedTuple):
    """A request that goes to a replica."""

    choice: Made
    booking: Booking
    prefill_booking: Booking | None = None
    """At the replica that computes the prompt, if that is another one."""


class FleetState:
    """The picker's view of the world.

    Args:
        residency_blocks: KV blocks that are known at most, in caches and tiers together.
        compiled: What looks prompts up, prices and ranks; None: Python.
    """

    def __init__(self, residency_blocks: int = MAX_BLOCKS, *, compiled: Compiled | None = None) -> None:
        self.compiled = compiled
        self.directory = Directory()
        self.version = 0
        """Rises when replicas change or a hold begins: what must wake an autoscaler."""
        self.reports = ReportStore()
        self._loaded = LoadedAdapters()
        self.residency = index_of(compiled, total=residency_blocks)
        self.tiers = Tiers(self.residency, lambda: index_of(compiled), total=residency_blocks)
        self.beliefs = Beliefs(self.residency)
        self.outliers = Outliers()
        self._traits: dict[ReplicaKey, Traits] = {}
        self._places = Places(compiled)
        self.bookings = bookings_of(compiled, self._places.booked, self._places.left)
        self._coming = coming_of(compiled, self.bookings)
        self.slates = Slates(self._places, self.residency, self.tiers, self._coming, self.reports, compiled)
        self.picks = Picks(self._places, self.slates, self.tiers, self._coming, compiled)
        self.held: dict[str, int] = {}
        """Requests held by model id."""
        self.outcomes = Outcomes()
        self.ttft_counts: dict[str, list[int]] = {}
        """Counts of first tokens by pool."""

    def update(self, fleet: Fleet) -> None:
        """Takes in what discovery sees now."""
        change = self.directory.update(fleet)
        if change is None:
            return
        for key in change.gone:
            self.bookings.release_all(key, "replica_gone")
            self.beliefs.drop(key)
            self.tiers.drop(key)
            self.reports.drop(key)
            self._loaded.forget(key)
            self._traits.pop(key, None)
            self.outliers.drop(key)
        self.version += change.replicas_differ
        pools = {pool.id for pool in fleet.pools}
        self.ttft_counts = {pool: counts for pool, counts in self.ttft_counts.items() if pool in pools}
        introduced = self._places.update(self.directory.answering, self.directory.prefilling)
        self._places.lay_out(self.bookings, self.directory)
        for key in introduced:
            self._introduce(key)
        for key in change.fallen:  # what the process that takes its place has, that one has to say
            self._loaded.forget(key)
            self._serve(key)
        self.slates.update()

    def _introduce(self, key: ReplicaKey) -> None:
        """Tells a new row what is known of its replica already."""
        place, heard = self._places.at(key), self.reports.get(key)
        if place is not None and heard is not None:
            place.columns.heard(place.row, heard)
        self._places.booked(key, self.bookings.outstanding(key))
        self._stand(key)
        self._serve(key)

    def engine(self, key: ReplicaKey) -> Engine:
        """Return the engine of `key`; `auto` until it is known."""
        known = self._traits.get(key) or self.directory.replicas.get(key)
        return known.engine if known else "auto"

    def traits(self, key: ReplicaKey) -> Traits:
        """The settings of the engine at `key`."""
        return self._traits.get(key) or Traits(engine=self.engine(key))

    def learned(self, key: ReplicaKey, traits: Traits) -> None:
        """The engine at `key` has told its settings."""
        if key in self.directory.replicas:
            self._traits[key] = traits
            if not self.directory.tells(key):
                self.beliefs.history.set_blocks(key, traits.num_blocks)
            self._serve(key)

    def routed(
        self, model: Model, request: RequestView, key: ReplicaKey, resident_tokens: int, now: float, ttft_s: float = 0.0
    ) -> None:
        """`request` goes to `key`, which is believed to cache so many of its prompt tokens and promises its first token in
        `ttft_s` seconds (0: nobody has asked)."""
        self.beliefs.routed(key, model.id, request, resident_tokens, now, tells=self.directory.tells(key), ttft_s=ttft_s)

    def send(
        self,
        model: Model,
        request: RequestView,
        now: float,
        *,
        subset: Subset | None = None,
        comparable: Collection[ReplicaKey] | None = None,
        answers: int = 1,
    ) -> Sent | None:
        """Pick a replica for `request` and book it there. None: no replica may be picked. See `Slates.of` for the arguments, and
        `Bookings.book`."""
        made = self.picks.of(model, request, now, subset=subset, comparable=comparable, answers=answers)
        if made is None:
            return None
        choice, booking = made
        sent = Sent(choice, booking) if booking is not None else Sent(choice, *self._book(told(choice), request, now, answers))
        self.sent(model, request, sent, now)
        return sent

    def sent(self, model: Model, request: RequestView, sent: Sent, now: float) -> None:
        """`request` was picked for and booked."""
        self.slates.picked(model)
        self.routed(model, request, sent.booking.key, sent.choice.resident_tokens, now, sent.choice.ttft_s)

    def _book(self, choice: Choice, request: RequestView, now: float, answers: int) -> tuple[Booking, Booking | None]:
        """The bookings of the pick, and of the replica that computes the prompt for it if there is one."""
        if choice.hop is None:
            return self.book(request, choice.key, choice.resident_tokens, now, answers=answers), None
        prefill = key_of(choice.hop.replica), choice.hop.fresh_tokens
        return self.book_pair(request, choice.key, choice.resident_tokens, prefill, now, answers=answers)

    def book(self, request: RequestView, key: ReplicaKey, resident_tokens: int, now: float, *, answers: int = 1) -> Booking:
        """A booking of `request` at `key`, which computes all but `resident_tokens` of it; what it then caches counts at once."""
        fresh = request.prompt_tokens - resident_tokens + request.encoder_tokens(resident_tokens)
        booking = self.bookings.book(request.id, key, fresh, now, answers=answers)
        self._places.sent(key)
        if len(request.prompts) == 1 and self.directory.tells(key):  # of others `beliefs` takes the same for granted
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
        self._places.sent(key)
        self._places.sent(prefill_key)
        return booked

    # --- what replicas say ---

    def reported(
        self, key: ReplicaKey, report: LoadReport | Said, now: float, asked_at: float | None = None, *, in_header: bool = False
    ) -> None:
        """A load report of `key`, received at `now`; a poll says when it asked. `in_header`: a short one, without adapters."""
        if key not in self.directory.replicas:
            return
        if self.reports.observe(key, report, now):
            self.restarted(key)
        self.bookings.reported(key, report.epoch, report.seq, now if asked_at is None else asked_at)
        if self.outliers.records:
            self.outliers.heard(key, now)
            self._stand(key)
        heard = self.reports.get(key)
        if heard is not None and heard.newest is report and (place := self._places.at(key)) is not None:
            place.columns.heard(place.row, heard)
        if in_header or heard is None or heard.newest.epoch != report.epoch or not isinstance(report, LoadReport):
            return
        if self._loaded.said(key, report.seq, report.adapters):
            self._serve(key)

    def ours(self, key: ReplicaKey) -> bool:
        """Whether `key` has an engine of ours."""
        return self.engine(key) == "penstock"

    def usual_responses(self, reader: ReportReader | None) -> UsualResponses | None:
        """What takes in usual responses, whose reports `reader` reads; None: there is no such thing in Python."""
        if self.compiled is None or reader is None:
            return None
        known = self.reports.heard, self.outliers.records
        return self.compiled.Responses(self.bookings, reader, *known, self.ours, headers.LOADS)

    def mute(self, key: ReplicaKey) -> None:
        """Record that `key` answered its load poll with something else, so that its adapters stay unknown."""
        if key in self.directory.replicas and self._loaded.mute(key):
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
        if (place := self._places.at(key)) is not None:
            place.columns.trust_again(place.row)

    def events_lost(self, key: ReplicaKey) -> None:
        """Block events of `key` are gone for good: what it stores from now on is all that counts."""
        if key in self.directory.replicas:
            self._clear(key)
            self.residency.set_knowledge(key, Knowledge.PARTIAL)

    def events_complete(self, key: ReplicaKey) -> None:
        """The block events of `key` are complete."""
        if key in self.directory.replicas:
            self.residency.set_knowledge(key, Knowledge.EXACT)

    def event(self, key: ReplicaKey, event: Event, now: float) -> None:
        """One event of the stream of `key`."""
        if key not in self.directory.replicas:
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
            self._places.sent(key)  # by another gateway or none, and to be counted among the replicas' arrivals now at the latest
        if event.ttft_s:
            counts = self.ttft_counts.setdefault(self.directory.replicas[key].pool, [0] * (len(LATENCY_EDGES_S) + 1))
            counts[bisect_left(LATENCY_EDGES_S, event.ttft_s)] += 1
        prediction = self.beliefs.finished(key, event)
        if (place := self._places.at(key)) is not None and event.output_tokens:
            place.columns.finished(event.output_tokens)
            if prediction is not None and prediction.times(event):
                place.columns.first_token(place.row, prediction.ttft_s, event.ttft_s)

    def correction(self, key: ReplicaKey) -> float:
        """Return the factor on the times that `key` promises."""
        place = self._places.at(key)
        return 1.0 if place is None else float(place.columns.figures.correction[place.row])

    def unreachable(self, key: ReplicaKey, now: float) -> None:
        """`key` could not be connected to, or gave no answer."""
        if key in self.directory.replicas:
            self.outliers.unreachable(key, now)
            self._stand(key)

    def refused(self, key: ReplicaKey, now: float) -> None:
        """`key` would not take a request, and says so."""
        if key in self.directory.replicas:
            self.outliers.refused(key, now)
            self._stand(key)

    def answered(self, key: ReplicaKey, now: float, *, error: bool) -> None:
        """`key` answered a request; `error`: with a failure of its own."""
        if key in self.directory.replicas and (error or self.outliers.records):
            (self.outliers.error if error else self.outliers.answered)(key, now)
            self._stand(key)

    def _stand(self, key: ReplicaKey) -> None:
        if (place := self._places.at(key)) is not None:
            place.columns.stand(place.row, self.outliers.standing(key))

    def _serve(self, key: ReplicaKey) -> None:
        """Update the adapters of `key`. Other engines do not report them. A Penstock engine with events will, and has none until
        then."""
        if (place := self._places.at(key)) is not None:
            unsaid = () if self.directory.tells(key) else None
            place.columns.serves(place.row, self._loaded.at(key, unsaid) if self.ours(key) else None)

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
