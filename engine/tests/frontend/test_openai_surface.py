"""Chats with tools and reasoning, responses, echo and the other parts of OpenAI's API, in front of a core that does what the test
says."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from frontend_fakes import FakeCore
from openai import AsyncOpenAI, AuthenticationError, BadRequestError
from tokenizers import Tokenizer

from penstock.engine.config import ModelConfig
from penstock.engine.frontend.async_llm import AsyncLLM
from penstock.engine.frontend.http.keys import OPEN_PATHS
from penstock.engine.frontend.http.routes.tokens import MAX_TOKENS
from penstock.engine.frontend.http.server import ApiServer
from penstock.engine.frontend.http.settings import ApiSettings
from penstock.engine.frontend.openai.parsing.registry import ParserConfig
from penstock.engine.messages import FinishReason
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.processor import PromptProcessor

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ reasoning_effort | default('') }}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.reasoning_content }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{{ '<think>' if enable_thinking }}{% endif %}"
)
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
MESSAGES: Any = [{"role": "user", "content": "the mill"}]
THOUGHT_AND_CALL = (
    "<think>hm 水</think>\n\nI look. "
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)
TOOLS = ApiSettings(parsers=ParserConfig("hermes", "qwen3", True))
ON_CHANNELS = (
    "<|channel|>analysis<|message|>hm 水<|end|><|start|>assistant<|channel|>commentary<|message|>\n\nI look. <|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Zürich"}<|call|>'
    "<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|><|call|>"
)
HARMONY_TOOLS = ApiSettings(parsers=ParserConfig("openai", "openai_gptoss", True))


class Site:
    """A served engine, OpenAI's client of it, and a plain one."""

    def __init__(self, core: FakeCore, llm: AsyncLLM, url: str) -> None:
        self.core, self.llm = core, llm
        self.openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="two", max_retries=0)
        self.http = aiohttp.ClientSession(url)

    async def close(self) -> None:
        await self.openai.close()
        await self.http.close()


Start = Callable[..., Awaitable[Site]]


@pytest.fixture
async def start(byte_level: Tokenizer, tokenizer_files: Path, tmp_path: Path) -> AsyncIterator[Start]:
    closers: list[Callable[[], Awaitable[None]]] = []

    async def serve(
        says: str | list[str] = "x", settings: ApiSettings | None = None, reason: FinishReason = FinishReason.STOP
    ) -> Site:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / file).write_text((tokenizer_files / file).read_text())
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
        texts = [says] if isinstance(says, str) else says
        core = FakeCore(lambda request: (byte_level.encode(texts[request.index % len(texts)]).ids, reason))
        model = ModelConfig(
            path=tmp_path, served_names=("m",), architecture="x", dtype="float32", max_model_len=4096, eos_token_ids=(1,)
        )
        bundle = PromptBundle.from_checkpoint(tmp_path, served_names=("m",), block_size=4, hash_seed="s", max_model_len=4096)
        llm = AsyncLLM(core, model, PromptProcessor(bundle))
        runner = ApiServer(llm, settings).runner(shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await llm.start()
        site = Site(core, llm, f"http://127.0.0.1:{runner.addresses[0][1]}")
        closers.extend([site.close, runner.cleanup, llm.close])
        return site

    yield serve
    for close in closers:
        await close()


@pytest.mark.parametrize(
    ("says", "settings", "last"), [(THOUGHT_AND_CALL, TOOLS, {"city": "Paris"}), (ON_CHANNELS, HARMONY_TOOLS, {})]
)
async def test_calls_and_reasoning_are_the_same_streamed_and_whole(
    start: Start, says: str, settings: ApiSettings, last: dict[str, str]
) -> None:
    site = await start(says, settings)
    whole = (await site.openai.chat.completions.create(model="m", messages=MESSAGES, tools=[WEATHER])).choices[0]
    assert whole.finish_reason == "tool_calls"
    message = whole.message
    assert (message.content, message.reasoning_content, message.reasoning) == ("\n\nI look. ", "hm 水", "hm 水")  # type: ignore[attr-defined]
    assert [json.loads(call.function.arguments) for call in message.tool_calls or ()] == [{"city": "Zürich"}, last]  # type: ignore[union-attr]
    assert len({call.id for call in message.tool_calls or ()}) == 2

    async with site.openai.chat.completions.stream(model="m", messages=MESSAGES, tools=[WEATHER]) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    assert streamed.finish_reason == "tool_calls" and streamed.message.content == message.content
    calls = [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls or ()]
    assert calls == [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]  # type: ignore[union-attr]


async def test_a_call_that_max_tokens_cuts_off_says_length(start: Start) -> None:
    """A client that saw `tool_calls` would run a call whose arguments are half there."""
    half = THOUGHT_AND_CALL[: THOUGHT_AND_CALL.index("Paris")]
    site = await start(half, TOOLS, FinishReason.LENGTH)
    asked: Any = {"model": "m", "messages": MESSAGES, "tools": [WEATHER]}
    whole = (await site.openai.chat.completions.create(**asked)).choices[0]
    assert whole.finish_reason == "length" and whole.message.tool_calls
    chunks = [chunk async for chunk in await site.openai.chat.completions.create(**asked, stream=True)]
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]


