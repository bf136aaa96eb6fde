"""A model runner without a model: the next token is a checksum of all tokens before it, as read back from its KV cache.

What it reads is what it wrote: a block freed too early, a wrong cache hit, a stale row or a lost append changes every token
that follows, or is noticed here at once.
"""

import time
import zlib
from collections.abc import Sequence

import numpy as np

from penstock.engine.cache.layout import KVGroup, KVLayout, full_attention
from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.core.executor import StepFailed
from penstock.engine.core.plan import SampledLogprobs, SampleInputs, StepPlan, StepResult
from penstock.engine.core.row_table import RowTable

VOCAB = 50
FAILING_TOKEN = 999
CRASHING_TOKEN = 888
SLOW_TOKEN = 777
HANGING_TOKEN = 555
COUGHING_TOKENS = (666, 667)


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
    """The runner's interface over an array of (token, position) pairs for each KV group, all in the same blocks.

    Each group must read what it wrote, as far back as it sees; the tokens are those of group 0, or the row's where that has a
    window.
    """

    def __init__(self, config: EngineConfig, groups: Sequence[KVGroup] = ()) -> None:
        self._groups = groups or full_attention(config.cache.block_size)
        self.table = RowTable(
            config.scheduler.max_num_seqs, config.model.max_model_len, [group.block_size for group in self._groups]
        )
        self._plan: StepPlan | None = None
        self._next: list[tuple[int, int, int]] = []
        self.prefilled = 0
        self.awake = {"weights", "kv_cache"}

    kernels = "fake"

    def profile_memory(self) -> int:
        return 0

    def load(self) -> None:
        pass

    def kv_layout(self) -> KVLayout:
        return KVLayout(tuple(self._groups), 1 << 20)

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._kv = np.full((num_blocks, max(group.block_size for group in self._groups), 3), -1, np.int64)

    def warm_up(self) -> None:
        pass

    def sleep(self, level: int) -> None:
        self.awake -= {"kv_cache"} if level == 1 else {"kv_cache", "weights"}
        del self._kv

    def wake_up(self, tags: Sequence[str]) -> None:
        self.awake |= set(tags) & {"kv_cache"}
        if "kv_cache" in tags:
            self.initialize_kv_cache(self._num_blocks)

    def reload_weights(self, path: str | None) -> None:
        if path == "/elsewhere":
            raise ConfigError("/elsewhere has other shapes")
        self.awake -= {"weights"}
        if path == "/broken":
            raise OSError("the disk is gone")
        self.awake |= {"weights"}

    def execute(self, plan: StepPlan) -> None:
        starts = self.table.apply(plan)
        self._plan, self._starts = plan, starts
        for row, start, count in zip(plan.rows, starts, plan.num_new_tokens, strict=True):
            positions = np.arange(start, start + count)
            tokens = self.table.token_ids[row, positions]
            for number, group in enumerate(self._groups):
                blocks = self.table.block_tables[number][row, positions // group.block_size]
                assert blocks.all(), "a token would be written to the null block"
                content = np.stack([tokens, positions, np.full(count, number)], axis=1)
                self._kv[blocks, positions % group.block_size] = content
            self.prefilled += int(count)

    def sample(self, inputs: SampleInputs) -> StepResult:
        plan = self._plan
        assert plan is not None and plan.step_id == inputs.step_id
        token_ids, counts, failed = np.zeros((len(plan.rows), 1), np.int32), np.zeros(len(plan.rows), np.int32), {}
        ends = self._starts + plan.num_new_tokens
        for at, (row, end) in enumerate(zip(plan.rows, ends, strict=True)):
            tokens = self._read(row, self._starts[at], end)
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

    def _read(self, row: int, start: int, end: int) -> np.ndarray:
        """The row's first `end` tokens, as the step that begins at `start` sees them."""
        found = self.table.token_ids[row, :end].copy()
        for number, group in enumerate(self._groups):
            positions = np.arange(0 if group.window is None else max(0, start - group.window + 1), end)
            blocks = self.table.block_tables[number][row, positions // group.block_size]
            content = self._kv[blocks, positions % group.block_size]
            assert (content[:, 1] == positions).all(), f"row {row} reads KV of other positions: {content[:, 1].tolist()}"
            assert (content[:, 2] == number).all(), f"row {row} reads KV of other groups: {content[:, 2].tolist()}"
            assert group.window is None or (content[:, 0] == found[positions]).all(), f"row {row} reads KV of other tokens"
            found[positions] = content[:, 0]
        return found

    def _logprobs(self, token_ids: np.ndarray, counts: np.ndarray) -> SampledLogprobs:
        """The sampled token stands for its own logprob, so that a test sees which came where."""
        rows = np.flatnonzero(counts).astype(np.int32)
        ids = token_ids[rows]
        return SampledLogprobs(rows, -ids.astype(np.float32), ids % 3, np.stack([ids, ids + 1], 1), -np.stack([ids, ids], 1))


class HangingRunner(FakeRunner):
    """Never comes back from a step in which `HANGING_TOKEN` is read."""

    def execute(self, plan: StepPlan) -> None:
        super().execute(plan)
        if any(HANGING_TOKEN in self.table.token_ids[row] for row in plan.rows):
            time.sleep(3600)


class SlowLoader(FakeRunner):
    """Never done loading."""

    def load(self) -> None:
        time.sleep(3600)


class CoughingRunner(FakeRunner):
    """Fails every step in which one of its tokens is read, in the forward pass or in sampling, and is fine after it."""

    def execute(self, plan: StepPlan) -> None:
        super().execute(plan)
        if any(COUGHING_TOKENS[0] in self.table.token_ids[row] for row in plan.rows):
            self._plan = None
            raise StepFailed("the device coughed")

    def sample(self, inputs: SampleInputs) -> StepResult:
        assert self._plan is not None, "no step waits for this sampling"
        if any(COUGHING_TOKENS[1] in self.table.token_ids[row] for row in self._plan.rows):
            raise StepFailed("the device coughed")
        return super().sample(inputs)
