"""What the counters say against what passed through the model: an outside count at layer 0 and at the LM head.

With P, O and H the prompt, output and cached tokens of a request, every token but a request's last one enters layer 0 once,
unless the prefix cache supplies it or a preemption throws it away:

    rows into layer 0 = sum(P + O - 1 - H) + preempted tokens - tokens cached when preempted requests ran again
    rows into the LM head = tokens sampled = sum(O) + tokens thrown away in flight (none where one plan is in flight)
"""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from penstock.engine.config import SchedulerConfig
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import InlineExecutor, ThreadExecutor
from penstock.engine.frontend.detokenizer import Detokenizer
from penstock.engine.frontend.egress import Egress
from penstock.engine.frontend.generation import Choice, Generation
from penstock.engine.frontend.observe.metrics import EngineMetrics
from penstock.engine.frontend.vocabulary import Vocabulary
from penstock.engine.messages import AddRequest
from penstock.engine.sampling import SamplingParams
from penstock.engine.stats import CoreStats

VOCAB = 257
SCHEDULER = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48, watermark=0.0)


WORDS = Vocabulary(Tokenizer(models.WordLevel({str(token): token for token in range(VOCAB)}, unk_token="0")))


class Counted:
    """Calls something and counts the rows of its first argument."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.rows = inner, 0

    def __call__(self, hidden: Any, *more: Any) -> Any:
        self.rows += len(hidden)
        return self.inner(hidden, *more)


def requests(stops: bool) -> list[AddRequest]:
    """Fourteen of 1 to 124 prompt tokens, some with a common prefix; half of them may stop early."""
    rng = np.random.default_rng(1)
    common, found = rng.integers(0, VOCAB, 64).tolist(), []
    for index in range(14):
        tail = rng.integers(0, VOCAB, int(rng.integers(1, 60))).tolist()
        stop = tuple(range(0, VOCAB, 8)) if stops and index % 2 else ()
        sampling = SamplingParams(max_tokens=20 + index, temperature=0.8, seed=index, stop_token_ids=stop)
        found.append(AddRequest(index, f"r{index}", common * (index % 3 > 0) + tail, sampling, float(index)))
    return found


def serve(core: EngineCore, batch: list[AddRequest]) -> tuple[EngineMetrics, list[Choice], CoreStats]:
    """Runs all of them, through the frontend's pass over frames."""
    metrics = EngineMetrics("m")
    egress = Egress(metrics)
    choices = [Choice(one.index, 0, len(one.prompt_token_ids), Detokenizer(WORDS, []), (), frozenset(), None) for one in batch]
    for one, choice in zip(batch, choices, strict=True):
        egress.add(Generation([choice], 1, stream=False, arrival=one.arrival_time))
        core.handle(one)
    while core.has_work:
        if (frame := core.step()) is not None:
            asyncio.run(egress.process(frame))
    metrics.stats = stats = core.stats()
    assert len(egress) == 0 and stats.step is not None
    return metrics, choices, stats


@pytest.mark.parametrize("num_blocks", [200, 22], ids=["roomy", "preempting"])
@pytest.mark.parametrize(("depth", "stops"), [(1, False), (1, True), (2, False)])
@pytest.mark.req("MET-06")
def test_what_is_counted_is_what_was_computed(checkpoint, build_runner, depth: int, stops: bool, num_blocks: int):
    runner = build_runner(checkpoint("llama"), scheduler=SCHEDULER)
    runner.warm_up()
    runner.ops = replace(runner.ops, tape=None)  # which would not pass by what counts
    layer = runner.model.layers[0] = Counted(runner.model.layers[0])
    head = runner.model.lm_head = Counted(runner.model.lm_head)
    executor = InlineExecutor(runner) if depth == 1 else ThreadExecutor(runner)
    core = EngineCore(msgspec.structs.replace(runner.config, depth=depth), executor, num_blocks, epoch=1)
    try:
        metrics, choices, stats = serve(core, requests(stops))
    finally:
        executor.close()
    assert stats.step is not None
    assert (stats.preemptions > 0) == (num_blocks == 22) and stats.prefix_hits > 0
    assert stops == (min(choice.num_tokens - 20 - choice.index for choice in choices) < 0)

    totals = metrics.table.totals()
    sources = metrics.prompt_tokens.by_value(totals)
    assert sum(sources.values()) == sum(choice.prompt_tokens for choice in choices)
    assert sources["local_cache"] == stats.prefix_hits
    generated = metrics.generation_tokens.by_value(totals)[""]
    assert generated == sum(choice.num_tokens for choice in choices)

    again = stats.preempted_tokens - stats.resumed_cached_tokens
    assert layer.rows == sources["computed"] + generated - len(choices) + again == stats.step.tokens.total
    assert (again != 0) == (num_blocks == 22)
    assert head.rows == stats.step.sampled_tokens >= generated
    if depth == 1:
        assert head.rows == generated