async def test_a_prompt_counts_once_however_many_choices_it_has(start: Start, byte_level: Tokenizer) -> None:
    site = await start(" turns")
    prompts = ["the mill", "the river turns"]
    wanted = sum(len(byte_level.encode(prompt).ids) for prompt in prompts), 3 * 2 * len(byte_level.encode(" turns").ids)
    answer = await site.openai.completions.create(model="m", prompt=prompts, n=3)
    stream = await site.openai.completions.create(
        model="m", prompt=prompts, n=3, stream=True, stream_options={"include_usage": True}
    )
    streamed = [chunk.usage async for chunk in stream if chunk.usage]
    for usage in (answer.usage, *streamed):
        assert usage and (usage.prompt_tokens, usage.completion_tokens) == wanted
        assert usage.total_tokens == sum(wanted)
    assert len(streamed) == 1
    chat = await site.openai.chat.completions.create(model="m", messages=MESSAGES, n=2)
    assert chat.usage and chat.usage.prompt_tokens == len(site.core.added[-1].prompt_token_ids)


async def test_one_call_alone_where_no_more_are_wanted_and_none_without_tools(start: Start) -> None:
    site = await start(THOUGHT_AND_CALL, TOOLS)
    ask = site.openai.chat.completions.create
    one = (await ask(model="m", messages=MESSAGES, tools=[WEATHER], parallel_tool_calls=False)).choices[0].message
    assert len(one.tool_calls or ()) == 1
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        plain = (await ask(model="m", messages=MESSAGES, **fields)).choices[0]
        assert plain.message.tool_calls is None and "<tool_call>" in (plain.message.content or "")
        assert plain.finish_reason == "stop"


async def test_tools_need_their_flags_and_their_template(start: Start, byte_level: Tokenizer) -> None:
    site = await start()
    with pytest.raises(BadRequestError) as refused:
        await site.openai.chat.completions.create(model="m", messages=MESSAGES, tools=[WEATHER])
    assert refused.value.param == "tools" and "--enable-auto-tool-choice" in refused.value.message
    site.llm.processor._template = None
    with pytest.raises(BadRequestError, match="no chat template"):
        await site.openai.chat.completions.create(model="m", messages=MESSAGES)


async def test_a_conversation_with_calls_goes_back_into_the_prompt(start: Start, byte_level: Tokenizer) -> None:
    site = await start("done", TOOLS)
    answer = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]}  # fmt: skip
    turns: Any = [*MESSAGES, answer, {"role": "tool", "tool_call_id": "c1", "content": "rain"}]
    await site.openai.chat.completions.create(
        model="m",
        messages=turns,
        tools=[WEATHER],
        reasoning_effort="low",
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    prompt = byte_level.decode(site.core.added[-1].prompt_token_ids, skip_special_tokens=False)
    assert json.dumps(WEATHER) + "low" in prompt
    assert '<|assistant|>hmget_weather{"city": "Paris"}<|end|><|tool|>rain<|end|><|assistant|><think>' in prompt


async def test_an_open_thought_of_the_prompt_is_gone_on_with(start: Start) -> None:
    site = await start("hm</think>yes", TOOLS)
    answer = await site.openai.chat.completions.create(
        model="m", messages=MESSAGES, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
    )
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "yes")  # type: ignore[attr-defined]


