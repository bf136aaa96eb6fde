"""One suite for every way in: `LLM` with its core in this process and in another, `AsyncLLM`, and HTTP with the official client.

All of them must give the same tokens, texts, reasons and logprobs, and refuse the same things by the same names.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from frontend_process import make_llama, serving
from openai import OpenAI

from penstock.engine import LLM, AsyncLLM, CompletionOutput, EngineArgs, RequestFailed, RequestOutput, SamplingParams

MESSAGES: Any = [{"role": "user", "content": "the river turns the wheel"}]
PROMPT = "the wheel turns the mill"
FLAGS: dict[str, Any] = {"kv_cache_memory_bytes": 4 * 2**20, "served_model_name": ["tiny"]}
CONTEXT = 4096


class Answer(NamedTuple):
    """What all ways can tell of one sequence."""

    text: str
    tokens: int
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: list[float] | None
    """Of the sampled tokens."""


class Way:
    """A way to ask for completions and for the answer to `MESSAGES`; refusals are `ValueError`."""

    def complete(self, prompts: Sequence[Any], **params: Any) -> list[list[Answer]]:
        raise NotImplementedError

    def chat(self, **params: Any) -> Answer:
        raise NotImplementedError


def answers(output: RequestOutput) -> list[Answer]:
    return [_answer(one) for one in output.outputs]


def _answer(one: CompletionOutput) -> Answer:
    logprobs = None
    if one.logprobs is not None:
        logprobs = [entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids, strict=True)]
        assert one.cumulative_logprob == pytest.approx(sum(logprobs))
    return Answer(one.text, len(one.token_ids), one.finish_reason, one.stop_reason, logprobs)


class Offline(Way):
    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def complete(self, prompts: Sequence[Any], **params: Any) -> list[list[Answer]]:
        return [answers(output) for output in self.llm.generate(prompts, SamplingParams(**params), progress=False)]

    def chat(self, **params: Any) -> Answer:
        [output] = self.llm.chat(MESSAGES, SamplingParams(**params), progress=False)
        return answers(output)[0]


class Async(Way):
    """Over the engine of an `LLM`, in whose thread its event loop turns."""

    def __init__(self, llm: AsyncLLM, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.llm, self._run = llm, run

    async def _last(self, prompt: Any, params: dict[str, Any]) -> list[Answer]:
        """Of cumulative outputs, each of which must begin with the one before it."""
        seen = ""
        async for output in self.llm.generate(prompt, SamplingParams(**params)):
            assert output.outputs[0].text.startswith(seen)
            seen = output.outputs[0].text
        assert output.finished
        return answers(output)

    def complete(self, prompts: Sequence[Any], **params: Any) -> list[list[Answer]]:
        async def all_of_them() -> list[list[Answer]]:
            return await asyncio.gather(*(self._last(prompt, params) for prompt in prompts))

        return self._run(all_of_them())

    def chat(self, **params: Any) -> Answer:
        return self._run(self._last(self.llm.chat_prompt(MESSAGES), params))[0]


class Http(Way):
    """One request a prompt, all at once."""

    EXTENSIONS = ("top_k", "min_p", "stop_token_ids", "repetition_penalty", "min_tokens", "bad_words", "allowed_token_ids")
    MORE = ("ignore_eos", "prompt_logprobs")

    def __init__(self, url: str) -> None:
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)

    def _fields(self, params: dict[str, Any]) -> dict[str, Any]:
        extra = {name: params.pop(name) for name in (*self.EXTENSIONS, *self.MORE) if name in params}
        return {"model": "tiny", "extra_body": extra, **params}

    def complete(self, prompts: Sequence[Any], **params: Any) -> list[list[Answer]]:
        fields = self._fields(params)
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self._one(prompt, fields), prompts))

    def _one(self, prompt: Any, fields: dict[str, Any]) -> list[Answer]:
        try:
            body = self.client.completions.create(prompt=prompt, **fields)
        except openai.BadRequestError as error:
            raise ValueError(error.body["message"]) from None  # type: ignore[index]
        single = len(body.choices) == 1
        return [
            Answer(
                choice.text,
                body.usage.completion_tokens if single else -1,  # one count for all choices
                choice.finish_reason,
                choice.stop_reason,  # type: ignore[attr-defined]
                choice.logprobs.token_logprobs if choice.logprobs else None,  # type: ignore[arg-type]
            )
            for choice in body.choices
        ]

    def chat(self, **params: Any) -> Answer:
        body = self.client.chat.completions.create(messages=MESSAGES, **self._fields(params))
        [choice] = body.choices
        tokens = body.usage.completion_tokens  # type: ignore[union-attr]
        return Answer(choice.message.content or "", tokens, choice.finish_reason, choice.stop_reason, None)  # type: ignore[attr-defined]


class Ways(NamedTuple):
    inproc: Offline
    process: Offline
    asynchronous: Async
    http: Http


@pytest.fixture(scope="module")
def model(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), tokenizer_files)


@pytest.fixture(scope="module")
def ways(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    with ExitStack() as stack:
        server = stack.enter_context(serving(model, tmp_path_factory.mktemp("log") / "log"))
        process = stack.enter_context(LLM(str(model), **FLAGS))
        inproc = stack.enter_context(LLM(str(model), in_process=True, **FLAGS))
        yield Ways(Offline(inproc), Offline(process), Async(process._llm, process._loop.run), Http(server.url))


@pytest.fixture(params=Ways._fields)
def way(ways: Ways, request: pytest.FixtureRequest) -> Way:
    return getattr(ways, request.param)


@pytest.fixture(scope="module")
def greedy(ways: Ways) -> str:
    """What the model says greedily to `PROMPT`."""
    return ways.inproc.complete([PROMPT], temperature=0, max_tokens=40, ignore_eos=True)[0][0].text


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 24},
    "defaults": {"seed": 3},
    "seeded": {"seed": 5, "max_tokens": 24, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "penalties": {
        "temperature": 0,
        "max_tokens": 24,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.5,
    },
    "logprobs": {"temperature": 0, "max_tokens": 8, "logprobs": 3},
    "stop token": {"temperature": 0, "max_tokens": 40, "stop_token_ids": list(range(64, 192))},
    "min tokens": {"temperature": 0, "max_tokens": 40, "min_tokens": 9, "stop_token_ids": list(range(192, 307))},
    "bad words": {"temperature": 0, "max_tokens": 16, "bad_words": ["t", "he"]},
    "allowed tokens": {"seed": 1, "max_tokens": 8, "allowed_token_ids": [70, 71, 72]},
    "bias": {"temperature": 0, "max_tokens": 8, "logit_bias": {"70": 100}},
}


@pytest.mark.req("IPC-03")
@pytest.mark.parametrize("name", CASES)
def test_every_way_gives_the_same(ways: Ways, name: str) -> None:
    prompts = [PROMPT, "the river", list(range(70, 110))]
    expected = ways.inproc.complete(prompts, **CASES[name])
    assert all(one.tokens > 0 and one.finish_reason in ("stop", "length") for [one] in expected)
    for way in ways[1:]:
        assert way.complete(prompts, **CASES[name]) == expected
    if name == "stop token":
        assert all(one.finish_reason == "stop" and one.stop_reason in range(64, 192) for [one] in expected)
    if name == "min tokens":
        assert min(one.tokens for [one] in expected) >= 10 and any(one.finish_reason == "stop" for [one] in expected)


@pytest.mark.req("IPC-03")
def test_several_choices_of_one_prompt(ways: Ways) -> None:
    params: dict[str, Any] = {"n": 3, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    [expected] = ways.inproc.complete([PROMPT], **params)
    texts = [one.text for one in expected]
    assert len(set(texts)) == 3 and [one.tokens for one in expected] == [12] * 3
    for way in ways[1:]:
        assert [one.text for one in way.complete([PROMPT], **params)[0]] == texts


@pytest.mark.req("IPC-03")
def test_a_stop_string_ends_the_text_before_it(way: Way, greedy: str) -> None:
    stop = greedy[len(greedy) // 2 :][:3]
    [[one]] = way.complete([PROMPT], temperature=0, max_tokens=40, stop=[stop, "never there"], ignore_eos=True)
    assert (one.text, one.finish_reason, one.stop_reason) == (greedy[: greedy.index(stop)], "stop", stop)


@pytest.mark.req("IPC-03")
def test_a_chat_is_rendered_by_the_same_template(ways: Ways) -> None:
    expected = ways.inproc.chat(temperature=0, max_tokens=16)
    assert expected.tokens > 1
    assert [way.chat(temperature=0, max_tokens=16) for way in ways[1:]] == [expected] * 3


@pytest.mark.req("IPC-03", "LP-01")
def test_prompt_logprobs(ways: Ways) -> None:
    ids = list(range(70, 90))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    outputs = [way.llm.generate([ids], params, progress=False)[0].prompt_logprobs for way in (ways.inproc, ways.process)]
    body = ways.http.client.completions.create(model="tiny", prompt=ids, temperature=0, extra_body={"prompt_logprobs": 1})
    over_http = body.choices[0].prompt_logprobs  # type: ignore[attr-defined]
    assert outputs[0] == outputs[1] and outputs[0] is not None and outputs[0][0] is None is over_http[0]
    for entry, other in zip(outputs[0][1:], over_http[1:], strict=True):
        assert entry is not None and {str(token): one.logprob for token, one in entry.items()} == {
            token: one["logprob"] for token, one in other.items()
        }
        assert {one.rank for one in entry.values()} == {one["rank"] for one in other.values()} >= {1}


@pytest.mark.req("IPC-03")
@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 50, "max_tokens": 10}, "min_tokens"),
        ({"stop_token_ids": [320]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"max_tokens": CONTEXT}, "context"),
    ],
    ids=str,
)
def test_bad_parameters_are_refused_by_name(way: Way, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        way.complete([PROMPT], **params)


@pytest.mark.req("IPC-03")
@pytest.mark.parametrize(
    "prompt", ["", [], [320], "\ud800", "the mill " * 5000], ids=["empty", "no ids", "id", "surrogate", "long"]
)
def test_bad_prompts_are_refused(way: Way, prompt: Any) -> None:
    if prompt == "\ud800" and isinstance(way, Http):
        prompt = [-1]  # the client itself cannot encode half of a character
    with pytest.raises(ValueError, match=r"prompt|context"):
        way.complete([prompt], max_tokens=4)


@pytest.mark.req("IPC-03")
def test_a_long_mixed_batch_equals_one_by_one(ways: Ways) -> None:
    prompts: list[Any] = [[70 + at, *range(71, 72 + 5 * (at % 9))] for at in range(60)]
    params: dict[str, Any] = {"seed": 11, "max_tokens": 9}
    alone = [ways.inproc.complete([prompt], **params)[0] for prompt in prompts[::7]]
    for way in ways[:3]:
        crowded = way.complete(prompts, **params)
        assert len(crowded) == 60 and crowded[::7] == alone
    assert ways.http.complete(prompts[::7], **params) == alone


def idle(way: Offline) -> bool:
    """Whether the core holds no block and no request, by its own report."""
    report = way.llm._llm.load
    return report is not None and report.num_requests_running == 0 and report.kv_blocks_reclaimable == report.kv_blocks_total


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.req("IPC-03", "RL-17")
def test_leaving_the_loop_ends_the_request(ways: Ways) -> None:
    async def leave() -> int:
        outputs = 0
        async for _ in ways.asynchronous.llm.generate(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True)):
            outputs += 1
            if outputs == 3:
                break
        return outputs

    assert ways.asynchronous._run(leave()) == 3
    wait(lambda: idle(ways.process))


async def test_an_engine_in_an_asyncio_program(model: Path) -> None:
    """Each kind of output, cancelling, and what is said once it has ended."""
    args = EngineArgs(model=str(model), **FLAGS)
    async with AsyncLLM.from_args(args, in_process=True) as llm:
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "logprobs": 0}
        kinds: dict[str, list[RequestOutput]] = {}
        for kind in ("cumulative", "delta", "final_only"):
            kinds[kind] = [one async for one in llm.generate(PROMPT, SamplingParams(output_kind=kind, **fields), "me")]  # type: ignore[arg-type]
        whole, [final] = kinds["cumulative"][-1].outputs[0], kinds["final_only"]
        assert final.outputs[0] == whole and final.request_id == "me" and final.prompt == PROMPT
        deltas = [one.outputs[0] for one in kinds["delta"]]
        assert len(deltas) > 3
        assert "".join(one.text for one in deltas) == whole.text
        assert [token for one in deltas for token in one.token_ids] == whole.token_ids and len(whole.token_ids) == 12
        assert [entry for one in deltas for entry in one.logprobs or []] == whole.logprobs
        assert final.metrics.num_generation_tokens == 12
        assert final.metrics.arrival_time < final.metrics.first_token_time < final.metrics.last_token_time

        async def for_ever() -> None:
            async for _ in llm.generate(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True)):
                pass

        task = asyncio.create_task(for_ever())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(60):
            while llm.load is None or llm.load.kv_blocks_reclaimable != llm.load.kv_blocks_total:
                await asyncio.sleep(0.01)
        task = asyncio.create_task(for_ever())
        await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        for closed in (task, for_ever()):
            with pytest.raises(RequestFailed, match="the engine was closed"):
                await closed


@pytest.mark.parametrize("in_process", [False, True])
def test_closing_a_model_ends_what_another_thread_waits_for(model: Path, in_process: bool) -> None:
    llm = LLM(str(model), in_process=in_process, **FLAGS)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(llm.generate, [PROMPT] * 20, params, progress=False)
        time.sleep(0.2)
        llm.close()
        with pytest.raises(RequestFailed, match="the engine was closed"):
            waiting.result(10)
    llm.close()
    for used in (lambda: llm.generate(PROMPT), lambda: llm.chat([{"role": "user", "content": PROMPT}])):
        with pytest.raises(RuntimeError, match="this LLM was closed"):
            used()


def test_an_interrupt_ends_the_requests_and_not_the_engine(ways: Ways) -> None:
    """As Ctrl-C in a script: the main thread waits in `generate`."""
    # A shell starts what runs in its background deaf to interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            ways.process.llm.generate([PROMPT] * 8, SamplingParams(max_tokens=None, ignore_eos=True), progress=False)
    finally:
        signal.signal(signal.SIGINT, before)
    wait(lambda: idle(ways.process))
    assert ways.process.complete([PROMPT], temperature=0) == ways.inproc.complete([PROMPT], temperature=0)


def test_parameters_may_differ_by_prompt_and_must_be_as_many(ways: Ways) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 5)]
    outputs = ways.inproc.llm.generate([PROMPT, {"prompt_token_ids": [70, 71]}], params, progress=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5]
    assert [output.prompt for output in outputs] == [PROMPT, None]
    with pytest.raises(TypeError, match="must be SamplingParams or a list of them, not dict"):
        ways.inproc.llm.generate([PROMPT], {"max_tokens": 1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 for 1"):
        ways.inproc.llm.generate([PROMPT], params)
    for nothing in (None, 5, iter(["a"])):
        with pytest.raises(ValueError, match="prompts: a text, token ids or a sequence of prompts is expected"):
            ways.inproc.llm.generate(nothing)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompt_embeds"):
        ways.inproc.llm.generate([{"prompt_embeds": 1}])
