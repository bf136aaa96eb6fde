"""One replica in virtual time: continuous batching with chunked prefill over a prefix-cached KV pool.

It does what `penstock.engine.core.scheduling` does, by counts alone: decodes first, then running prefills, then the queue, under
one token budget; admission wants room for the whole known sequence; whoever finds no block preempts the last that came. Steps
that only decode are taken many at a time.
"""

import heapq
from collections import deque
from collections.abc import Callable

import msgspec

from penstock.sim.cache import KVPool
from penstock.sim.timing import StepTime
from penstock.sim.traces import TraceRequest


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's size; the default is an 8B model on one H100."""

    time: StepTime = StepTime()
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 4096
    kv_tokens: int = 400_000
    watermark: float = 0.01


class Running(msgspec.Struct, eq=False):
    """A request at a replica, and what became of it."""

    request: TraceRequest
    arrived: float
    known: int
    """Tokens of the prompt and of the answer so far, when it last began to compute."""
    computed: int = 0
    produced: int = 0
    """Output tokens until then."""
    tick: int = 0
    """Tick of the replica's decode clock at which this request began to decode."""
    hit_tokens: int = 0
    named: list[bytes] = []
    nameless: int = 0
    first_token: float = 0.0
    finished: float = 0.0
    preemptions: int = 0


class StepReport(msgspec.Struct, frozen=True):
    """What a step, or several alike, did."""

    end: float
    seconds: float
    """Seconds of one step."""
    prefill_tokens: int
    sampled_tokens: int