async def test_a_last_message_is_continued(start: Start, byte_level: Tokenizer) -> None:
    site = await start("x")
    turns: Any = [*MESSAGES, {"role": "assistant", "content": "the wheel "}]
    await site.openai.chat.completions.create(model="m", messages=turns, extra_body={"continue_final_message": True})
    prompt = byte_level.decode(site.core.added[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|assistant|>the wheel ")
    await site.openai.chat.completions.create(model="m", messages=turns, extra_body={"add_generation_prompt": False})
    assert byte_level.decode(site.core.added[-1].prompt_token_ids, skip_special_tokens=False).endswith("the wheel <|end|>")


async def responses_events(site: Site, **fields: Any) -> tuple[list[Any], Any]:
    stream = await site.openai.responses.create(model="m", stream=True, **fields)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events, events[-1].response


async def test_responses_streamed_and_whole_have_the_same_items(start: Start) -> None:
    site = await start(THOUGHT_AND_CALL, TOOLS)
    tool: Any = {"type": "function", **WEATHER["function"]}
    whole = await site.openai.responses.create(model="m", input="the mill", instructions="turn", tools=[tool])
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output[0].content[0].text == "hm 水" and whole.output_text == "\n\nI look. "  # type: ignore[union-attr]
    assert json.loads(whole.output[2].arguments) == {"city": "Zürich"}  # type: ignore[union-attr]
    assert whole.status == "completed" and whole.usage and whole.usage.output_tokens_details.reasoning_tokens > 0
    events, last = await responses_events(site, input="the mill", instructions="turn", tools=[tool])
    assert [event.type for event in events[:3]] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert events[-1].type == "response.completed"

    def bare(item: Any) -> Any:
        return {name: value for name, value in item.to_dict().items() if name not in ("id", "call_id")}

    assert [bare(item) for item in last.output] == [bare(item) for item in whole.output]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert text == whole.output_text and arguments == '{"city": "Zürich"}{"city": "Paris"}'
    assert (
        [e.type for e in events].count("response.output_item.added")
        == [e.type for e in events].count("response.output_item.done")
        == 4
    )


async def test_items_go_back_as_the_same_prompt_as_a_chats(start: Start) -> None:
    site = await start(THOUGHT_AND_CALL, TOOLS)
    tool: Any = {"type": "function", **WEATHER["function"]}
    first = await site.openai.responses.create(model="m", input="the mill", tools=[tool])
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "the mill"}]}]
    items += [item.to_dict() for item in first.output]
    items += [{"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"}]  # type: ignore[union-attr]
    await site.openai.responses.create(model="m", input=items, tools=[tool])
    chat = (await site.openai.chat.completions.create(model="m", messages=MESSAGES, tools=[WEATHER])).choices[0].message
    turns: Any = [*MESSAGES, chat.to_dict(), {"role": "tool", "tool_call_id": "x", "content": "rain"}]
    await site.openai.chat.completions.create(model="m", messages=turns, tools=[WEATHER])
    assert site.core.added[1].prompt_token_ids == site.core.added[3].prompt_token_ids


async def test_a_response_cut_short_is_incomplete(start: Start) -> None:
    site = await start("the mill turns", reason=FinishReason.LENGTH)
    whole = await site.openai.responses.create(model="m", input="x", max_output_tokens=99)
    assert whole.status == "incomplete" and whole.incomplete_details and whole.incomplete_details.reason == "max_output_tokens"
    events, _ = await responses_events(site, input="x")
    assert events[-1].type == "response.incomplete"


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"tool_choice": "required"},
        {"truncation": "auto"},
        {"input": []},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"tools": [{"type": "web_search"}]},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"max_output_tokens": 0},
        {"max_output_tokens": 10**6, "input": "beyond the context with its output"},
    ],
)
async def test_what_responses_cannot_do_is_refused_by_name(start: Start, fields: dict[str, Any]) -> None:
    site = await start()
    with pytest.raises(BadRequestError) as refused:
        await site.openai.responses.create(**{"model": "m", "input": "x", **fields})
    assert (refused.value.param or "").startswith(next(iter(fields)))


async def test_echo_repeats_the_prompt(start: Start, byte_level: Tokenizer) -> None:
    site = await start(" turns")
    ids = byte_level.encode("the mill").ids
    for prompt in ("the mill", ["the mill"], ids, [ids]):
        answer = await site.openai.completions.create(model="m", prompt=prompt, echo=True)
        assert answer.choices[0].text == "the mill turns"
    stream = await site.openai.completions.create(model="m", prompt="the mill", echo=True, stream=True, n=2)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["the mill turns"] * 2
    alone = await site.openai.completions.create(model="m", prompt="the mill", echo=True, max_tokens=0)
    assert alone.choices[0].text == "the mill" and alone.usage and alone.usage.completion_tokens == 0


