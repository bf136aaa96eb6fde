"""What a simulated replica says of itself, as the engine says it: block events with every step, load reports on change and at
most every 50 ms, and a report on each response."""

from collections import deque

import msgspec

from penstock.api.events import BlockRemoved, BlockStored, Event, RequestFinished
from penstock.api.load_report import LoadReport
from penstock.engine.core.measure.load import LoadMeter
from penstock.sim.replica import ReplicaConfig, Running, SimReplica, StepReport
from penstock.sim.traces import TraceRequest

REPORT_EVERY_S = 0.05


class Said(msgspec.Struct, frozen=True):
    """An event on its way."""

    at: float
    """When it was sent."""
    event: Event


class TalkingReplica:
    """A replica with its event stream.

    Args:
        config: The replica's configuration.
        block_size: Tokens in a block of the trace.
        boast: Factor by which it overstates its prefill speed.
    """

    def __init__(self, config: ReplicaConfig, block_size: int, boast: float = 1.0) -> None:
        self.sim = SimReplica(config, block_size, self._stepped, self._done)
        self.stream: deque[Said] = deque()
        """Events that are sent and not read yet. A reader takes from the left."""
        self.finished: list[Running] = []
        self._meter = LoadMeter()
        self._boast = boast
        self._seq = 0
        self._reported_at = -REPORT_EVERY_S
        self._changed = False

    def submit(self, request: TraceRequest, at: float) -> LoadReport:
        """A request arrives; the report is the one on its response headers, which includes it."""
        self.sim.submit(request, at)
        self._changed = True
        return self.report(at)

    def advance(self, until: float) -> None:
        """Lets the replica work until then."""
        self.sim.advance(until)
        if self._changed and self._reported_at + REPORT_EVERY_S <= until:
            self._say(max(self.sim.now, self._reported_at + REPORT_EVERY_S))

    def _stepped(self, step: StepReport) -> None:
        self._meter.observe(
            step.end, seconds=step.seconds, prefill_tokens=step.prefill_tokens, sampled_tokens=step.sampled_tokens
        )
        pool = self.sim.pool
        if pool.removed:
            self.stream.append(Said(step.end, BlockRemoved(pool.removed)))
            pool.removed = []
        if pool.stored:
            self.stream.append(Said(step.end, BlockStored(pool.stored)))
            pool.stored = []
        self._changed = True
        if step.end - self._reported_at >= REPORT_EVERY_S:
            self._say(step.end)

    def _done(self, running: Running) -> None:
        self.finished.append(running)
        request = running.request
        event = RequestFinished(
            request_id=str(request.number),
            reason="length",
            prompt_tokens=request.prompt_tokens,
            cached_tokens=running.hit_tokens,
            output_tokens=request.output_tokens,
            ttft_s=running.first_token - running.arrived,
        )
        self.stream.append(Said(running.finished, event))

    def _say(self, at: float) -> None:
        self._reported_at, self._changed = at, False
        self.stream.append(Said(at, self.report(at)))

    def report(self, at: float) -> LoadReport:
        """Return its present load."""
        self._seq += 1
        sim, pool, meter = self.sim, self.sim.pool, self._meter
        return LoadReport(
            epoch=1,
            seq=self._seq,
            num_requests_running=sim.rows,
            num_requests_waiting={"capacity": len(sim.waiting)} if sim.waiting else {},
            max_num_seqs=sim.config.max_num_seqs,
            kv_cache_usage_perc=pool.used / pool.capacity,
            kv_blocks_total=pool.capacity,
            kv_blocks_reclaimable=pool.free,
            prefill_backlog_tokens=sim.backlog,
            prefill_tokens_per_s=meter.prefill_tokens_per_s * self._boast,
            decode_step_s=meter.decode_step_s,
            prompt_tokens_per_s=meter.prompt_tokens_per_s(at),
            generation_tokens_per_s=meter.generation_tokens_per_s(at),
        )
