"""Who decides the size of a pool: Penstock's own policy, and the rules of Kubernetes' HPA and of Knative's KPA, to the letter.

Both rivals look at the requests that run or wait at a replica (concurrency), as they are set up for model servers.
"""

import math
from dataclasses import dataclass, field, replace

from penstock.operator.autoscale.bounds import Decision
from penstock.operator.autoscale.coldstart import Starting
from penstock.operator.autoscale.limits import Limits, ModelLimits, Settings
from penstock.operator.autoscale.policy import Memory, Observation, PoolMemory, PoolView, decide
from penstock.operator.autoscale.signals import PoolSignals, ReplicaSignal
from penstock.sim.elastic import Look
from penstock.sim.forecast import Surges


class PenstockScaler:
    """The operator's autoscaling policy, unchanged.

    Args:
        limits: The pool's limits.
        settings: Settings of the policy.
    """

    period_s = 5.0

    def __init__(self, limits: Limits, settings: Settings) -> None:
        self._limits, self._settings, self._memory = ModelLimits({"p": limits}), settings, Memory()
        self._starting = set[str]()

    def size(self, look: Look) -> int:
        """The size that the pool should have now."""
        return self._decide(look).replicas

    def _decide(self, look: Look) -> Decision:
        replicas = tuple(
            ReplicaSignal(member.name, True, False, member.requests, member.replica.report(look.now), 0.0)
            for member in look.ready
        )
        starting = tuple(Starting(look.now - member.created) for member in look.starting)
        started = tuple(member.ready_at - member.created for member in look.ready if member.name in self._starting)
        self._starting = {member.name for member in look.starting}
        view = PoolView(look.size, starting, PoolSignals(look.held, replicas), started)
        decisions, self._memory = decide(Observation(look.now, look.now, {"p": view}), self._limits, self._settings, self._memory)
        return decisions["p"]


class ForecastScaler(PenstockScaler):
    """The same, with as many spare replicas as have covered a share of the last hour's rises within a cold start.

    Args:
        limits: Of the pool, spare replicas aside.
        settings: How the policy behaves.
        share: Of the rises.
    """

    def __init__(self, limits: Limits, settings: Settings, share: float) -> None:
        super().__init__(limits, settings)
        self._own, self._share, self._surges = limits, share, Surges()

    def size(self, look: Look) -> int:
        """The size that the pool should have now."""
        pool = self._memory.pools.get("p", PoolMemory())
        rise = self._surges.rise(look.now, pool.cold_start.seconds, self._share)
        self._limits = ModelLimits({"p": replace(self._own, warm=round(rise))})
        decision = self._decide(look)
        self._surges = self._surges.observe(look.now, decision.inputs.get("demand", 0.0))
        return decision.replicas


@dataclass
class HpaScaler:
    """HorizontalPodAutoscaler v2 with one metric of type Pods (AverageValue) and the default behaviour: up at once by the larger
    of 100 % and 4 pods in 15 s, down to the most that was recommended in 300 s."""

    target: float
    """Requests for each pod."""
    least: int
    most: int
    tolerance: float = 0.1
    down_window_s: float = 300.0
    period_s: float = 15.0
    _recommended: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    _sizes: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    def size(self, look: Look) -> int:
        """The size that the pool should have now."""
        values = [float(member.requests) for member in look.ready]
        return self.next(look.now, look.size, values, unready=len(look.starting))

    def next(self, now: float, size: int, values: list[float], *, unready: int = 0, missing: int = 0) -> int:
        """The size after one sync.

        Args:
            values: The metric of each ready pod that has it.
            unready: Pods that are not ready: left out, but counted as 0 when growing.
            missing: Ready pods without the metric: as if at 0 when growing, as if at the target when shrinking.
        """
        wanted = self._replicas(size, values, unready, missing)
        self._recommended = [(at, count) for at, count in self._recommended if at > now - self.down_window_s]
        self._recommended.append((now, wanted))
        self._sizes = [(at, count) for at, count in self._sizes if at > now - 15.0]
        if wanted < size:
            wanted = min(max(count for _, count in self._recommended), size)
        elif wanted > size:
            base = size - sum(count for _, count in self._sizes if count > 0)  # as it was a period ago
            wanted = min(wanted, max(2 * base, base + 4, size))
        wanted = min(max(wanted, self.least), self.most)
        if wanted != size:
            self._sizes.append((now, wanted - size))
        return wanted

    def _replicas(self, size: int, values: list[float], unready: int, missing: int) -> int:
        if not values:
            return size
        ratio = sum(values) / len(values) / self.target
        if not missing and not (unready and ratio > 1):
            return size if abs(ratio - 1) <= self.tolerance else math.ceil(ratio * len(values) - 1e-9)
        filled = [*values, *([self.target if ratio < 1 else 0.0] * missing), *([0.0] * unready if ratio > 1 else [])]
        again = sum(filled) / len(filled) / self.target
        if abs(again - 1) <= self.tolerance or (ratio < 1) != (again < 1):
            return size
        count = math.ceil(again * len(filled) - 1e-9)
        return size if (again < 1 and count > size) or (again > 1 and count < size) else count


@dataclass
class KpaScaler:
    """Knative's pod autoscaler on concurrency: stable window 60 s, panic window a tenth of it, panic from twice what is ready."""

    target: float
    """Requests for each pod."""
    least: int
    most: int
    stable_window_s: float = 60.0
    panic_window_s: float = 6.0
    panic_threshold: float = 2.0
    period_s: float = 2.0
    _samples: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    _panic_at: float | None = None
    _panic_most: int = 0

    def size(self, look: Look) -> int:
        """The size that the pool should have now."""
        total = float(sum(member.requests for member in look.ready) + look.held)
        return self.next(look.now, total, len(look.ready))

    def next(self, now: float, total: float, ready: int) -> int:
        """Return the size after one tick of a pool with `total` requests at `ready` pods."""
        self._samples = [(at, value) for at, value in self._samples if at > now - self.stable_window_s]
        self._samples.append((now, total))
        count = max(ready, 1)
        stable = self._bounded(self._mean(now, self.stable_window_s), count)
        panic = self._bounded(self._mean(now, self.panic_window_s), count)
        if panic / count >= self.panic_threshold:
            if self._panic_at is None:
                self._panic_most = 0
            self._panic_at = now
        elif self._panic_at is not None and now - self._panic_at > self.stable_window_s:
            self._panic_at = None
        if self._panic_at is not None:
            self._panic_most = max(self._panic_most, count, stable, panic)
            wanted = self._panic_most
        else:
            wanted = stable
        return min(max(wanted, self.least), self.most)

    def _mean(self, now: float, window: float) -> float:
        inside = [value for at, value in self._samples if at > now - window]
        return sum(inside) / len(inside)

    def _bounded(self, value: float, count: int) -> int:
        """Return the pods for that many requests: at least half and at most a thousand times those that are ready."""
        return min(max(math.ceil(value / self.target - 1e-9), count // 2), 1000 * count)