async def test_token_ids_come_back_where_they_are_asked_for(start: Start, byte_level: Tokenizer) -> None:
    site = await start("naïve 水車")
    ids, prompt = byte_level.encode("naïve 水車").ids, byte_level.encode("the mill").ids
    extra = {"return_token_ids": True}
    text = await site.openai.completions.create(model="m", prompt="the mill", extra_body=extra)
    assert (text.choices[0].token_ids, text.choices[0].prompt_token_ids) == (ids, prompt)  # type: ignore[attr-defined]
    chat = await site.openai.chat.completions.create(model="m", messages=MESSAGES, extra_body=extra)
    sent = site.core.added[-1].prompt_token_ids
    assert (chat.choices[0].token_ids, chat.prompt_token_ids) == (ids, sent)  # type: ignore[attr-defined]
    for api, fields in (
        (site.openai.completions, {"prompt": "the mill"}),
        (site.openai.chat.completions, {"messages": MESSAGES}),
    ):
        chunks = [chunk async for chunk in await api.create(model="m", stream=True, extra_body=extra, **fields)]
        assert [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", [])] == ids


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_stays_here_where_it_is_not_wanted(start: Start, stream: bool) -> None:
    site = await start(THOUGHT_AND_CALL, TOOLS)
    body = {"model": "m", "messages": MESSAGES, "tools": [WEATHER], "stream": stream, "include_reasoning": False}
    async with site.http.post("/v1/chat/completions", json=body) as response:
        text = await response.text()
    assert response.status == 200 and "I look." in text and "get_weather" in text
    assert "reasoning" not in text and "hm" not in text
    async with site.http.post("/v1/chat/completions", json=body | {"include_reasoning": True}) as response:
        assert '"reasoning":"hm' in await response.text()


async def test_a_prompt_is_cut_and_its_echo_with_it(start: Start, byte_level: Tokenizer) -> None:
    site = await start(" turns")
    ids = byte_level.encode("the river turns the mill").ids
    extra = {"truncate_prompt_tokens": 3, "return_token_ids": True}
    for prompt in ("the river turns the mill", ids):
        answer = await site.openai.completions.create(model="m", prompt=prompt, echo=True, extra_body=extra)
        choice: Any = answer.choices[0]
        assert choice.prompt_token_ids == ids[-3:] == site.core.added[-1].prompt_token_ids
        assert choice.text == byte_level.decode(ids[-3:]) + " turns"
        assert answer.usage and answer.usage.prompt_tokens == 3
    with pytest.raises(BadRequestError) as refused:
        await site.openai.completions.create(model="m", prompt="x", max_tokens=96, extra_body={"truncate_prompt_tokens": 4001})
    assert refused.value.param == "truncate_prompt_tokens"


async def test_usage_comes_with_every_chunk_where_it_is_asked_for(start: Start, byte_level: Tokenizer) -> None:
    site = await start("the mill")
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await site.openai.chat.completions.create(model="m", messages=MESSAGES, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
    assert counts == sorted(counts) and counts[-1] == len(byte_level.encode("the mill").ids)
    plain = await site.openai.chat.completions.create(
        model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    assert [chunk.usage is None for chunk in [chunk async for chunk in plain]].count(False) == 1


@pytest.mark.req("EG-04", "EG-08")
async def test_special_tokens_and_stops_are_shown_where_they_are_asked_for(start: Start) -> None:
    site = await start("the mill<|user|> turns")
    ask = site.openai.completions.create
    assert (await ask(model="m", prompt="x")).choices[0].text == "the mill turns"
    shown = await ask(model="m", prompt="x", extra_body={"skip_special_tokens": False})
    assert shown.choices[0].text == "the mill<|user|> turns"
    cut = await ask(model="m", prompt="x", stop=" mi", extra_body={"include_stop_str_in_output": True})
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("the mi", "stop")


async def test_tokens_and_back(start: Start, byte_level: Tokenizer) -> None:
    site = await start(settings=TOOLS)

    async def post(path: str, **body: Any) -> tuple[int, Any]:
        async with site.http.post(path, json=body) as response:
            return response.status, await response.json()

    ids = byte_level.encode("naïve 水車").ids
    status, answer = await post("/tokenize", model="m", prompt="naïve 水車", return_token_strs=True)
    assert (status, answer["tokens"], answer["count"], answer["max_model_len"]) == (200, ids, len(ids), 4096)
    assert len(answer["token_strs"]) == len(ids)
    assert (await post("/detokenize", tokens=ids))[1] == {"prompt": "naïve 水車"}
    await site.openai.chat.completions.create(model="m", messages=MESSAGES, tools=[WEATHER])
    _, chat = await post("/tokenize", messages=MESSAGES, tools=[WEATHER])
    assert chat["tokens"] == site.core.added[-1].prompt_token_ids
    # As pickers ask that have no tokenizer: with the request as it came.
    asked = {"model": "m", "messages": MESSAGES, "tools": [WEATHER], "max_tokens": 3, "stream": True}
    assert await post("/v1/chat/completions/render", **asked) == (200, {"model": "m", "token_ids": chat["tokens"]})
    status, both = await post("/v1/completions/render", model="m", prompt=["naïve 水車", "naïve"], max_tokens=1)
    assert (status, [it["token_ids"] for it in both]) == (200, [ids, byte_level.encode("naïve").ids])
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": ["x", "y"]}, "prompt"),
        ("/tokenize", {"prompt": "x", "colour": 1}, "colour"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [5] * (MAX_TOKENS + 1)}, "tokens"),
    ):
        status, answer = await post(path, **body)
        assert (status, answer["error"]["param"]) == (400, param)
    assert (await post("/tokenize", prompt="x", model="y"))[0] == 404
    assert (await post("/v1/completions/render", prompt="x", model="y"))[0] == 404


async def test_models_that_generate_do_not_embed(start: Start) -> None:
    site = await start()
    with pytest.raises(BadRequestError, match="cannot embed"):
        await site.openai.embeddings.create(model="m", input="x")


UI = "https://ui.example"


@pytest.mark.parametrize(("origins", "allowed"), [((UI,), UI), (("*",), "*")])
async def test_pages_of_allowed_origins_may_ask(start: Start, origins: tuple[str, ...], allowed: str) -> None:
    site = await start("x", ApiSettings(api_keys=("one",), allowed_origins=origins))
    asks = {"origin": UI, "access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    async with site.http.options("/v1/completions", headers=asks) as preflight:  # browsers send it without a key
        assert preflight.status == 204 and preflight.headers["access-control-allow-origin"] == allowed
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    for stream in (False, True):
        body, key = {"model": "m", "prompt": "x", "stream": stream}, {"authorization": "Bearer one"}
        async with site.http.post("/v1/completions", json=body, headers={"origin": UI} | key) as answer:
            assert answer.status == 200 and answer.headers["access-control-allow-origin"] == allowed
            assert answer.headers["access-control-expose-headers"] == "x-request-id"
    async with site.http.post("/v1/completions", json={}, headers={"origin": UI}) as refused:
        assert refused.status == 401 and refused.headers["access-control-allow-origin"] == allowed, "pages see errors too"
    async with site.http.get("/version") as answer:
        assert "access-control-allow-origin" not in answer.headers
        assert ("vary" in answer.headers) is (allowed == UI), "caches keep answers to different origins apart"


async def test_pages_of_other_origins_may_not(start: Start) -> None:
    site = await start("x", ApiSettings(allowed_origins=(UI,)))
    asks = {"origin": "https://other.example", "access-control-request-method": "POST"}
    async with site.http.options("/v1/completions", headers=asks) as preflight:
        assert (preflight.status, (await preflight.json())["error"]["param"]) == (403, "origin")
        assert "access-control-allow-origin" not in preflight.headers
    async with site.http.get("/version", headers={"origin": "https://other.example"}) as answer:
        assert "access-control-allow-origin" not in answer.headers
    site = await start("x")
    async with site.http.options("/v1/completions", headers={**asks, "origin": UI}) as preflight:
        assert preflight.status == 405 and "access-control-allow-origin" not in preflight.headers


async def test_keys_open_everything_but_what_probes_read(start: Start) -> None:
    site = await start("x", ApiSettings(api_keys=("one", "two")))
    assert (await site.openai.completions.create(model="m", prompt="x")).choices[0].text == "x"
    for key in ("three", "on", "twoo"):
        with pytest.raises(AuthenticationError) as refused:
            await site.openai.with_options(api_key=key).models.list()
        assert refused.value.code == "invalid_api_key"
    async with site.http.post("/tokenize", json={"prompt": "x"}) as response:
        assert response.status == 401 and response.headers["www-authenticate"] == "Bearer"
    for authorization in ("Basic one", "one", "Bearerone"):
        async with site.http.get("/v1/models", headers={"authorization": authorization}) as response:
            assert response.status == 401, f"{authorization}: a key counts as a bearer token alone"
    for path in OPEN_PATHS - {"/load"}:
        async with site.http.get(path) as response:
            assert response.status == 200, path
