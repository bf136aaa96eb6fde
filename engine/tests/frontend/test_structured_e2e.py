"""`penstock serve` on the demo model, held to grammars that the model knows nothing of, judged by the official client."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from frontend_process import Server, serving
from openai import AsyncOpenAI, BadRequestError, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from penstock.engine import LLM, SamplingParams

MODEL = Path(__file__).parents[3] / "examples/models/penstock-tiny"
MESSAGES: Any = [{"role": "user", "content": "Tell me of the mill."}]
PAIR = r"[a-f]\d-[a-f]\d"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Paris", "Rome"]}},
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "get_time", "strict": True}}


class Mill(BaseModel):
    """What the answers are: nothing in it is without a bound."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    wheels: list[Literal["overshot", "undershot"]] = Field(max_length=3)
    flow: Literal[1, 20] | None


@pytest.fixture(scope="module", params=["guidance", "xgrammar"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--max-model-len", "2032", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--async-scheduling")
    flags = (*flags, "--structured-outputs-config", json.dumps({"backend": request.param}))
    with serving(MODEL, tmp_path_factory.mktemp("log") / "serve.log", *flags) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as one:
        yield one


@pytest.mark.req("SO-01")
@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_a_parsed_answer_is_an_instance(client: OpenAI, temperature: float) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Mill, temperature=temperature, n=2, max_tokens=500, seed=3
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Mill)


def test_a_stream_is_what_the_whole_answer_is(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "mill", "schema": Mill.model_json_schema()}}
    asked: Any = {"model": "tiny", "messages": MESSAGES, "response_format": form, "seed": 5, "max_tokens": 500}
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    Mill.model_validate_json(whole.message.content or "")


def test_any_object_is_an_object(client: OpenAI) -> None:
    form: Any = {"type": "json_object"}
    found = client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=form, max_tokens=400, seed=2)
    [choice] = found.choices
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)
    else:
        assert (choice.message.content or "").startswith("{") and choice.stop_reason == "grammar_open"  # type: ignore[attr-defined]


@pytest.mark.req("SO-26")
@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"structured_outputs": {"regex": PAIR}}, PAIR),
        ({"guided_regex": PAIR}, PAIR),
        ({"guided_choice": ["yes, indeed", "no"]}, "yes, indeed|no"),
        ({"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c") "d"'}}, "a[bc]d"),
        ({"structured_outputs": {"regex": PAIR}, "ignore_eos": True, "min_tokens": 20}, PAIR),
        ({"structured_outputs": {"regex": PAIR}, "logit_bias": {"2": 100}}, PAIR),
        ({"structured_outputs": {"regex": PAIR}, "logprobs": 3}, PAIR),
    ],
)
def test_completions_follow_vllms_fields(client: OpenAI, extra: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        answer = client.completions.create(model="tiny", prompt="The mill", max_tokens=60, seed=seed, extra_body=extra)
        assert re.fullmatch(pattern, answer.choices[0].text), answer.choices[0].text
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_made_and_follows_its_schema(client: OpenAI, stream: bool) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    choices: list[Any] = [("required", True), ("required", False), (named, True)]
    for choice, parallel in choices:
        asked: Any = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER, CLOCK], "tool_choice": choice}
        asked |= {"parallel_tool_calls": parallel, "max_tokens": 1500, "seed": 1, "temperature": 0.5}
        if stream:
            calls, reason = [], None
            for chunk in client.chat.completions.create(**asked, stream=True):
                reason = chunk.choices[0].finish_reason or reason
                assert not chunk.choices[0].delta.content
                for call in chunk.choices[0].delta.tool_calls or ():
                    if call.index == len(calls):
                        calls.append(["", ""])
                    calls[call.index][0] += (call.function and call.function.name) or ""
                    calls[call.index][1] += (call.function and call.function.arguments) or ""
        else:
            [answer] = client.chat.completions.create(**asked).choices
            assert not answer.message.content
            calls = [[call.function.name, call.function.arguments] for call in answer.message.tool_calls or ()]  # type: ignore[union-attr]
            reason = answer.finish_reason
        assert calls and reason == "tool_calls" and (len(calls) == 1 or (parallel and choice == "required"))
        for name, arguments in calls:
            found = json.loads(arguments)
            assert name in (("get_weather",) if choice == named else ("get_weather", "get_time"))
            assert found == {} if name == "get_time" else found["city"] in ("Paris", "Rome") and 1 <= found["days"] <= 9


