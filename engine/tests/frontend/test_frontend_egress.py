"""The pass over the core's frames: texts, stops, logprobs, counts, aborts."""

import asyncio
from collections.abc import Sequence

import pytest
from frontend_fakes import logprob_columns, step_frame
from tokenizers import Tokenizer

from penstock.engine.frontend.detokenizer import Detokenizer
from penstock.engine.frontend.egress import Egress
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.generation import Choice, Generation
from penstock.engine.frontend.observe.metrics import EngineMetrics
from penstock.engine.frontend.vocabulary import Vocabulary
from penstock.engine.messages import QUEUE_FULL, Finished, FinishReason, Started


class Bench:
    """An egress with generations of choices numbered from 0."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        self.metrics = EngineMetrics()
        self.egress = Egress(self.metrics)
        self._next = 0

    def generation(
        self, n: int = 1, stops: Sequence[str] = (), stream: bool = True, logprobs: int | None = None, min_tokens: int = 0
    ) -> Generation:
        ends = frozenset({9})
        choices = [
            Choice(self._next + k, k, 3, Detokenizer(self.vocabulary, []), stops, ends, logprobs, min_tokens) for k in range(n)
        ]
        self._next += n
        generation = Generation(choices, n, stream, arrival=100.0)
        self.egress.add(generation)
        return generation

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids


@pytest.fixture
def bench(byte_level: Tokenizer) -> Bench:
    return Bench(byte_level)


def taken(generation: Generation) -> tuple[str, str | None, str | int | None]:
    delta = generation.choices[0].take()
    return (delta.text, delta.finish_reason, delta.stop_reason) if delta else ("", None, None)


@pytest.mark.req("EG-16")
async def test_what_was_not_taken_is_merged_without_loss(bench: Bench) -> None:
    generation, ids = bench.generation(), bench.ids("the river turns the wheel")
    assert len(ids) >= 4
    await bench.egress.process(step_frame({0: ids[:1]}))
    first = taken(generation)[0]
    for token in ids[1:]:
        await bench.egress.process(step_frame({0: [token]}))
    await bench.egress.process(step_frame({}, [Finished(0, FinishReason.LENGTH)]))
    assert (first + taken(generation)[0], generation.finished) == ("the river turns the wheel", True)
    assert generation.choices[0].take() is None
    assert len(bench.egress) == 0


@pytest.mark.req("EG-15")
async def test_an_interval_gathers_tokens_but_for_the_first_and_the_last(bench: Bench, byte_level: Tokenizer) -> None:
    choice = Choice(0, 0, 3, Detokenizer(bench.vocabulary, []), (), frozenset(), None, interval=4)
    generation = Generation([choice], 1, True, arrival=100.0)
    bench.egress.add(generation)
    ids = bench.ids("the river turns the wheel and the wheel turns the mill")
    sizes: list[int] = []
    for at, token in enumerate(ids):
        end = [Finished(0, FinishReason.LENGTH)] if at == len(ids) - 1 else []
        await bench.egress.process(step_frame({0: [token]}, end))
        if (delta := choice.take()) is not None:
            sizes.append(len(delta.token_ids))
            await asyncio.wait_for(generation.changed(), 60)
    rest = (len(ids) - 1) % 4
    assert len(ids) >= 9 and sizes == [1, *[4] * ((len(ids) - 1) // 4), *([rest] if rest else [])]


@pytest.mark.req("EG-08", "EG-09", "EG-10", "EG-19")
async def test_a_stop_string_ends_the_choice_here_and_aborts_it_there_once(bench: Bench) -> None:
    generation, ids = bench.generation(stops=["wheel"]), bench.ids("the river turns the wheel and more")
    aborts = [await bench.egress.process(step_frame({0: [token]})) for token in ids]
    assert [batch for batch in aborts if batch] == [[0]]
    assert taken(generation) == ("the river turns the ", "stop", "wheel")
    assert generation.usage.completion_tokens == len(bench.ids("the river turns the wheel"))


@pytest.mark.req("SMP-19", "EG-18")
async def test_no_stop_string_is_looked_for_before_min_tokens(bench: Bench) -> None:
    first, ids = len(bench.ids("the wheel")), bench.ids("the wheel turns the wheel and more")
    generation = bench.generation(stops=["wheel"], min_tokens=first)
    for token in ids:
        await bench.egress.process(step_frame({0: [token]}))
    assert taken(generation) == ("the wheel turns the ", "stop", "wheel")


@pytest.mark.req("SMP-19", "EG-18")
@pytest.mark.parametrize("min_tokens", [2, 3, 4])
async def test_a_stop_string_that_begins_before_min_tokens_and_ends_after_them_counts(bench: Bench, min_tokens: int) -> None:
    generation, shown = bench.generation(stops=["END", "b"], min_tokens=min_tokens), ""
    for character in "abEND":
        assert not generation.finished
        await bench.egress.process(step_frame({0: [bench.tokenizer.token_to_id(character)]}))
        shown += taken(generation)[0]
    choice = generation.choices[0]
    assert (shown, choice.finish_reason, choice.stop_reason) == ("ab", "stop", "END")
    assert generation.usage.completion_tokens == 5


@pytest.mark.req("EG-17")
async def test_a_stop_inside_a_burst_cuts_text_logprobs_and_counts_alike(bench: Bench) -> None:
    generation, ids = bench.generation(stops=["wheel"], logprobs=1), bench.ids("the wheel turns")
    columns = logprob_columns(range(len(ids)), [[(token, -0.5)] for token in ids])
    end = Finished(0, FinishReason.LENGTH)
    assert await bench.egress.process(step_frame({0: ids}, [end], logprobs=columns)) == []  # the core has ended it too
    delta = generation.choices[0].take()
    assert delta is not None
    upto = len(bench.ids("the wheel"))
    assert (delta.text, delta.finish_reason) == ("the ", "stop")
    assert [entry.token_id for entry in delta.logprobs] == delta.token_ids == ids[:upto]
    assert generation.usage.completion_tokens == upto


@pytest.mark.req("EG-06")
async def test_a_held_tail_comes_with_the_end(bench: Bench) -> None:
    generation = bench.generation(stops=["the mill"])
    await bench.egress.process(step_frame({0: bench.ids("the mi")}))
    assert taken(generation) == ("", None, None)
    await bench.egress.process(step_frame({}, [Finished(0, FinishReason.LENGTH)]))
    assert taken(generation) == ("the mi", "length", None)


@pytest.mark.req("EG-08")
@pytest.mark.parametrize(("token", "reason"), [(9, 9), (1, None)])
async def test_a_stop_token_has_no_text_and_is_named_if_the_client_chose_it(bench: Bench, token: int, reason: int | None) -> None:
    generation = bench.generation()
    ids = [*bench.ids("the"), token]
    await bench.egress.process(step_frame({0: ids}, [Finished(0, FinishReason.STOP, stop_token_id=token)]))
    assert taken(generation) == ("the", "stop", reason)
    assert generation.usage.completion_tokens == len(ids)


@pytest.mark.req("EG-11")
async def test_output_for_unknown_choices_is_ignored(bench: Bench) -> None:
    generation = bench.generation()
    assert bench.egress.forget(generation) == [0]
    ended = [Finished(0, FinishReason.ABORT), Finished(44, FinishReason.STOP)]
    assert await bench.egress.process(step_frame({0: [5], 77: [5]}, ended, [Started(0, 1)])) == []
    assert generation.choices[0].take() is None
    assert bench.metrics.finished.by_value(bench.metrics.table.totals())["abort"] == 1


async def test_one_request_fails_alone_and_takes_its_other_choices_along(bench: Bench) -> None:
    failing, other = bench.generation(n=2), bench.generation()
    aborts = await bench.egress.process(step_frame({2: [5]}, [Finished(0, FinishReason.ERROR, error="logits are NaN")]))
    assert aborts == [1]
    with pytest.raises(ApiError, match="logits are NaN") as caught:
        await failing.changed()
    assert (caught.value.status, caught.value.retriable) == (500, False)
    await other.changed()
    assert len(bench.egress) == 1


async def test_a_full_queue_is_retriable(bench: Bench) -> None:
    generation = bench.generation()
    await bench.egress.process(step_frame({}, [Finished(0, FinishReason.ERROR, error="full", code=QUEUE_FULL)]))
    with pytest.raises(ApiError) as caught:
        await generation.changed()
    assert (caught.value.status, caught.value.retriable) == (503, True)


async def test_a_request_that_is_not_streamed_wakes_once(bench: Bench) -> None:
    generation = bench.generation(n=2, stream=False)
    waiting = asyncio.create_task(generation.changed())
    await bench.egress.process(step_frame({0: [70]}, [Finished(0, FinishReason.LENGTH)]))
    await asyncio.sleep(0)
    assert not waiting.done()
    await bench.egress.process(step_frame({1: [70]}, [Finished(1, FinishReason.LENGTH)]))
    await waiting
    assert generation.finished


@pytest.mark.req("EG-13", "IPC-12")
async def test_a_large_frame_lets_others_have_their_turn(bench: Bench) -> None:
    generations = [bench.generation() for _ in range(1000)]
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await bench.egress.process(step_frame({at: [70] for at in range(1000)}))
    task.cancel()
    assert turns >= 7
    assert all(generation.choices[0].take() for generation in generations)


@pytest.mark.req("MET-01", "MET-02", "MET-03")
async def test_latencies_are_counted_by_the_cores_clock(bench: Bench) -> None:
    bench.generation()
    bench.generation()
    await bench.egress.process(step_frame({0: [70], 1: [70]}, [Finished(1, FinishReason.LENGTH)], time=100.5))
    await bench.egress.process(step_frame({0: [70, 71]}, time=100.8))
    await bench.egress.process(step_frame({0: [70]}, [Finished(0, FinishReason.STOP)], time=101.1))
    text = {sample.name: sample.value for f in bench.metrics.families() for sample in f.samples if "le" not in sample.labels}
    assert text["penstock_time_to_first_token_seconds_count"] == 2
    assert text["penstock_time_to_first_token_seconds_sum"] == pytest.approx(1.0)
    assert text["penstock_inter_token_latency_seconds_count"] == 3  # 4 tokens
    assert text["penstock_inter_token_latency_seconds_sum"] == pytest.approx(0.6)
    assert text["penstock_request_time_per_output_token_seconds_count"] == 1
    assert text["penstock_request_time_per_output_token_seconds_sum"] == pytest.approx(0.2)
    assert text["penstock_generation_tokens_total"] == 5


async def test_prompt_tokens_add_up_by_source(bench: Bench) -> None:
    generation = bench.generation()
    await bench.egress.process(step_frame({0: [70]}, started=[Started(0, cached_tokens=2)]))
    assert bench.metrics.prompt_tokens.by_value(bench.metrics.table.totals()) == {"local_cache": 2, "computed": 1}
    assert generation.usage.cached_tokens == 2