class SimReplica:
    """See the module. Its clock stands at the end of its last step.

    Args:
        config: Its size.
        block_size: Tokens in a block of the trace.
        stepped: Is told of every step, once its blocks, rows and queue are as it leaves them.
        done: Is told of every request that has ended.
    """

    def __init__(
        self,
        config: ReplicaConfig,
        block_size: int,
        stepped: Callable[[StepReport], None] = lambda step: None,
        done: Callable[[Running], None] = lambda running: None,
    ) -> None:
        self.config = config
        self.block_size = block_size
        self.pool = KVPool(config.kv_tokens // block_size)
        self.now = 0.0
        self.waiting: deque[Running] = deque()
        self.prefilling: list[Running] = []
        self.decoding: dict[int, Running] = {}
        """Decoding requests by number, in the order of admission to decoding."""
        self.context = 0
        """Tokens of context of all rows that decode."""
        self.preemptions = 0
        self._stepped, self._done = stepped, done
        self._ticks = 0
        self._ends: list[tuple[int, int, Running]] = []
        self._crossings: list[tuple[int, int, Running]] = []

    @property
    def rows(self) -> int:
        """Requests that run."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def backlog(self) -> int:
        """Tokens known and not computed: of running prefills, and of all that waits whatever is cached of it."""
        return sum(r.known - r.computed for r in self.prefilling) + sum(r.known for r in self.waiting)

    def ticks_until_room(self, request: TraceRequest) -> int:
        """Return the decode steps until `request` finds its blocks and a row, after the waiting requests."""
        short = sum(self._blocks(r.known) for r in self.waiting) + self._blocks(request.prompt_tokens) - self.pool.free
        crowd = self.rows + len(self.waiting) + 1 - self.config.max_num_seqs
        if short <= 0 and crowd <= 0:
            return 0
        for tick, _, running in sorted(self._ends, key=lambda end: end[0]):
            short -= running.nameless
            crowd -= 1
            if short <= 0 and crowd <= 0:
                return max(tick - self._ticks, 0)
        return max(self._ends[-1][0] - self._ticks, 0) if self._ends else 0

    def submit(self, request: TraceRequest, at: float) -> None:
        """A request arrives, not before the last `advance`.

        Raises:
            ValueError: It would not fit even alone.
        """
        if self._blocks(request.prompt_tokens + request.output_tokens) > self.pool.capacity:
            raise ValueError(f"request {request.number} of {request.prompt_tokens} tokens is longer than the KV cache")
        self.waiting.append(Running(request, at, request.prompt_tokens))

    def advance(self, until: float) -> None:
        """Takes all steps that end by then."""
        while True:
            if not self.rows:
                if not self.waiting or self.waiting[0].arrived > until:
                    return
                self.now = max(self.now, self.waiting[0].arrived)
            if not self._step(until):
                return

    def _step(self, until: float) -> bool:
        """One step, or several that only decode; False where none ends by `until`."""
        if self.prefilling or (self.waiting and self.waiting[0].arrived <= self.now and self._fits(self.waiting[0])):
            return self._mixed(until)
        return self._decode(until)

    def _mixed(self, until: float) -> bool:
        rows, context = len(self.decoding), self.context
        budget = self.config.max_num_batched_tokens - rows
        # What a step takes is known before it begins, but whether it ends in time only then: the plan is made twice.
        planned = self._plan(budget)
        prefill = sum(count for _, count in planned)
        seconds = self.config.time.steps(1, prefill=prefill, rows=rows, context=context)
        if self.now + seconds > until:
            return False
        if rows:
            self._tick(1)
        prefill = sum(self._compute(running, count) for running, count in planned)
        begun = self.now
        self.now += self.config.time.steps(1, prefill=prefill, rows=rows, context=context)
        sampled = rows + self._sample_prefilled()
        self._finish()
        self._stepped(StepReport(self.now, self.now - begun, prefill, sampled))
        return True

    def _plan(self, budget: int) -> list[tuple[Running, int]]:
        """Chunks for this step: running prefills first, then those that are admitted, whose chunk is what the cache leaves."""
        planned: list[tuple[Running, int]] = []
        for running in self.prefilling:
            count = min(running.known - running.computed, max(budget, 0))
            budget -= count
            if count:
                planned.append((running, count))
        while self.waiting and budget > 0 and self.waiting[0].arrived <= self.now and self._fits(self.waiting[0]):
            running = self._admit()
            count = min(running.known - running.computed, budget)
            budget -= count
            planned.append((running, count))
        return planned

    def _hit(self, running: Running) -> int:
        """Leading blocks of its prompt that are cached; never all tokens, since the last one gives the logits."""
        usable = (running.known - 1) // self.block_size
        return min(self.pool.depth(running.request.blocks[:usable]), usable)

    def _fits(self, running: Running) -> bool:
        if self.rows >= self.config.max_num_seqs:
            return False
        hit = self._hit(running)
        owed = sum(self._blocks(r.known) - self._held(r) for r in self.prefilling)
        needed = owed + self._blocks(running.known) - hit + self.pool.idle_among(running.request.blocks[:hit])
        watermark = int(self.config.watermark * self.pool.capacity) + 1 if self.rows else 0
        return needed + watermark <= self.pool.free

    def _admit(self) -> Running:
        running = self.waiting.popleft()
        hit = self._hit(running)
        running.named = list(running.request.blocks[:hit])
        self.pool.adopt(running.named)
        running.computed = hit * self.block_size
        if not running.preemptions:
            running.hit_tokens = running.computed
        self.prefilling.append(running)
        return running

    def _compute(self, running: Running, count: int) -> int:
        """Computes a chunk; 0 where the request has lost its place meanwhile."""
        if running not in self.prefilling or not self._grow(running, running.computed + count):
            return 0
        running.computed += count
        self._publish(running)
        return count

    def _publish(self, running: Running) -> None:
        """Names the full blocks of the prompt."""
        blocks = running.request.blocks
        upto = min(running.computed // self.block_size, len(blocks))
        for block in blocks[len(running.named) : upto]:
            self.pool.publish(block)
            running.named.append(block)
            running.nameless -= 1

    def _sample_prefilled(self) -> int:
        """The first token of those whose prompts are computed."""
        ready = [running for running in self.prefilling if running.computed >= running.known]
        for running in ready:
            self.prefilling.remove(running)
            running.first_token = running.first_token or self.now
            running.produced += 1
            running.tick = self._ticks
            self.decoding[running.request.number] = running
            self.context += running.known
            left = running.request.output_tokens - running.produced
            heapq.heappush(self._ends, (self._ticks + left, running.request.number, running))
            self._await_crossing(running, running.known)
        return len(ready)

    def _await_crossing(self, running: Running, length: int) -> None:
        """The sequence has `length` tokens in its blocks; it needs a block when those it holds are full."""
        room = self._held(running) * self.block_size - length
        heapq.heappush(self._crossings, (self._ticks + room + 1, running.request.number, running))

    def _decode(self, until: float) -> bool:
        rows = len(self.decoding)
        bound = self._ends[0][0] - self._ticks
        if self._crossings:
            bound = min(bound, max(self._crossings[0][0] - self._ticks, 1))
        fitting, context = self.config.time.fitting, self.context
        count = fitting(until - self.now, rows=rows, context=context, most=bound)
        arrival = self.waiting[0].arrived if self.waiting else self.now
        if arrival > self.now:  # the step during which it comes is the last before it is looked at
            count = min(count, fitting(arrival - self.now, rows=rows, context=context, most=bound) + 1)
        if count < 1:
            return False
        before = self.now
        self.now += self.config.time.steps(count, prefill=0, rows=rows, context=self.context)
        self._tick(count)
        self._finish()
        self._stepped(StepReport(self.now, (self.now - before) / count, 0, rows * count))
        return True

    def _tick(self, count: int) -> None:
        """Every row that decodes is `count` tokens longer; those that need a block get one, if need be at another's cost."""
        self._ticks += count
        self.context += count * len(self.decoding)
        while self._crossings and self._crossings[0][0] <= self._ticks:
            _, _, running = heapq.heappop(self._crossings)
            if self.decoding.get(running.request.number) is running:
                length = running.known + self._ticks - running.tick
                if self._grow(running, length):
                    self._await_crossing(running, length)

    def _grow(self, running: Running, length: int) -> bool:
        """Blocks for `length` tokens, at the cost of those that came last; False: at its own."""
        missing = self._blocks(length) - self._held(running)
        while not self.pool.take(missing):
            victim = self.prefilling[-1] if self.prefilling else next(reversed(self.decoding.values()))
            self._preempt(victim)
            if victim is running:
                return False
        running.nameless += missing
        return True

    def _preempt(self, running: Running) -> None:
        self.preemptions += 1
        running.preemptions += 1
        if running.request.number in self.decoding:
            self._leave(running)
            running.produced -= 1  # of the step that could not be planned with it
        else:
            self.prefilling.remove(running)
        self._release(running)
        running.known = running.request.prompt_tokens + running.produced
        running.computed = 0
        self.waiting.appendleft(running)

    def _finish(self) -> None:
        while self._ends and self._ends[0][0] <= self._ticks:
            _, _, running = heapq.heappop(self._ends)
            # One that was preempted stands in the heap twice: only its latest stay counts.
            if self.decoding.get(running.request.number) is running and self._produced(running) >= running.request.output_tokens:
                self._leave(running)
                self._release(running)
                running.finished = self.now
                self._done(running)

    def _leave(self, running: Running) -> None:
        """A row ends its decoding."""
        del self.decoding[running.request.number]
        grown = self._ticks - running.tick
        self.context -= running.known + grown
        running.produced += grown

    def _produced(self, running: Running) -> int:
        return running.produced + self._ticks - running.tick

    def _release(self, running: Running) -> None:
        self.pool.release(running.named, running.nameless)
        running.named, running.nameless = [], 0

    def _held(self, running: Running) -> int:
        return len(running.named) + running.nameless

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
