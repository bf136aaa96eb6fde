"""Requests that leave sampling parameters out: what a checkpoint's generation_config.json makes of them, by every way in."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from frontend_process import Server, make_llama, serving

from penstock.engine import LLM, SamplingParams
from penstock.engine.config import GenerationDefaults, ModelConfig
from penstock.engine.frontend.openai.protocol import parse_chat, parse_completion
from penstock.engine.frontend.openai.requests import sampling_params
from penstock.engine.frontend.python.params import default_params
from testing import patient

# With these a draw is greedy, and seeds change nothing; without top_k it is nearly uniform.
FIELDS = {"temperature": 2.0, "top_k": 1, "max_new_tokens": 12, "eos_token_id": 1}
OPENAI = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
PROMPT = "the wheel turns the mill"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/responses": {"input": PROMPT},
}


@pytest.fixture(scope="module")
def model(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_llama(tmp_path_factory.mktemp("llama"), tokenizer_files)
    (path / "generation_config.json").write_text(json.dumps(FIELDS))
    return path


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("log") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def neutral(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--generation-config", "vllm", "--override-generation-config", '{"max_new_tokens": 9}']
    with serving(model, tmp_path_factory.mktemp("log") / "log", *flags) as running:
        yield running


def ask(server: Server, path: str, **fields: Any) -> tuple[str, int]:
    """The answer's text and its tokens."""
    body = {"model": "tiny", "ignore_eos": True, **BODIES[path], **fields}
    response = patient.post(server.url + path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    if path == "/v1/responses":
        return answer["output"][0]["content"][0]["text"], answer["usage"]["output_tokens"]
    [choice] = answer["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text, answer["usage"]["completion_tokens"]


def limit(path: str, tokens: int) -> dict[str, int]:
    return {"max_output_tokens" if path == "/v1/responses" else "max_tokens": tokens}


@pytest.mark.parametrize("path", BODIES)
def test_what_a_request_leaves_out_is_the_authors_and_what_it_says_wins(server: Server, path: str) -> None:
    greedy = ask(server, path, temperature=0, **limit(path, 24))
    assert ask(server, path, seed=1, **limit(path, 24)) == greedy
    assert ask(server, path, seed=2, top_k=None, temperature=None, **limit(path, 24)) == greedy
    assert ask(server, path, seed=1, top_k=0, **limit(path, 24)) != greedy


@pytest.mark.parametrize("path", BODIES)
def test_without_the_authors_sampling_openais_is_the_default(server: Server, neutral: Server, path: str) -> None:
    asked = {"seed": 3, **limit(path, 8)}
    assert ask(neutral, path, **asked) == ask(server, path, **asked, **OPENAI) != ask(server, path, **asked)


@pytest.mark.parametrize("path", BODIES)
def test_the_authors_max_new_tokens_is_a_default_and_an_overrides_a_limit(server: Server, neutral: Server, path: str) -> None:
    assert ask(server, path, **limit(path, 24))[1] == 24
    assert ask(neutral, path, **limit(path, 24))[1] == 9
    assert ask(neutral, path, **limit(path, 4))[1] == 4
    # Completions have OpenAI's 16.
    assert ask(server, path)[1] == (16 if path == "/v1/completions" else 12)
    assert ask(neutral, path)[1] == 9


def test_the_defaults_are_told(server: Server, neutral: Server) -> None:
    body = {"model": "tiny", "input": PROMPT, "max_output_tokens": 1}
    assert patient.post(f"{server.url}/v1/responses", json=body).json()["temperature"] == 2.0
    for told, top_k in ((server, 1), (neutral, 0)):
        schemas = patient.get(f"{told.url}/openapi.json").json()["components"]["schemas"]
        assert schemas["ChatRequest"]["properties"]["top_k"]["default"] == top_k
    log = server.log.read_text()
    assert "top_k 1 (" in log and "generation_config.json" in log
    assert "max_new_tokens 9 (--override-generation-config)" in neutral.log.read_text()


def test_a_script_that_gives_no_parameters_gets_them_too(model: Path) -> None:
    flags: dict[str, Any] = {"kv_cache_memory_bytes": 4 * 2**20, "override_generation_config": {"max_new_tokens": 7}}
    with LLM(str(model), in_process=True, **flags) as llm:

        def tokens(params: SamplingParams | None) -> list[int]:
            [output] = llm.generate(PROMPT, params, progress=False)
            return output.outputs[0].token_ids

        whole = tokens(SamplingParams(temperature=0, ignore_eos=True))
        assert len(whole) == 16, "explicit parameters are whole"
        assert tokens(SamplingParams(seed=1, ignore_eos=True)) != whole
        cut = next((at + 1 for at, token in enumerate(whole) if token == 1), 7)
        assert tokens(None) == whole[: min(cut, 7)]

        async def last() -> list[int]:
            outputs = [output async for output in llm._llm.generate(PROMPT)]
            return outputs[-1].outputs[0].token_ids

        assert llm._loop.run(last()) == whole[: min(cut, 7)]


def test_default_tokens_fit_into_what_the_prompt_leaves() -> None:
    def model(**defaults: Any) -> ModelConfig:
        return ModelConfig(
            path=Path(),
            served_names=("m",),
            architecture="x",
            dtype="float32",
            max_model_len=64,
            eos_token_ids=(1,),
            generation_defaults=GenerationDefaults(**defaults),
        )

    chat, completion = parse_chat({"model": "m", "messages": []}), parse_completion({"model": "m", "prompt": "x"})
    for defaults, prompt, chats, completions, offline in (
        ({}, 60, 4, 4, 4),
        ({"max_tokens": 30}, 10, 30, 16, 30),
        ({"max_tokens": 30}, 60, 4, 4, 4),
        ({"max_tokens": 8, "max_tokens_limit": 8}, 10, 8, 8, 8),
    ):
        given = model(**defaults)
        assert sampling_params(chat, prompt, given, 100, seed=1).max_tokens == chats
        assert sampling_params(completion, prompt, given, 100, seed=1).max_tokens == completions
        assert default_params(given, prompt).max_tokens == offline
