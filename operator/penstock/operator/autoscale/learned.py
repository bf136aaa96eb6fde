"""What the policy has learned of a pool, small enough to be kept where it outlives the operator. Pure."""

from dataclasses import astuple, dataclass

from penstock.operator.autoscale.capacity import MOST_STEP_S, Capacity, StepLine
from penstock.operator.autoscale.coldstart import MOST_S, ColdStart
from penstock.operator.autoscale.correction import LEAST, MOST, Correction
from penstock.operator.autoscale.policy import PoolMemory

CHANGE = 0.1
"""Relative change below which a figure is not written again."""
WEIGHT = 20.0
"""Samples that a step line counts for which was read back: what is seen from then on soon outweighs it."""


@dataclass(frozen=True)
class Learned:
    """Figures learned about one pool. 0: not measured yet."""

    prefill_tokens_per_s: float = 0.0
    step_base_s: float = 0.0
    """Seconds of a decode step before its rows count."""
    step_row_s: float = 0.0
    """Seconds of a step for each additional row."""
    max_num_seqs: float = 0.0
    rows_in_kv: float = 0.0
    cold_start_s: float = 0.0
    slo_factor: float = 1.0

    def differs(self, other: "Learned") -> bool:
        """Whether a figure is another one than in `other`, by more than noise."""
        return any(abs(a - b) > CHANGE * max(abs(a), abs(b)) for a, b in zip(astuple(self), astuple(other), strict=True))


def extract(memory: PoolMemory) -> Learned:
    """What is worth keeping."""
    capacity = memory.capacity
    return Learned(
        prefill_tokens_per_s=capacity.prefill_tokens_per_s,
        step_base_s=capacity.line.base,
        step_row_s=capacity.line.slope,
        max_num_seqs=capacity.max_num_seqs,
        rows_in_kv=capacity.rows_in_kv,
        cold_start_s=memory.cold_start.learned_s or 0.0,
        slo_factor=memory.correction.factor,
    )


def restore(learned: Learned) -> PoolMemory:
    """A memory that begins with it."""
    line = StepLine()
    if learned.step_base_s or learned.step_row_s:
        for rows in (1.0, max(learned.max_num_seqs, 2.0)):
            line = line.add(rows, min(learned.step_base_s + learned.step_row_s * rows, MOST_STEP_S), WEIGHT / 2)
    capacity = Capacity(learned.prefill_tokens_per_s, line, learned.max_num_seqs, learned.rows_in_kv)
    cold_start = ColdStart(min(learned.cold_start_s, MOST_S)) if learned.cold_start_s else ColdStart()
    factor = min(max(learned.slo_factor, LEAST), MOST)
    return PoolMemory(capacity=capacity, cold_start=cold_start, correction=Correction(factor))
