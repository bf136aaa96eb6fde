"""The server against its own description: what it generates from it is answered as it says, and by no error of ours."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import schemathesis
from frontend_process import Server, make_llama, serving
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openai import OpenAI
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from penstock.engine.frontend.openai import answers
from penstock.engine.frontend.openai.openapi import ENDPOINTS, document
from penstock.prompt.processor import CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH, RESPONSES_PATH
from testing import patient

SMALL = {"max_tokens": 4, "max_completion_tokens": 4, "n": 2, "best_of": 2, "min_tokens": 2}
LIMITS = {CHAT_PATH: "max_tokens", COMPLETIONS_PATH: "max_tokens", RESPONSES_PATH: "max_output_tokens"}


@pytest.fixture(scope="module")
def server(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_llama(tmp_path_factory.mktemp("llama"), tokenizer_files)
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with serving(model, tmp_path_factory.mktemp("log") / "serve.log", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def embedder(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_llama(tmp_path_factory.mktemp("embedder"), tokenizer_files)
    with serving(model, tmp_path_factory.mktemp("log") / "serve.log", "--runner", "pooling") as running:
        yield running


DESCRIBED = schemathesis.openapi.from_dict(document("0"))


@pytest.mark.slow
@pytest.mark.parametrize("path", [endpoint.path for endpoint in ENDPOINTS])
@settings(
    max_examples=20,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(data=st.data())
def test_what_the_description_allows_is_answered_as_it_says(
    server: Server, embedder: Server, path: str, data: st.DataObject
) -> None:
    case = data.draw(DESCRIBED[path]["POST"].as_strategy())
    if isinstance(case.body, dict):  # the right name, and few tokens: the rest is for the server to judge
        case.body.update({name: value for name, value in SMALL.items() if name in case.body})
        if "model" in case.body:
            case.body["model"] = "tiny"
        if path in LIMITS:
            case.body[LIMITS[path]] = 4
    response = case.call(base_url=(embedder if path == EMBEDDINGS_PATH else server).url, timeout=patient.LIMIT_S)
    assert response.status_code < 500, response.text
    checks: list[Any] = [status_code_conformance, content_type_conformance]
    if not (isinstance(case.body, dict) and case.body.get("stream")):
        checks.append(response_schema_conformance)
    case.validate_response(response, checks=checks)


def test_the_description_is_served(server: Server) -> None:
    served = patient.get(f"{server.url}/openapi.json").json()
    assert served["paths"] == json.loads(json.dumps(document("0")["paths"]))


def test_the_description_has_every_field_and_nothing_else() -> None:
    found = document("0")["components"]["schemas"]
    for endpoint in ENDPOINTS:
        assert set(found[endpoint.request.__name__]["properties"]) == set(endpoint.request.__struct_fields__)
        assert found[endpoint.request.__name__]["additionalProperties"] is False
    json.dumps(found)


EXTRA = {"return_token_ids": True, "prompt_logprobs": 2}


def test_answers_have_the_described_shapes(server: Server) -> None:
    """With everything that they can have."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    text = {"model": "tiny", "prompt": ["x", "y"], "max_tokens": 3, "logprobs": 2, "echo": True, "best_of": 2}
    for path, body, shape in (
        ("/v1/chat/completions", chat | EXTRA, answers.ChatCompletion),
        ("/v1/completions", text | EXTRA, answers.Completion),
        ("/v1/responses", {"model": "tiny", "input": "x", "max_output_tokens": 3}, answers.Response),
    ):
        response = patient.post(f"{server.url}{path}", json=body)
        assert response.status_code == 200, response.text
        msgspec.json.decode(response.content, type=shape)


@pytest.mark.req("LP-01")
def test_an_echoed_prompt_has_the_logprobs_of_generation(server: Server) -> None:
    """As evaluation harnesses ask: nothing generated, a number for every token but the first."""
    ids = list(range(70, 90))
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        echoed = client.completions.create(model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=1).choices[0]
        columns = echoed.logprobs
        assert columns and columns.token_logprobs and columns.text_offset and columns.tokens
        assert columns.token_logprobs[0] is None and len(columns.token_logprobs) == len(ids)
        assert "".join(columns.tokens) == echoed.text
        assert [
            echoed.text[a:][: len(name)] for a, name in zip(columns.text_offset, columns.tokens, strict=True)
        ] == columns.tokens
        forced = client.completions.create(
            model="tiny", prompt=ids[:-1], max_tokens=1, logprobs=0, extra_body={"allowed_token_ids": ids[-1:]}
        ).choices[0]
        assert forced.logprobs and forced.logprobs.token_logprobs
        assert columns.token_logprobs[-1] == pytest.approx(forced.logprobs.token_logprobs[0], abs=1e-5)


def test_the_best_of_several_is_the_likeliest(server: Server) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        fields: Any = {"model": "tiny", "prompt": "the mill", "max_tokens": 6, "logprobs": 0, "seed": 3}
        every = client.completions.create(n=6, **fields).choices
        best = client.completions.create(n=2, best_of=6, **fields)
        means = sorted((sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens), c.text) for c in every)  # type: ignore[union-attr,arg-type]
        assert [choice.text for choice in best.choices] == [text for _, text in means[:-3:-1]]
        assert [choice.index for choice in best.choices] == [0, 1] and best.usage and best.usage.completion_tokens == 36


@pytest.mark.req("RL-11", "RL-03")
def test_each_kind_of_stop_is_told(server: Server) -> None:
    def choice(**fields: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": "the mill", "temperature": 0, "max_tokens": 20, **fields}
        return patient.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]

    def ask(**fields: Any) -> tuple[str, Any]:
        found = choice(**fields)
        return found["finish_reason"], found["stop_reason"]

    assert ask() == ("length", None)
    assert ask(max_tokens=None) == ("length", None)  # the default
    assert ask(allowed_token_ids=[1]) == ("stop", None)  # the model's own end
    assert ask(allowed_token_ids=[70], stop_token_ids=[70]) == ("stop", 70)
    text = choice()["text"]
    assert ask(stop=text[4:6]) == ("stop", text[4:6])
    assert ask(prompt=list(range(70, 270)) * 20, max_tokens=None, allowed_token_ids=[70])[0] == "length"
    pattern = {"max_pattern_size": 1, "min_count": 4}
    assert ask(allowed_token_ids=[70], repetition_detection=pattern)[0] == "repetition"
