"""Routers: the gateway's own decision core, or an oracle that sees into the replicas."""

from collections.abc import Sequence
from typing import Protocol

from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.picker.bookings import Booking
from penstock.gateway.picker.candidates import key_of
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.picker.state import FleetState
from penstock.sim.feed import TalkingReplica
from penstock.sim.replica import SimReplica
from penstock.sim.traces import TraceRequest

POOL = "sim/m/p"
POLL_S = 1.0
"""Seconds between polls, as in `penstock.gateway.load.poller`."""


class Router(Protocol):
    """Decides, and learns."""

    def route(self, request: TraceRequest, now: float) -> int:
        """The number of the replica that `request` goes to."""
        ...

    def sent(self, request: TraceRequest, replica: int, report: LoadReport, now: float) -> None:
        """Record that the request went to the replica and that the response headers came with `report`."""
        ...

    def learn(self, now: float) -> None:
        """Takes in what the replicas have said and what has reached it by now."""
        ...


class GatewayRouter:
    """`FleetState`, `choose` and bookings as in `penstock gateway`, in virtual time.

    Args:
        replicas: Whose streams it reads.
        policy: See `penstock.gateway.picker.policies`.
        block_size: Tokens in a block of the trace.
        latency_s: From what a replica says to where it counts.
        seed: Stands in every replica's name, by which lots are drawn.
    """

    def __init__(
        self, replicas: Sequence[TalkingReplica], policy: str, block_size: int, latency_s: float = 0.002, seed: int = 0
    ) -> None:
        self._replicas = replicas
        self._latency_s = latency_s
        self._block_size = block_size
        self._booking: Booking | None = None
        self._model = Model(id="sim/m", served_names=["m"], policy=policy)
        self.state = FleetState()
        members = [_replica(number, seed) for number in range(len(replicas))]
        self._keys = [key_of(member) for member in members]
        self._numbers = {key: number for number, key in enumerate(self._keys)}
        self.state.update(Fleet(models=[self._model], pools=[Pool(id=POOL, model=self._model.id)], replicas=members))
        for key, replica in zip(self._keys, replicas, strict=True):
            self.state.reported(key, replica.report(0.0), 0.0)

    def route(self, request: TraceRequest, now: float) -> int:
        """The number of the replica that `request` goes to."""
        view = RequestView(
            id=str(request.number),
            path="/v1/completions",
            model="m",
            prompts=(Prompt(request.prompt_tokens, request.blocks),),
            block_size=self._block_size,
        )
        sent = self.state.send(self._model, view, now)
        assert sent is not None, "a fleet whose replicas are all ready"
        self._booking = sent.booking
        return self._numbers[sent.booking.key]

    def correction(self, replica: int) -> float:
        """Return the factor on the times that a replica promises."""
        return self.state.correction(self._keys[replica])

    def sent(self, request: TraceRequest, replica: int, report: LoadReport, now: float) -> None:
        """Record that the request went to the replica and that the response headers came with `report`."""
        assert self._booking is not None
        self.state.bookings.responded(self._booking, (report.epoch, report.seq), now)
        self.state.reported(self._keys[replica], report, now)

    def learn(self, now: float) -> None:
        """Takes in what the replicas have said and what has reached it by now."""
        for key, replica in zip(self._keys, self._replicas, strict=True):
            stream = replica.stream
            while stream and stream[0].at + self._latency_s <= now:
                said = stream.popleft()
                self.state.event(key, said.event, said.at + self._latency_s)
        for key in self.state.reports.silent(self._keys, now, POLL_S):  # an idle replica is asked
            self.state.reported(key, self._replicas[self._numbers[key]].report(now), now)


class OracleRouter:
    """Sees what every replica really caches, what it still has to compute and which answers end when: the least time to the first
    token. Nothing reaches it late."""

    def __init__(self, replicas: Sequence[TalkingReplica]) -> None:
        self._replicas = [replica.sim for replica in replicas]
        self._fresh: dict[int, int] = {}
        """Tokens to compute of each request, by number, given all that was sent there before."""

    def route(self, request: TraceRequest, now: float) -> int:
        """The number of the replica that `request` goes to."""
        costs = [self._ttft_s(request, replica, now) for replica in self._replicas]
        best = min(range(len(costs)), key=lambda number: costs[number])
        self._fresh[request.number] = self._tokens(request, self._replicas[best])
        return best

    def _tokens(self, request: TraceRequest, replica: SimReplica) -> int:
        """Tokens that `replica` would compute: neither cached nor about to be."""
        coming = {block for other in (*replica.prefilling, *replica.waiting) for block in other.request.blocks}
        usable = request.blocks[: (request.prompt_tokens - 1) // replica.block_size]
        depth = next((at for at, b in enumerate(usable) if b not in coming and not replica.pool.has(b)), len(usable))
        return request.prompt_tokens - depth * replica.block_size

    def _ttft_s(self, request: TraceRequest, replica: SimReplica, now: float) -> float:
        time, config, rows = replica.config.time, replica.config, len(replica.decoding)
        todo = self._tokens(request, replica)
        todo += sum(running.known - running.computed for running in replica.prefilling)
        todo += sum(self._fresh[running.request.number] for running in replica.waiting)
        step = time.steps(1, prefill=0, rows=rows, context=replica.context)
        steps = -(-todo // max(config.max_num_batched_tokens - rows, 1))
        seconds = max(replica.now - now, 0.0) + todo * time.prefill_token_s + steps * step
        return seconds + replica.ticks_until_room(request) * step

    def sent(self, request: TraceRequest, replica: int, report: LoadReport, now: float) -> None:
        """Record that the request went to the replica and that the response headers came with `report`."""

    def learn(self, now: float) -> None:
        """See `Router`: it knows all already."""


def _replica(number: int, seed: int) -> Replica:
    return Replica(
        uid=f"sim-{seed}-{number}",
        name=f"sim-{number}",
        pool=POOL,
        host=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
        port=8000,
        events_port=1,
        replay_port=2,
        ready=True,
    )
