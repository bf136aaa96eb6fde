"""A model runner without a model: the next token is a checksum of all tokens before it, as read back from its KV cache.

What it reads is what it wrote: a block freed too early, a wrong cache hit, a stale row or a lost append changes every token
that follows, or is noticed here at once. Where the configuration has drafts it proposes random ones, and accepts some of those
that are right.
"""

import random
import time
import zlib
from collections.abc import Sequence

import numpy as np

from penstock.engine.cache.layout import KVGroup, KVLayout, full_attention
from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.core.executor import AdapterRead, StepFailed
from penstock.engine.core.memory import Memory, measure_memory
from penstock.engine.core.plan import GraphReport, Pooled, SampledLogprobs, SampleInputs, StepPlan, StepResult
from penstock.engine.core.row_table import RowTable
from penstock.engine.sampling import RepetitionDetection
from penstock.prompt.hashing import PromptItem

VOCAB = 50
FAILING_TOKEN = 999
REFUSED_TOKEN = 998
CRASHING_TOKEN = 888
SLOW_TOKEN = 777
SLOWER_TOKEN = 778
HANGING_TOKEN = 555
COUGHING_TOKENS = (666, 667)


def image_value(identifier: str, offset: int) -> int:
    """What stands in a KV cache for one of an image's embeddings: no token's number."""
    return 10_000 + zlib.crc32(f"{identifier}/{offset}".encode()) % 10**6


def next_token(tokens: Sequence[int], adapter: str | None = None) -> int:
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes(), _name(adapter)) % VOCAB


def _name(adapter: str | None) -> int:
    return 0 if adapter is None else zlib.crc32(adapter.encode())


