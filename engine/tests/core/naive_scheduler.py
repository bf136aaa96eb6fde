"""The scheduler as one would explain it: lists and sorting, one request at a time, nothing kept that can be worked out.

It has no prefix cache (nor windows), so blocks are only counted. What it decides, the real one must decide.
"""

from collections import deque
from dataclasses import dataclass, field
from math import ceil, inf

from fake_runner import next_token, repeats

from penstock.engine.config import EngineConfig
from penstock.engine.core.scheduling.pause import PauseState
from penstock.engine.messages import AddRequest, FinishReason


@dataclass(eq=False)
class Naive:
    """A request."""

    message: AddRequest
    ordinal: int
    tokens: list[int]
    state: str = "ready"  # ready, parked, running, ended
    reason: str = "capacity"
    started: bool = False
    stay: int = 0
    proposed: int = 0
    planned: int = 0
    computed: int = 0
    blocks: int = 0
    output: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple:
        return (self.message.priority, self.message.arrival_time, self.ordinal)

    @property
    def known(self) -> int:
        return len(self.tokens) + len(self.output)


class NaiveScheduler:
    def __init__(self, config: EngineConfig) -> None:
        self.config, self.limits = config, config.scheduler
        self.size, self.total = config.cache.block_size, config.cache.num_blocks - 1
        self.watermark = ceil(self.limits.watermark * config.cache.num_blocks)
        self.max_len = config.model.max_model_len
        self.requests: dict[int, Naive] = {}
        self.counters: dict[str, float] = {}
        self.last = ""
        self.blocked: set[int] = set()
        self.pause = PauseState.UNPAUSED
        self.flights: deque = deque()
        self.ends: dict[int, tuple] = {}
        self.count = 0

    # --- who is where ---

    def of(self, state: str, tenant: str | None = None) -> list[Naive]:
        found = [r for r in self.requests.values() if r.state == state and tenant in (None, r.message.tenant)]
        return sorted(found, key=lambda r: r.key)

    def free(self) -> int:
        return self.total - sum(r.blocks for r in self.requests.values())

    def weight(self, tenant: str) -> float:
        return self.limits.tenant_weights.get(tenant, 1.0)

    def reasons(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for r in [*self.of("ready"), *self.of("parked")]:
            name = "paused" if self.pause is not PauseState.UNPAUSED and r.reason == "capacity" else r.reason
            found[name] = found.get(name, 0) + 1
        return found

    # --- coming and going ---

    def ready(self, r: Naive) -> None:
        tenant = r.message.tenant
        if not self.of("ready", tenant) and not r.started:
            others = [self.counters.get(other.message.tenant, 0.0) for other in self.of("ready")]
            floor = min(others, default=self.counters.get(self.last, 0.0))
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), floor)
        r.state, r.reason = "ready", "capacity"

    def no_longer_ready(self, r: Naive, state: str) -> None:
        was_ready, r.state = r.state == "ready", state
        if was_ready and not self.of("ready", r.message.tenant):
            self.last = r.message.tenant

    def add(self, message: AddRequest) -> None:
        self.count += 1
        r = Naive(message, self.count, list(message.prompt_token_ids), state="new")
        self.requests[message.index] = r
        self.ready(r)
        if message.input_complete and not self.accept(r):
            return
        rows = self.limits.max_num_seqs - len(self.of("running"))
        everybody = [*self.of("ready"), *self.of("parked")]
        if len(everybody) - rows > self.limits.max_num_waiting:
            tenants = [other.message.tenant for other in everybody]
            load = {tenant: tenants.count(tenant) / self.weight(tenant) for tenant in tenants}
            greedy = [tenant for tenant in load if load[tenant] == max(load.values())]
            fresh = [other for other in everybody if other.message.tenant in greedy and not other.started]
            victim = r if message.tenant in greedy or not fresh else max(fresh, key=lambda other: other.key)
            self.end(victim, FinishReason.ERROR, "tenant_queue_full" if len(load) > 1 else "queue_full")
        if r.state == "ready" and not message.input_complete:
            self.park(message.index, "streaming")

    def accept(self, r: Naive) -> bool:
        if not r.tokens or r.message.sampling.max_tokens < 1:
            self.end(r, FinishReason.ERROR)
        elif len(r.tokens) >= self.max_len:
            self.end(r, FinishReason.IGNORED)
        return r.state != "ended"

    def extend(self, index: int, tokens: list[int], last: bool) -> None:
        r = self.requests[index]
        r.tokens += tokens
        if last or len(r.tokens) >= self.max_len:
            self.unpark(index)

    def park(self, index: int, reason: str) -> None:
        r = self.requests[index]
        self.no_longer_ready(r, "parked")
        r.reason = reason

    def unpark(self, index: int) -> None:
        r = self.requests[index]
        if r.started or self.accept(r):
            self.ready(r)

    def end(self, r: Naive, reason: FinishReason, code: str | None = None) -> None:
        self.no_longer_ready(r, "ended")
        r.blocks = 0
        del self.requests[r.message.index]
        self.ends[r.message.index] = (reason, code, list(r.output))

    # --- the step ---

    def schedule(self, now: float, *, idle: bool) -> dict[int, tuple[int, bool]] | None:
        for r in sorted(self.requests.values(), key=lambda r: (r.message.deadline or inf, r.key)):
            if r.message.deadline is not None and r.message.deadline <= now:
                self.end(r, FinishReason.ERROR, "request_timeout" if r.started else "queue_timeout")
        if self.pause is PauseState.PAUSED_ALL:
            return None
        self.grants: dict[int, int] = {}
        self.budget, self.preempted = self.limits.max_num_batched_tokens, False
        self.decodes()
        owed = self.chunks()
        if not self.preempted and self.pause is PauseState.UNPAUSED:
            self.admissions(owed)
        return self.submit() if self.grants or idle else None

    def limit(self, r: Naive) -> int:
        return min(len(r.tokens) + r.message.sampling.max_tokens, self.max_len)

    def decodes(self) -> None:
        rows = [r for r in self.of("running") if r.planned - r.computed == 1 and r.planned < self.limit(r)][: self.budget]
        for r in rows:
            self.grant(r, 1)
        for r in rows:
            drafts = min(r.proposed, self.limit(r) - r.planned - 1, self.budget)
            self.grants[r.message.index] += drafts
            self.budget -= drafts
        for r in rows:
            if r.state == "running":
                drafts = self.grants[r.message.index] - 1
                if drafts and ceil((r.computed + 1 + drafts) / self.size) - r.blocks > self.free():
                    self.grants[r.message.index], self.budget, drafts = 1, self.budget + drafts, 0
                self.grow(r, r.computed + 1 + drafts)

    def chunks(self) -> int:
        owed = 0
        for r in [r for r in self.of("running") if r.planned - r.computed > 1]:
            if self.budget == 0:
                break
            if r.state == "running":
                count = self.chunk(r.planned - r.computed)
                if self.grow(r, r.computed + count):
                    self.grant(r, count)
                    owed += ceil(r.planned / self.size) - r.blocks
        return owed

    def admissions(self, owed: int) -> None:
        aside = []
        while ready := self.of("ready"):
            r = min(ready, key=lambda r: (r.message.priority, not r.started, self.counters.get(r.message.tenant, 0.0), r.key))
            running = len(self.of("running"))
            margin = self.watermark if running else 0
            if (
                running >= self.limits.max_num_seqs
                or self.budget < 1
                or (not self.limits.enable_chunked_prefill and r.known > self.budget)
                or ceil(r.known / self.size) + owed + margin > self.free()
            ):
                r.reason = "capacity"
                break
            if r.message.index in self.blocked:
                self.no_longer_ready(r, "aside")
                r.reason = "lora"
                aside.append(r)
                continue
            self.admit(r)
            owed += ceil(r.known / self.size) - r.blocks
        for r in aside:
            r.state = "ready"

    def admit(self, r: Naive) -> None:
        if not r.started:
            tenant = r.message.tenant
            self.counters[tenant] = self.counters.get(tenant, 0.0) + r.known / self.weight(tenant)
        self.no_longer_ready(r, "running")
        r.started, r.stay = True, r.stay + 1
        r.planned, r.computed, r.proposed = r.known, 0, 0
        count = self.chunk(r.known)
        r.blocks = ceil(count / self.size)
        self.grant(r, count)

    def chunk(self, gap: int) -> int:
        return min(gap, self.budget, self.limits.long_prefill_token_threshold or gap)

    def grant(self, r: Naive, count: int) -> None:
        self.grants[r.message.index] = count
        self.budget -= count

    def grow(self, r: Naive, num_tokens: int) -> bool:
        while ceil(num_tokens / self.size) - r.blocks > self.free():
            victim = self.of("running")[-1]
            self.budget += self.grants.pop(victim.message.index, 0)
            self.preempted = True
            victim.state, victim.reason, victim.blocks, victim.computed = "ready", "capacity", 0, 0
            if victim is r:
                return False
        r.blocks = max(r.blocks, ceil(num_tokens / self.size))
        return True

    def submit(self) -> dict[int, tuple[int, bool]]:
        plan, flight = {}, []
        for index, count in self.grants.items():
            r = self.requests[index]
            drafts = count - 1 if r.planned - r.computed == 1 else 0
            r.computed += count
            samples = r.computed == r.planned + drafts
            plan[index] = (count, samples)
            r.planned += drafts + samples
            if samples:
                r.proposed = self.limits.num_speculative_tokens
            flight.append((r, r.stay, samples, drafts))
        self.flights.append(flight)
        return plan

    def update(self, told: dict[int, tuple[int, int]]) -> None:
        """`told`: request → how many tokens it was given, and how many drafts it has."""
        for r, stay, samples, drafts in self.flights.popleft():
            if not samples or r.state != "running" or r.stay != stay:
                continue
            count, proposed = told[r.message.index]
            r.planned -= drafts + 1 - count
            r.computed -= drafts + 1 - count
            if not any(other is r for flight in self.flights for other, *_ in flight):
                r.proposed = proposed
            for _ in range(count):
                if r.state == "running":
                    self.take(r)

    def take(self, r: Naive) -> None:
        r.output.append(next_token([*r.tokens, *r.output]))
        tenant = r.message.tenant
        self.counters[tenant] = self.counters.get(tenant, 0.0) + 2.0 / self.weight(tenant)
        if r.output[-1] in r.message.sampling.stop_token_ids:
            self.end(r, FinishReason.STOP)
        elif r.known >= self.limit(r):
            self.end(r, FinishReason.LENGTH)
        elif repeats(r.output, r.message.sampling.repetition_detection):
            self.end(r, FinishReason.REPETITION)
