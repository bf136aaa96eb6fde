"""What a replica of a pool carries, learned from what its replicas report. Pure.

Prefill is a speed that the engine measures. Decode is a line: a step over `rows` sequences takes `base + slope · rows` seconds
(weights are read once, each row adds its own work and context), fitted by exponentially weighted least squares. From the line
follows how many rows keep the promised time between tokens, and how many tokens a second they give together.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from penstock.api.load_report import LoadReport

FORGET = 0.98
"""What a sample's weight becomes with each one after it."""
LEAST_KV = 0.02
"""KV usage below which a replica says too little of what a row holds."""
LEAST_SPEED = 1e-3
"""Prompt tokens a second. What is slower was not measured, and quotients of it have no end."""
LEAST_STEP_S, MOST_STEP_S = 1e-6, 3600.0
"""Bounds of a plausible step, in seconds."""
LEAST_SLOPE_S = 1e-12
"""Below which rows cost nothing."""


@dataclass(frozen=True)
class StepLine:
    """Seconds of a decode step over the rows in it: sums of weighted samples."""

    weight: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    rows_rows: float = 0.0
    rows_seconds: float = 0.0

    def add(self, rows: float, seconds: float, weight: float = 1.0) -> "StepLine":
        """The line after one more sample."""
        return StepLine(
            self.weight * FORGET + weight,
            self.rows * FORGET + weight * rows,
            self.seconds * FORGET + weight * seconds,
            self.rows_rows * FORGET + weight * rows * rows,
            self.rows_seconds * FORGET + weight * rows * seconds,
        )

    @property
    def slope(self) -> float:
        """Seconds for each row more; 0 where too little was seen to tell."""
        spread = self.weight * self.rows_rows - self.rows**2
        if spread <= 1e-6 * max(self.rows**2, 1e-12):
            return 0.0
        slope = (self.weight * self.rows_seconds - self.rows * self.seconds) / spread
        return min(max(slope, 0.0), self.seconds / self.rows)  # neither slope nor base can be negative

    @property
    def base(self) -> float:
        """Seconds of a step before its rows count; 0 where nothing was seen."""
        return max(self.seconds - self.slope * self.rows, 0.0) / self.weight if self.weight else 0.0

    def step_s(self, rows: float) -> float:
        """Seconds of a step over that many rows."""
        return self.base + self.slope * rows


@dataclass(frozen=True)
class Capacity:
    """What one replica carries; figures are 0 until something was seen."""

    prefill_tokens_per_s: float = 0.0
    """Prompt tokens a second while it does nothing but prefill."""
    line: StepLine = field(default_factory=StepLine)
    max_num_seqs: float = 0.0
    rows_in_kv: float = 0.0
    """Sequences of the usual length that its KV cache holds."""

    def rows(self, itl_s: float | None) -> float:
        """Sequences at once: bound by the batch, by KV memory, and by the time between tokens if one is promised."""
        bounds = [bound for bound in (self.max_num_seqs, self.rows_in_kv) if bound]
        if itl_s is not None and self.line.slope >= LEAST_SLOPE_S:
            bounds.append(max((itl_s - self.line.base) / self.line.slope, 1.0))
        return min(bounds, default=0.0)

    def output_tokens_per_s(self, itl_s: float | None) -> float:
        """Tokens a second of as many sequences as it carries; 0 where that is not known yet."""
        rows = self.rows(itl_s)
        step = self.line.step_s(rows)
        return rows / step if step else 0.0


def learn(capacity: Capacity, reports: Iterable[LoadReport]) -> Capacity:
    """Update the capacity with the reports of a pool's replicas. A figure that no replica reports, or that is implausible,
    stays."""
    for report in reports:
        speed, rows, kv = report.prefill_tokens_per_s, report.num_requests_running, report.kv_cache_usage_perc
        stepped = rows and LEAST_STEP_S <= report.decode_step_s <= MOST_STEP_S
        line = capacity.line.add(rows, report.decode_step_s) if stepped else capacity.line
        capacity = replace(
            capacity,
            prefill_tokens_per_s=_towards(capacity.prefill_tokens_per_s, speed if speed >= LEAST_SPEED else 0.0),
            line=line,
            max_num_seqs=float(report.max_num_seqs) or capacity.max_num_seqs,
            rows_in_kv=_towards(capacity.rows_in_kv, rows / kv if kv >= LEAST_KV else 0.0),
        )
    return capacity


def _towards(old: float, new: float) -> float:
    """An average that forgets; 0 is no sample, and the first one counts whole."""
    if not new:
        return old
    return FORGET * old + (1 - FORGET) * new if old else new
