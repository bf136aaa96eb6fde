"""A step while the scheduler decides on it: what was granted can still be taken back."""

import numpy as np

from penstock.engine.config import SchedulerConfig
from penstock.engine.core.plan import NONE, Admission, Int32, Int64, SlotLoad, StepPlan, Transfers, ints
from penstock.engine.multimodal.inputs import EncoderRun


class StepBuilder:
    """Grants under one token budget.

    Args:
        config: Limits of a step.
        now: When it is planned, Unix time in seconds.
    """

    def __init__(self, config: SchedulerConfig, now: float) -> None:
        self.now = now
        self.token_budget = config.max_num_batched_tokens
        """Tokens left."""
        self._longest_chunk = config.long_prefill_token_threshold or self.token_budget
        self.decodes: Int64 = np.empty(0, np.int64)
        """[d]: rows that run their last known token and sample."""
        self.num_drafts: Int32 | None = None
        """[d]: drafts that these rows have verified; None: no row has any."""
        self.draft_ids: dict[int, list[int]] = {}
        """Row → the drafts that the runner is told."""
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
        """Whether a request lost its row for this step. Then none is admitted."""

    @property
    def is_empty(self) -> bool:
        """Whether no row runs."""
        return not len(self.decodes) and not self.chunks

    @property
    def num_prefill_tokens(self) -> int:
        """Of all chunks."""
        return sum(tokens for tokens, _ in self.chunks.values())

    def grant_decodes(self, rows: Int64, num_drafts: Int32 | None = None) -> None:
        """One token for each of the rows as far as the budget goes, then their drafts as far as the rest goes.

        Args:
            rows: [m].
            num_drafts: [m]: drafts wanted; None: none are.
        """
        self.decodes = rows[: self.token_budget]
        self.token_budget -= len(self.decodes)
        if num_drafts is not None:
            wanted = num_drafts[: len(self.decodes)]
            total = sum(wanted.tolist())
            if total > self.token_budget:
                wanted = np.clip(self.token_budget - (np.cumsum(wanted) - wanted), 0, wanted).astype(np.int32)
                total = int(wanted.sum())
            self.num_drafts = wanted
            self.token_budget -= total

    def chunk(self, gap: int) -> int:
        """Tokens that the next chunk may have, of a row that lacks `gap`."""
        return min(gap, self.token_budget, self._longest_chunk)

    def grant_chunk(self, row: int, count: int, *, samples: bool) -> None:
        """`count` tokens for the row."""
        self.chunks[row] = (count, samples)
        self.token_budget -= count

    def take_back_drafts(self, row: int) -> bool:
        """Takes a decode's drafts; False: it has none."""
        if self.num_drafts is None:
            return False
        at = self.decodes == row
        count = int(self.num_drafts[at].sum())
        self.num_drafts[at] = 0
        self.token_budget += count
        return count > 0

    def take_back(self, row: int) -> None:
        """Undoes everything granted to the row; its blocks are the caller's to free."""
        self.preempted = True
        self.appends.pop(row, None)
        if row in self.chunks:
            self.token_budget += self.chunks.pop(row)[0]
        self.take_back_drafts(row)
        kept = self.decodes != row
        self.token_budget += len(self.decodes) - int(np.count_nonzero(kept))
        self.decodes = self.decodes[kept]
        if self.num_drafts is not None:
            self.num_drafts = self.num_drafts[kept]

    def build(
        self,
        step_id: int,
        released: list[int],
        num_groups: int,
        transfers: Transfers | None = None,
        encoder: tuple[list[EncoderRun], list[str]] = ([], []),
    ) -> StepPlan:
        """The plan: decodes first, then chunks, running ones before new ones. `encoder`: images to encode, and to drop."""
        decodes, count = len(self.decodes), len(self.decodes) + len(self.chunks)
        rows, num_new_tokens, samples = self.decodes.astype(np.int32), np.ones(count, np.int32), np.ones(count, np.bool_)
        if self.chunks:
            rows = np.concatenate((rows, np.fromiter(self.chunks, np.int32, len(self.chunks))))
        for at, (tokens, reaches_end) in enumerate(self.chunks.values(), decodes):
            num_new_tokens[at], samples[at] = tokens, reaches_end
        num_drafts, draft_rows, draft_ids = NONE, NONE, NONE
        if self.num_drafts is not None and np.count_nonzero(self.num_drafts):
            num_drafts = np.zeros(count, np.int32)
            num_drafts[:decodes] = self.num_drafts
            num_new_tokens += num_drafts
            draft_rows, draft_ids = self._given_drafts()
        append_rows, append_blocks = self._appends(num_groups)
        return StepPlan(
            step_id=step_id,
            released=_array(released),
            admissions=self.admissions,
            append_rows=append_rows,
            append_blocks=append_blocks,
            rows=rows,
            num_new_tokens=num_new_tokens,
            samples=samples,
            lora_loads=self.lora_loads,
            lora_drops=self.lora_drops,
            num_drafts=num_drafts,
            draft_rows=draft_rows,
            draft_ids=draft_ids,
            transfers=transfers,
            encoder_runs=encoder[0],
            encoder_frees=encoder[1],
        )

    def _given_drafts(self) -> tuple[Int32, Int32]:
        """Return the drafts in the plan's form."""
        if self.num_drafts is None or not self.draft_ids:
            return NONE, NONE
        counts = {
            at: count for at, count in enumerate(ints(self.num_drafts)) if count and int(self.decodes[at]) in self.draft_ids
        }
        drafts = [token for at, count in counts.items() for token in self.draft_ids[int(self.decodes[at])][:count]]
        return _array(list(counts)), _array(drafts)

    def _appends(self, num_groups: int) -> tuple[list[Int32], list[Int32]]:
        """Per KV group, rows and the blocks that they get."""
        groups = range(num_groups)
        if not self.appends:  # as in most steps
            return [NONE] * num_groups, [NONE] * num_groups
        rows = [_array([row for row, blocks in self.appends.items() for _ in blocks[group]]) for group in groups]
        return rows, [_array([block for blocks in self.appends.values() for block in blocks[group]]) for group in groups]


def _array(values: list[int]) -> Int32:
    return np.array(values, np.int32) if values else NONE
