"""A model runner without a model: the next token is a checksum of all tokens before it, as read back from its KV cache.

What it reads is what it wrote: a block freed too early, a wrong cache hit, a stale row or a lost append changes every token
that follows, or is noticed here at once.
"""

import time
import zlib
from collections.abc import Sequence

import numpy as np

from penstock.engine.config import EngineConfig
from penstock.engine.core.plan import SampledLogprobs, SampleInputs, StepPlan, StepResult
from penstock.engine.core.row_table import RowTable

VOCAB = 50
FAILING_TOKEN = 999
CRASHING_TOKEN = 888
SLOW_TOKEN = 777


def next_token(tokens: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % VOCAB


def reference(prompt: list[int], max_tokens: int, stop_token_ids: Sequence[int] = (), max_model_len: int = 10**9) -> list[int]:
    """What a request generates when nothing else exists."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, max_model_len):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_token_ids:
            break
    return tokens[len(prompt) :]


class FakeRunner:
    """The runner's interface over an array of (token, position) pairs."""

    def __init__(self, config: EngineConfig) -> None:
        self._block_size = config.cache.block_size
        self.table = RowTable(config.scheduler.max_num_seqs, config.model.max_model_len, [self._block_size])
        self._plan: StepPlan | None = None
        self._next: list[tuple[int, int, int]] = []
        self.prefilled = 0

    def load(self) -> None:
        pass

    def kv_bytes_per_block(self) -> int:
        return 1 << 20

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self._kv = np.full((num_blocks, self._block_size, 2), -1, np.int64)

    def warm_up(self) -> None:
        pass

    def execute(self, plan: StepPlan) -> None:
        starts, table = self.table.apply(plan), self.table.block_tables[0]
        self._plan, self._starts = plan, starts
        for row, start, count in zip(plan.rows, starts, plan.num_new_tokens, strict=True):
            positions = np.arange(start, start + count)
            blocks = table[row, positions // self._block_size]
            assert blocks.all(), "a token would be written to the null block"
            tokens = self.table.token_ids[row, positions]
            self._kv[blocks, positions % self._block_size] = np.stack([tokens, positions], axis=1)
            self.prefilled += int(count)

    def sample(self, inputs: SampleInputs) -> StepResult:
        plan = self._plan
        assert plan is not None and plan.step_id == inputs.step_id
        token_ids, counts, failed = np.zeros((len(plan.rows), 1), np.int32), np.zeros(len(plan.rows), np.int32), {}
        ends = self._starts + plan.num_new_tokens
        for at, (row, end) in enumerate(zip(plan.rows, ends, strict=True)):
            tokens = self._read(row, end)
            if FAILING_TOKEN in tokens:
                failed[at] = "the logits are not finite"
            elif CRASHING_TOKEN in tokens:
                raise RuntimeError("the device is on fire")
            if SLOW_TOKEN in tokens:
                time.sleep(0.02)
            if plan.samples[at]:
                token_ids[at, 0], counts[at] = next_token(tokens), 1
        rows = plan.samples
        self.table.write_sampled(plan.rows[rows], ends[rows], token_ids[rows, 0])
        return StepResult(plan.step_id, token_ids, counts, self._logprobs(token_ids[:, 0], counts), failed)

    def _read(self, row: int, end: int) -> np.ndarray:
        positions = np.arange(end)
        content = self._kv[self.table.block_tables[0][row, positions // self._block_size], positions % self._block_size]
        assert (content[:, 1] == positions).all(), f"row {row} reads KV of other positions: {content[:, 1].tolist()}"
        return content[:, 0]

    def _logprobs(self, token_ids: np.ndarray, counts: np.ndarray) -> SampledLogprobs:
        """The sampled token stands for its own logprob, so that a test sees which came where."""
        rows = np.flatnonzero(counts).astype(np.int32)
        ids = token_ids[rows]
        return SampledLogprobs(rows, -ids.astype(np.float32), ids % 3, np.stack([ids, ids + 1], 1), -np.stack([ids, ids], 1))
