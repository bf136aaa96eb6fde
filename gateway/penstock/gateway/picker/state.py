"""All that a gateway process knows of the fleet: what discovery says, what replicas report, what they cache and what was sent to
them. No I/O; time is an argument (monotonic seconds)."""

from collections.abc import Collection

import msgspec

from penstock.api.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, RequestFinished
from penstock.api.fleet import Fleet, Model, Pool, PoolLoad, PoolsView, Replica, ReplicaLoad
from penstock.api.load_report import LoadReport
from penstock.gateway.load.reports import ReportStore
from penstock.gateway.picker.bookings import Bookings, State
from penstock.gateway.picker.candidates import Candidate, Rejected, ReplicaKey, eligible, key_of
from penstock.gateway.picker.request import RequestView
from penstock.gateway.picker.subset import Subset
from penstock.gateway.residency.index import ResidencyIndex

SUSPECT_S = 2.0
"""How long a replica that failed to answer is a last resort; each poll or request that it answers ends that."""


class FleetChange(msgspec.Struct, frozen=True):
    """What a new fleet changed."""

    added: list[Replica]
    removed: list[ReplicaKey]


class FleetState:
    """The picker's view of the world."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.version = 0
        """Rises when replicas change or a hold begins: what must wake an autoscaler."""
        self.reports = ReportStore()
        self.residency = ResidencyIndex()
        self.bookings = Bookings()
        self.held: dict[str, int] = {}
        """Requests held by model id."""
        self._replicas: dict[ReplicaKey, Replica] = {}
        self._by_endpoint: dict[str, ReplicaKey] = {}
        self._by_model: dict[str, list[Replica]] = {}
        self._models: dict[str, Model] = {}
        self._suspect_until: dict[ReplicaKey, float] = {}
        self._turns: dict[str, int] = {}

    def update(self, fleet: Fleet) -> FleetChange:
        """Takes in what discovery sees now."""
        replicas = {key_of(replica): replica for replica in fleet.replicas}
        change = FleetChange(
            added=[replica for key, replica in replicas.items() if key not in self._replicas],
            removed=[key for key in self._replicas if key not in replicas],
        )
        for key in change.removed:
            self.bookings.release_all(key, "replica_gone")
            self.residency.drop(key)
            self.reports.drop(key)
            self._suspect_until.pop(key, None)
        if replicas != self._replicas:
            self.version += 1
        self.fleet, self._replicas = fleet, replicas
        # A terminating replica's address may have been given to a new one already: the new one owns it.
        order = sorted(replicas.items(), key=lambda item: not item[1].terminating)
        self._by_endpoint = {replica.endpoint: key for key, replica in order}
        self._models = {name: model for model in fleet.models for name in model.served_names}
        model_of = {pool.id: pool.model for pool in fleet.pools if _takes_requests(pool)}
        self._by_model = {}
        for replica in fleet.replicas:
            if replica.pool in model_of:
                self._by_model.setdefault(model_of[replica.pool], []).append(replica)
        return change

    @property
    def served_names(self) -> dict[str, Model]:
        """Every name that clients may put in `model`, with the model that owns it."""
        return self._models

    def model(self, name: str) -> Model | None:
        """The model that a client's `model` names."""
        return self._models.get(name)

    def replicas(self) -> dict[ReplicaKey, Replica]:
        """All replicas."""
        return self._replicas

    def replicas_of(self, model: Model) -> list[Replica]:
        """The replicas that requests for `model` may go to, ready or not."""
        return self._by_model.get(model.id, [])

    def key_at(self, endpoint: str) -> ReplicaKey | None:
        """The replica at an `ip:port`."""
        return self._by_endpoint.get(endpoint)

    def turn(self, model: Model) -> int:
        """Counts the picks of a model."""
        turn = self._turns.get(model.id, 0)
        self._turns[model.id] = turn + 1
        return turn

    # --- what replicas say ---

    def reported(self, key: ReplicaKey, report: LoadReport, now: float, asked_at: float | None = None) -> None:
        """A load report of `key`, received at `now`; a poll says when it asked."""
        if key not in self._replicas:
            return
        if self.reports.observe(key, report, now):
            self.restarted(key)
        self.bookings.reported(key, report.epoch, report.seq, now if asked_at is None else asked_at)
        self._suspect_until.pop(key, None)

    def restarted(self, key: ReplicaKey) -> None:
        """`key` is a new process: what the old one ran and cached is gone."""
        self.bookings.release_all(key, "new_epoch")
        self.residency.clear(key)

    def event(self, key: ReplicaKey, event: Event, now: float) -> None:
        """One event of the stream of `key`."""
        if key not in self._replicas:
            return
        match event:
            case BlockStored():
                self.residency.store(key, event.block_hashes)
            case BlockRemoved():
                self.residency.remove(key, event.block_hashes)
            case AllBlocksCleared():
                self.residency.clear(key)
            case RequestFinished():
                self.bookings.finished(key, event.request_id)
            case LoadReport():
                self.reported(key, event, now)

    def suspect(self, key: ReplicaKey, now: float) -> None:
        """A request sent to `key` was answered by another replica, or by none."""
        if key in self._replicas:
            self._suspect_until[key] = now + SUSPECT_S

    # --- what the picker asks ---

    def candidates(
        self,
        model: Model,
        request: RequestView,
        now: float,
        *,
        subset: Subset | None = None,
        excluded: Collection[ReplicaKey] = (),
        comparable: Collection[ReplicaKey] | None = None,
    ) -> tuple[list[Candidate], list[Rejected]]:
        """Those that may be picked for `request`, and the others with reasons.

        Args:
            model: The model that the request names.
            request: The request.
            now: The moment of the pick.
            subset: The gateway's restriction; None where it made none.
            excluded: Replicas that this request must not go to.
            comparable: Replicas whose hash space is that of the request's hashes; residency elsewhere says nothing. None: all.
        """
        allowed, rejected = eligible(self.replicas_of(model), subset=subset, excluded=excluded)
        resident = self._resident_tokens(request)
        candidates = [self._candidate(replica, now, resident, comparable) for replica in allowed]
        return candidates, rejected

    def _candidate(
        self, replica: Replica, now: float, resident: dict[ReplicaKey, int], comparable: Collection[ReplicaKey] | None
    ) -> Candidate:
        key = key_of(replica)
        heard = self.reports.get(key)
        return Candidate(
            key=key,
            name=replica.name,
            pool=replica.pool,
            endpoint=replica.endpoint,
            report=heard.report if heard else None,
            report_age_s=now - heard.at if heard else 0.0,
            booked=self.bookings.outstanding(key),
            resident_tokens=resident.get(key, 0) if comparable is None or key in comparable else 0,
            suspect=self._suspect_until.get(key, now) > now,
        )

    def _resident_tokens(self, request: RequestView) -> dict[ReplicaKey, int]:
        """Prompt tokens that each replica's cache would supply: whole blocks, without the last token."""
        tokens: dict[ReplicaKey, int] = {}
        for prompt in request.prompts:
            for key, depth in self.residency.longest_prefix(prompt.block_hashes).items():
                blocks = min(depth, (prompt.tokens - 1) // request.block_size)
                tokens[key] = tokens.get(key, 0) + blocks * request.block_size
        return tokens

    # --- what the autoscaler asks ---

    def hold_began(self, model: Model) -> None:
        """A request waits for a replica of `model`."""
        self.held[model.id] = self.held.get(model.id, 0) + 1
        self.version += 1

    def hold_ended(self, model: Model) -> None:
        """A held request was routed, refused or given up."""
        self.held[model.id] -= 1
        if not self.held[model.id]:
            del self.held[model.id]

    def pools(self, gateway: str, now: float) -> PoolsView:
        """The pooled load. Held requests belong to a model: its first pool shows them."""
        by_pool: dict[str, list[ReplicaLoad]] = {pool.id: [] for pool in self.fleet.pools}
        for key, replica in self._replicas.items():
            if replica.pool in by_pool:
                by_pool[replica.pool].append(self._load(key, replica, now))
        held = dict(self.held)
        loads = [
            PoolLoad(
                id=pool.id,
                model=pool.model,
                held=held.pop(pool.model, 0) if _takes_requests(pool) else 0,
                replicas=by_pool[pool.id],
            )
            for pool in self.fleet.pools
        ]
        return PoolsView(gateway=gateway, version=self.version, pools=loads)

    def _load(self, key: ReplicaKey, replica: Replica, now: float) -> ReplicaLoad:
        heard = self.reports.get(key)
        return ReplicaLoad(
            uid=replica.uid,
            name=replica.name,
            port=replica.port,
            ready=replica.ready and not replica.terminating,
            cordoned=replica.cordoned,
            report=heard.report if heard else None,
            report_age_s=now - heard.at if heard else None,
            pending=self.bookings.count(key, State.PENDING),
            in_flight=self.bookings.count(key),
        )


def _takes_requests(pool: Pool) -> bool:
    """A prefill pool gets no whole requests; a decode pool can prefill too."""
    return pool.role != "Prefill"