def reference(
    prompt: list[int],
    max_tokens: int,
    stop_token_ids: Sequence[int] = (),
    max_model_len: int = 10**9,
    adapter: str | None = None,
    repetition: RepetitionDetection | None = None,
) -> list[int]:
    """What a request generates when nothing else exists."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, max_model_len):
        tokens.append(next_token(tokens, adapter))
        if tokens[-1] in stop_token_ids or repeats(tokens[len(prompt) :], repetition):
            break
    return tokens[len(prompt) :]


def repeats(output: list[int], guard: RepetitionDetection | None) -> bool:
    """Whether a pattern stands at the end as often as the guard allows."""
    if guard is None:
        return False
    for size in range(guard.min_pattern_size, guard.max_pattern_size + 1):
        end = output[-size * guard.min_count :]
        if len(end) == size * guard.min_count and end == end[:size] * guard.min_count:
            return True
    return False


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
        self._row_slots = np.full(config.scheduler.max_num_seqs, -1, np.int64)
        self._slots: list[str | None] = [None] * (config.lora.max_loras if config.lora else 0)
        self._host: dict[int, str] = {}
        self._reads: dict[int, AdapterRead] = {}
        self.contents: dict[str, bytes] = {}
        """What is at an adapter's URI, where that is not always the same."""
        self._reading: list[tuple[int, str]] = []
        self.read: list[str] = []
        self.slow_reads = False
        self.captures: list[float] = []
        self._config = config
        self._random = random.Random(1)
        self._drafts: dict[int, list[int]] = {}
        self.embeddings: dict[str, int] = {}
        """By image, how many: an image of the tests is as wide as that."""
        self.under_way: dict[str, tuple[int, int]] = {}
        """By image whose run is not over, its width and the work that is done."""
        self.encoded: list[str] = []
        self._items: dict[int, tuple[PromptItem, ...]] = {}

    def kernels(self) -> str:
        return "fake"

    def profile_memory(self) -> int:
        return 0

    def ceilings(self) -> None:
        return None

    def measure_memory(self) -> Memory:
        return measure_memory()

    def load(self) -> None:
        pass

    def kv_layout(self) -> KVLayout:
        return KVLayout(tuple(self._groups), 1 << 20)

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._kv = np.full((num_blocks, max(group.block_size for group in self._groups), 4), -1, np.int64)

    def page_keeper(self) -> int:
        return 0

    def initialize_offload(self, num_pages: int) -> None:
        self._host_pages = np.full((num_pages, *self._kv.shape[1:]), -1, np.int64)

    def _transfer(self, plan: StepPlan) -> None:
        if (copies := plan.transfers) is not None:
            self._host_pages[copies.store_slots] = self._kv[copies.store_blocks]
            # Nobody may need what is there: each page is the loader's own.
            self._kv[copies.load_blocks] = self._host_pages[copies.load_slots]

    def warm_up(self) -> None:
        pass

    def capture_graph(self) -> GraphReport | None:
        """Of three graphs in all, where the configuration wants any."""
        if self._config.graphs.mode == "NONE":
            return None
        self.captures.append(time.monotonic())
        return GraphReport(len(self.captures), max(0, 3 - len(self.captures)), 0, 0, 0.0)

    def sleep(self, level: int) -> None:
        self.awake -= {"kv_cache"} if level == 1 else {"kv_cache", "weights"}
        del self._kv

    def wake_up(self, tags: Sequence[str]) -> None:
        self.awake |= set(tags) & {"kv_cache"}
        if "kv_cache" in tags:
            self.initialize_kv_cache(self._num_blocks)

    def check_weights(self, path: str | None) -> str | None:
        return "/elsewhere has other shapes" if path == "/elsewhere" else None

    def reload_weights(self, path: str | None) -> None:
        if path == "/elsewhere":
            raise ConfigError("/elsewhere has other shapes")
        self.awake -= {"weights"}
        if path == "/broken":
            raise OSError("the disk is gone")
        self.awake |= {"weights"}

    def read_adapter(self, copy: int, uri: str, revision: str | None) -> None:
        """Done at once, unless `slow_reads`: then when a test calls `finish_reads`."""
        self._reading.append((copy, uri))
        if not self.slow_reads:
            self.finish_reads()

    def finish_reads(self) -> None:
        for copy, uri in self._reading:
            self.read.append(uri)
            error = f"{uri} is broken" if "broken" in uri else None
            self._reads[copy] = AdapterRead(error, self.contents.get(uri, uri.encode()))
            if error is None:
                self._host[copy] = uri
        self._reading.clear()

    def take_reads(self) -> dict[int, AdapterRead]:
        reads, self._reads = self._reads, {}
        return reads

    def drop_adapters(self, copies: Sequence[int]) -> None:
        for copy in copies:
            self._host.pop(copy, None)

    def adapters(self, plan: StepPlan) -> list[str | None]:
        """Of the plan's rows."""
        return [None if slot < 0 else self._slots[slot] for slot in self._row_slots[plan.rows]]

    def _apply_adapters(self, plan: StepPlan) -> None:
        for load in plan.lora_loads:
            self._slots[load.slot] = self._host[load.copy]
        self.drop_adapters(plan.lora_drops)
        self._row_slots[plan.released] = -1
        for admission in plan.admissions:
            assert admission.lora_slot < len(self._slots)
            self._row_slots[admission.row] = admission.lora_slot

    def execute(self, plan: StepPlan) -> None:
        self._apply_adapters(plan)
        starts = self.table.apply(plan)
        self._transfer(plan)
        self._apply_images(plan)
        self._plan, self._starts = plan, starts
        self._verifies = self._take_drafts(plan)
        for row, start, count, adapter in zip(plan.rows, starts, plan.num_new_tokens, self.adapters(plan), strict=True):
            positions = np.arange(start, start + count)
            tokens = self._values(row, int(start), int(start + count))
            for number, group in enumerate(self._groups):
                blocks = self.table.block_tables[number][row, positions // group.block_size]
                assert blocks.all(), "a token would be written to the null block"
                content = np.stack([tokens, positions, np.full(count, number), np.full(count, _name(adapter))], axis=1)
                self._kv[blocks, positions % group.block_size] = content
            self.prefilled += int(count)

    def _apply_images(self, plan: StepPlan) -> None:
        for name in plan.encoder_frees:
            self.embeddings.pop(name, None)
            self.under_way.pop(name, None)
        for row in plan.released.tolist():
            self._items.pop(row, None)
        for admission in plan.admissions:
            self._items[admission.row] = admission.items
        for run in plan.encoder_runs:
            assert run.identifier not in self.embeddings, "an image is encoded that is there"
            width, done = (run.pixels.width, 0) if run.pixels is not None else self.under_way.pop(run.identifier)
            assert done < run.done <= run.work
            if run.done < run.work:
                self.under_way[run.identifier] = width, run.done
                continue
            self.embeddings[run.identifier] = width
            self.encoded.append(run.identifier)

    def _values(self, row: int, start: int, end: int, there: int | None = None) -> np.ndarray:
        """What a row has from `start` to `end`: its tokens, and embeddings in the places of images. Before `there` they were
        needed once, and may be gone."""
        found = self.table.token_ids[row, start:end].copy()
        for item in self._items.get(int(row), ()):
            if self._config.scheduler.whole_images and there is None and start < (last := item.start + item.length):
                assert end <= item.start or last <= end, f"a chunk of row {row} ends within {item.identifier}"
            for position in range(max(start, item.start), min(end, item.start + item.length)):
                if there is None or position >= there:
                    assert self.embeddings.get(item.identifier) == item.length, f"row {row} lacks {item.identifier}"
                found[position - start] = image_value(item.identifier, position - item.start)
        return found

    def _take_drafts(self, plan: StepPlan) -> list[int]:
        """Puts the rows' drafts behind their last tokens; how many of each row are drafts and not there to fill up."""
        for row in plan.released.tolist():
            self._drafts.pop(row, None)
        num_drafts, found = _num_drafts(plan), []
        given = _by_row(plan.draft_rows, num_drafts[plan.draft_rows], plan.draft_ids)
        for at, (row, count) in enumerate(zip(plan.rows.tolist(), num_drafts.tolist(), strict=True)):
            own = self._drafts.pop(row, [])
            drafts = given[at].tolist() if at in given else own[:count]
            end = int(self._starts[at] + plan.num_new_tokens[at])
            self.table.token_ids[row, end - count : end] = (drafts + [0] * count)[:count]
            found.append(len(drafts) if count else 0)
        return found

    def sample(self, inputs: SampleInputs) -> StepResult:
        plan = self._plan
        assert plan is not None and plan.step_id == inputs.step_id
        self._plan = None
        num_drafts = _num_drafts(plan)
        token_ids = np.zeros((len(plan.rows), 1 + num_drafts.max(initial=0)), np.int32)
        counts, failed = np.zeros(len(plan.rows), np.int32), {}
        not_finite: list[int] = []
        ends = self._starts + plan.num_new_tokens
        masks = _by_row(inputs.masked_rows, num_drafts[inputs.masked_rows] + 1, inputs.bitmask)
        for at, (row, end, adapter) in enumerate(zip(plan.rows, ends, self.adapters(plan), strict=True)):
            tokens = self._read(row, self._starts[at], end, adapter)
            if FAILING_TOKEN in tokens:
                failed[at] = "the logits are not finite"
                not_finite.append(at)
            elif REFUSED_TOKEN in tokens:
                failed[at] = "no token is left to sample"
            elif CRASHING_TOKEN in tokens:
                raise RuntimeError("the device is on fire")
            if SLOW_TOKEN in tokens:
                time.sleep(0.02)
            elif SLOWER_TOKEN in tokens:
                time.sleep(0.2)
            if plan.samples[at] and not self._config.model.pooling:
                found = self._verify(tokens, int(num_drafts[at]), self._verifies[at], adapter, masks.get(at))
                token_ids[at, : len(found)], counts[at] = found, len(found)
        if self._config.model.pooling:
            done = np.flatnonzero(plan.samples).astype(np.int32)
            pooled = Pooled(done, ends[done, None].astype(np.float32))
            return StepResult(plan.step_id, token_ids, counts, None, failed, pooled=pooled)
        _, ends = self.table.settle(plan, counts)
        for row, end, count, found in zip(plan.rows, ends, counts, token_ids, strict=True):
            self.table.token_ids[row, end + 1 - count : end + 1] = found[:count]
        drafts = self._propose(plan, ends, counts)
        logprobs, bad = self._logprobs(token_ids, counts), np.array(not_finite, np.int32)
        return StepResult(plan.step_id, token_ids, counts, logprobs, failed, None, bad, drafts=drafts)

    def _verify(self, tokens: np.ndarray, planned: int, there: int, adapter: str | None, mask: np.ndarray | None) -> list[int]:
        """Drafts accepted from the left, and the token after them; now and then one fewer than could be."""
        end = len(tokens) - planned
        patience = self._random.choice([planned, planned, self._random.randint(0, planned)])
        found = []
        for number in range(planned + 1):
            token = next_token(tokens[: end + number], adapter)
            while mask is not None and not mask[number][token // 32] >> token % 32 & 1:
                token = (token + 1) % VOCAB
            found.append(token)
            if number >= min(there, patience) or tokens[end + number] != token:
                break
        return found

    def _propose(self, plan: StepPlan, ends: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
        """Up to as many drafts as may be for each row that goes on, most of them right."""
        most = self._config.scheduler.num_speculative_tokens
        if not most:
            return None
        drafts = np.full((len(plan.rows), most), -1, np.int32)
        for at, (row, end, adapter) in enumerate(zip(plan.rows.tolist(), ends, self.adapters(plan), strict=True)):
            if counts[at]:
                tokens = self.table.token_ids[row, : end + 1].tolist()
                for _ in range(self._random.randint(0, most)):
                    right = self._random.random() < 0.8
                    tokens.append(next_token(tokens, adapter) if right else self._random.randrange(VOCAB))
                self._drafts[row] = tokens[end + 1 :]
                drafts[at, : len(tokens) - end - 1] = tokens[end + 1 :]
        return drafts

    def _read(self, row: int, start: int, end: int, adapter: str | None) -> np.ndarray:
        """The row's first `end` tokens, as the step that begins at `start` sees them."""
        found = self._values(row, 0, end, there=start)
        for number, group in enumerate(self._groups):
            positions = np.arange(0 if group.window is None else max(0, start - group.window + 1), end)
            blocks = self.table.block_tables[number][row, positions // group.block_size]
            content = self._kv[blocks, positions % group.block_size]
            assert (content[:, 1] == positions).all(), f"row {row} reads KV of other positions: {content[:, 1].tolist()}"
            assert (content[:, 2] == number).all(), f"row {row} reads KV of other groups: {content[:, 2].tolist()}"
            assert (content[:, 3] == _name(adapter)).all(), f"row {row} reads KV of another adapter than {adapter}"
            assert group.window is None or (content[:, 0] == found[positions]).all(), f"row {row} reads KV of other tokens"
            found[positions] = content[:, 0]
        return found

    def _logprobs(self, token_ids: np.ndarray, counts: np.ndarray) -> SampledLogprobs:
        """The sampled token stands for its own logprob, so that a test sees which came where."""
        rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        ids = token_ids[np.arange(token_ids.shape[1]) < counts[:, None]]
        return SampledLogprobs(rows, -ids.astype(np.float32), ids % 3, np.stack([ids, ids + 1], 1), -np.stack([ids, ids], 1))


def _num_drafts(plan: StepPlan) -> np.ndarray:
    """Of each of the plan's rows."""
    return plan.num_drafts if len(plan.num_drafts) else np.zeros(len(plan.rows), np.int32)


def _by_row(rows: np.ndarray, counts: np.ndarray, values: np.ndarray) -> dict[int, np.ndarray]:
    """Cuts what stands one row after the other."""
    assert counts.sum() == len(values)
    ends = np.cumsum(counts)
    return {row: values[end - count : end] for row, count, end in zip(rows.tolist(), counts, ends, strict=True)}


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
