"""Everything at once over pages that are NaN unless somebody's content is in them, in a random physical order: what requests get
equals transformers. A read of one token too many makes a request fail."""

from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from test_draft_model import drafts_pay
from test_drafts_in_core import K

from penstock.engine.config import SchedulerConfig, SpeculativeConfig
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import InlineExecutor
from penstock.engine.core.plan import StepPlan
from penstock.engine.messages import AddRequest, FinishReason
from penstock.engine.sampling import SamplingParams

VOCAB, OUTPUTS = 257, 28
SCHEDULER = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48, watermark=0.0)


def drafting(folder) -> dict[str, Any]:
    """What a runner is built with to have a model as its own draft model."""
    scheduler = msgspec.structs.replace(SCHEDULER, num_speculative_tokens=K, num_lookahead_tokens=K)
    speculative = SpeculativeConfig(method="draft_model", num_speculative_tokens=K, model=folder)
    return {"scheduler": scheduler, "speculative": speculative}


class PoisoningExecutor(InlineExecutor):
    """Before each step fills every page with NaN that holds nothing, and those that change hands."""

    def __init__(self, runner) -> None:
        super().__init__(runner)
        self._kv_caches = runner.kv_caches
        for cache in self._kv_caches:
            cache.fill_(float("nan"))
        self.num_poisoned = 0

    def watch(self, pool) -> None:
        self._pool, self._taken = pool, []
        real = pool.get_new_blocks
        pool.get_new_blocks = lambda count: self._note(real(count))

    def _note(self, blocks: list[int]) -> list[int]:
        self._taken += blocks
        return blocks

    def submit(self, plan: StepPlan, masked: bool) -> None:
        empty = [block for block in self._pool.free_list if self._pool._names[block] is None]
        pages = torch.tensor([*empty, *self._taken], dtype=torch.int64)
        for cache in self._kv_caches:
            cache[pages] = float("nan")
        self.num_poisoned += len(self._taken)
        self._taken = []
        super().submit(plan, masked)


def requests() -> list[AddRequest]:
    """Twelve, in three families with a common beginning each."""
    rng = np.random.default_rng(3)
    roots = [rng.integers(0, VOCAB, length).tolist() for length in (0, 64, 100)]
    return [
        AddRequest(
            index,
            f"r{index}",
            roots[index % 3] + rng.integers(0, VOCAB, int(rng.integers(1, 60))).tolist(),
            SamplingParams(max_tokens=OUTPUTS, temperature=0.0),
            float(index),
        )
        for index in range(12)
    ]


@pytest.fixture(scope="module")
def expected(checkpoint):
    """`expected(name)`: what transformers generates for each request alone."""
    transformers = pytest.importorskip("transformers")

    @torch.no_grad()
    def generate(name: str) -> dict[int, list[int]]:
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(name), attn_implementation="eager").float().eval()
        found = {}
        for request in requests():
            prompt = torch.tensor([request.prompt_token_ids])
            everything = torch.ones_like(prompt)
            whole = model.generate(prompt, attention_mask=everything, max_new_tokens=OUTPUTS, do_sample=False, pad_token_id=0)
            found[request.index] = whole[0, prompt.shape[1] :].tolist()
        return found

    return generate


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_blocks", "drafts"), [("llama", 22, False), ("qwen3-windows", 60, False), ("llama", 22, True)]
)
@pytest.mark.req("KV-01", "KV-12", "KV-25", "PC-15", "PC-19", "CHK-05", "PRE-16")
def test_tokens_equal_transformers(checkpoint, build_runner, monkeypatch, expected, name, num_blocks, drafts):
    """Also as its own draft model, whose keys and values lie in the same pages: a draft that rests on NaN is wrong."""
    due = expected(name)
    for depth in (1,) if drafts else (1, 2):
        runner = build_runner(checkpoint(name), **(drafting(checkpoint(name)) if drafts else {"scheduler": SCHEDULER}))
        if drafts:
            drafts_pay(monkeypatch)
            runner.warm_up()
        config = msgspec.structs.replace(runner.config, depth=depth)
        executor = PoisoningExecutor(runner)
        core = EngineCore(config, executor, num_blocks, epoch=1, groups=runner.kv_layout().groups)
        pool = core.scheduler.kv.pool
        order = np.random.default_rng(depth).permutation(list(pool.free_list)).tolist()
        pool.free_list = OrderedDict[int, None].fromkeys(order)
        executor.watch(pool)
        tokens: dict[int, list[int]] = {index: [] for index in due}
        # The second half finds what the first has left.
        for batch in (requests()[:7], requests()[7:]):
            for request in batch:
                core.handle(request)
            while core.has_work:
                if (frame := core.step()) is not None:
                    assert all(ended.reason == FinishReason.LENGTH for ended in frame.finished), frame.finished
                    offsets, ids = np.frombuffer(frame.offsets, np.int32), np.frombuffer(frame.token_ids, np.int32)
                    for at, index in enumerate(np.frombuffer(frame.indexes, np.int64).tolist()):
                        tokens[index] += ids[offsets[at] : offsets[at + 1]].tolist()
        assert tokens == due
        stats = core.stats()
        if drafts:
            # Beside rows with drafts, others verify guesses, which are wrong.
            found = stats.step.drafts
            assert sum(found.accepted) > 0.85 * sum(found.drafted) > 50
        assert stats.prefix_hits > 0 and stats.preemptions > 0 and executor.num_poisoned > 2 * num_blocks