def test_a_format_beside_tools_gives_a_call_or_an_instance(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "mill", "schema": Mill.model_json_schema()}}
    for seed in range(4):
        [choice] = client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=[WEATHER], response_format=form, seed=seed, max_tokens=1000
        ).choices
        if choice.message.tool_calls:
            assert choice.message.tool_calls[0].function.name == "get_weather"  # type: ignore[union-attr]
        else:
            Mill.model_validate_json(choice.message.content or "")


def test_responses_take_the_same(client: OpenAI) -> None:
    answer = client.responses.parse(model="tiny", input="Tell me.", text_format=Mill, max_output_tokens=500)
    assert isinstance(answer.output_parsed, Mill)
    tool: Any = {"type": "function", "strict": True, **WEATHER["function"]}
    choice: Any = {"type": "function", "name": "get_weather"}
    found = client.responses.create(model="tiny", input="Tell me.", tools=[tool], tool_choice=choice)
    [call] = found.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Paris", "Rome")


@pytest.mark.req("SO-10", "SO-25")
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_a_400_that_names_it_and_others_go_on(client: OpenAI, stream: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(BadRequestError, match=r"not.*\$\.properties\.a\.not") as refused:
        client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=form, stream=stream)
    assert refused.value.param == "response_format.json_schema.schema" and refused.value.code == "invalid_grammar"
    form["json_schema"]["strict"] = False
    client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=form, stream=stream, max_tokens=5)
    with pytest.raises(BadRequestError, match=r"structured_outputs\.regex"):
        client.completions.create(model="tiny", prompt="x", extra_body={"structured_outputs": {"regex": "(a"}})


def test_an_answer_that_its_limit_cuts_says_that_the_grammar_was_open(client: OpenAI) -> None:
    extra = {"structured_outputs": {"regex": "a{500}"}}
    [choice] = client.completions.create(model="tiny", prompt="x", max_tokens=3, extra_body=extra).choices
    assert (choice.finish_reason, choice.stop_reason) == ("length", "grammar_open")  # type: ignore[attr-defined]


def test_free_and_structured_requests_share_steps(server: Server) -> None:
    async def ask() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            texts = []
            for crowd in (False, True):
                asks = [
                    client.completions.create(
                        model="tiny",
                        prompt="The mill",
                        max_tokens=30,
                        temperature=0,
                        extra_body={"structured_outputs": {"regex": rf"{number}:({PAIR})"}} if number % 2 else {},
                    )
                    for number in range(12)
                ]
                answers = await asyncio.gather(*asks) if crowd else [await one for one in asks]
                texts.append([answer.choices[0].text for answer in answers])
            assert texts[0] == texts[1]
            for number in range(1, 12, 2):
                assert re.fullmatch(rf"{number}:{PAIR}", texts[1][number])

    asyncio.run(ask())


@pytest.mark.slow
def test_python_takes_the_same() -> None:
    llm = LLM(str(MODEL), kv_cache_memory_bytes=2**22, max_model_len=256)
    params = SamplingParams(max_tokens=40, structured_outputs={"choice": ["mill", "wheel"]})  # type: ignore[arg-type]
    for output in llm.generate(["one", "two", "three"], params):
        assert output.outputs[0].text in ("mill", "wheel")
    with pytest.raises(ValueError, match="exactly one of"):
        llm.generate("x", SamplingParams(structured_outputs={}))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.req("SO-21")
def test_drafts_change_no_answer_under_a_grammar() -> None:
    """Drafts are accepted only as far as the grammar goes, and the streams are those without drafts."""
    pattern = r"(the (mill|wheel) turns, ){6}"
    tokens: list[list[list[int]]] = []
    flags: list[dict[str, Any]] = [{}, {"spec_method": "ngram", "spec_tokens": 4}]
    for drafts in flags:
        llm = LLM(str(MODEL), kv_cache_memory_bytes=2**22, max_model_len=256, **drafts)
        params = [SamplingParams(max_tokens=200, seed=seed, structured_outputs={"regex": pattern}) for seed in range(3)]  # type: ignore[arg-type]
        outputs = [output.outputs[0] for output in llm.generate(["the mill turns, the mill turns, "] * 3, params)]
        assert all(re.fullmatch(pattern, output.text) for output in outputs)
        tokens.append([list(output.token_ids) for output in outputs])
    assert tokens[0] == tokens[1]
