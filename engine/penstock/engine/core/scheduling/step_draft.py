"""A step while the scheduler decides on it: what was granted can still be taken back."""

import numpy as np

from penstock.engine.core.plan import Admission, Int32, SlotLoad, StepPlan, empty


class StepDraft:
    """Grants under one token budget.

    Args:
        token_budget: Tokens of the step at most.
        now: When it is planned, Unix time in seconds.
    """

    def __init__(self, token_budget: int, now: float) -> None:
        self.now = now
        self.token_budget = token_budget
        """Tokens left."""
        self.decodes: Int32 = empty()
        """[d]: rows that run one token and sample."""
        self.chunks: dict[int, tuple[int, bool]] = {}
        """Row → tokens, and whether they reach the row's last known one."""
        self.appends: dict[int, list[list[int]]] = {}
        """Row → per KV group, blocks appended."""
        self.admissions: list[Admission] = []
        self.reserved_blocks = 0
        """Blocks that rows of this step still need for tokens that they already have."""
        self.lora_loads: list[SlotLoad] = []
        self.lora_drops: list[int] = []
        self.preempted = False
        """Whether anybody lost a row for this step; then nobody is admitted."""

    @property
    def is_empty(self) -> bool:
        """Whether no row runs."""
        return not len(self.decodes) and not self.chunks

    def grant_decodes(self, rows: Int32) -> None:
        """One token for each of the rows, as far as the budget goes."""
        self.decodes = rows[: self.token_budget]
        self.token_budget -= len(self.decodes)

    def grant_chunk(self, row: int, count: int, *, samples: bool) -> None:
        """`count` tokens for the row."""
        self.chunks[row] = (count, samples)
        self.token_budget -= count

    def take_back(self, row: int) -> None:
        """Undoes everything granted to the row; its blocks are the caller's to free."""
        self.preempted = True
        self.appends.pop(row, None)
        if row in self.chunks:
            self.token_budget += self.chunks.pop(row)[0]
        kept = self.decodes[self.decodes != row]
        self.token_budget += len(self.decodes) - len(kept)
        self.decodes = kept

    def build(self, step_id: int, released: list[int], num_groups: int) -> StepPlan:
        """The plan: decodes first, then chunks, running ones before new ones."""
        decodes, count = len(self.decodes), len(self.decodes) + len(self.chunks)
        rows, num_new_tokens, samples = empty(count), np.ones(count, np.int32), np.ones(count, np.bool_)
        rows[:decodes] = self.decodes
        for at, (row, (tokens, reaches_end)) in enumerate(self.chunks.items(), decodes):
            rows[at], num_new_tokens[at], samples[at] = row, tokens, reaches_end
        return StepPlan(
            step_id=step_id,
            released=np.array(released, np.int32),
            admissions=self.admissions,
            append_rows=[self._append_rows(group) for group in range(num_groups)],
            append_blocks=[self._append_blocks(group) for group in range(num_groups)],
            rows=rows,
            num_new_tokens=num_new_tokens,
            samples=samples,
            lora_loads=self.lora_loads,
            lora_drops=self.lora_drops,
        )

    def _append_rows(self, group: int) -> Int32:
        return np.array([row for row, blocks in self.appends.items() for _ in blocks[group]], np.int32)

    def _append_blocks(self, group: int) -> Int32:
        return np.array([block for blocks in self.appends.values() for block in blocks[group]], np.int32)
