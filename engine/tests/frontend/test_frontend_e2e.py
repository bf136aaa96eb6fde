"""`penstock serve` on a random Llama, judged by the official client."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from frontend_process import Server, command, make_llama, serving
from openai import AsyncOpenAI, OpenAI

from penstock.api.headers import TENANT
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.processor import PromptProcessor
from testing import patient
from testing.ports import free_ports

MESSAGES: Any = [{"role": "user", "content": "the river turns the wheel"}]


@pytest.fixture(scope="module")
def llama(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), tokenizer_files)


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(llama, tmp_path_factory.mktemp("log") / "serve.log") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as one:
        yield one


def load(server: Server) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/load", timeout=10) as response:
        return json.load(response)


def wait_idle(server: Server) -> dict[str, Any]:
    """The load report once nothing runs or waits."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        report = load(server)
        if report["num_requests_running"] == 0 and not report["num_requests_waiting"]:
            return report
        time.sleep(0.05)
    raise AssertionError(f"still busy: {report}")


def wait_unready(server: Server) -> None:
    """Returns once a signal has reached the server."""
    deadline = time.monotonic() + 60
    while patient.get(f"{server.url}/ready").status_code != 503:
        assert time.monotonic() < deadline, "still ready"


def greedy(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, **fields)


def reference_text(llama: Path, max_new_tokens: int) -> str:
    """transformers' greedy answer to MESSAGES."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    bundle = PromptBundle.from_checkpoint(llama, served_names=("tiny",), block_size=16, hash_seed="", max_model_len=4096)
    processor = PromptProcessor(bundle)
    [prompt] = processor.tokens_of("/v1/chat/completions", {"messages": MESSAGES})
    inputs = torch.tensor([prompt])
    out = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, do_sample=False)
    return processor.tokenizer.decode(out[0, len(prompt) :].tolist())


def test_greedy_answers_equal_transformers_streamed_and_not(client: OpenAI, llama: Path) -> None:
    expected = reference_text(llama, 24)
    answer = greedy(client, max_tokens=24)
    assert answer.choices[0].message.content == expected
    assert answer.usage.completion_tokens == 24 and answer.choices[0].finish_reason == "length"
    chunks = list(greedy(client, max_tokens=24, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens


def test_a_repeated_prompt_comes_from_the_cache_and_says_so(client: OpenAI) -> None:
    prompt: Any = [{"role": "user", "content": "a prompt of its own, long enough for more than one block of the cache " * 2}]
    answers = [client.chat.completions.create(model="tiny", messages=prompt, temperature=0, max_tokens=8) for _ in range(2)]
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]  # type: ignore[union-attr]
    assert cached[0] == 0 and cached[1] >= 16 and cached[1] % 16 == 0
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


@pytest.mark.req("RL-03", "RL-11")
def test_a_client_can_tell_why_its_answer_ended(client: OpenAI) -> None:
    same: Any = {"logit_bias": {"70": 100}, "max_tokens": 20}
    capped = greedy(client, **same)
    assert (capped.choices[0].finish_reason, capped.usage.completion_tokens) == ("length", 20)
    limits = {"max_pattern_size": 4, "min_count": 5}
    repeating = greedy(client, **same, extra_body={"repetition_detection": limits})
    assert (repeating.choices[0].finish_reason, repeating.usage.completion_tokens) == ("repetition", 5)
    stopped = greedy(client, **same, extra_body={"stop_token_ids": [70]})
    assert (stopped.choices[0].finish_reason, stopped.choices[0].stop_reason) == ("stop", 70)
    text = greedy(client, **same).choices[0].message.content
    cut = greedy(client, **same, stop=[text[:1]])
    assert (cut.choices[0].finish_reason, cut.choices[0].stop_reason) == ("stop", text[:1])
    with pytest.raises(openai.APIStatusError) as late:
        greedy(client, max_tokens=2000, extra_body={"ignore_eos": True}, extra_headers={"x-penstock-timeout-ms": "200"})
    assert (late.value.status_code, late.value.code) == (504, "request_timeout")


@pytest.mark.req("LIM-08", "PC-07")
def test_tenants_and_salts_find_only_their_own_prefixes(client: OpenAI) -> None:
    """Even one salt that two tenants happen to choose."""
    prompt: Any = [{"role": "user", "content": "what one has asked the other must not be able to find out " * 2}]
    asked = [("a", None), ("b", None), ("a", None), ("a", "s"), ("b", "s"), ("b", "s"), ("", None), ("b", None)]
    found = []
    for tenant, salt in asked:
        answer = client.chat.completions.create(
            model="tiny",
            messages=prompt,
            max_tokens=2,
            extra_headers={TENANT: tenant} if tenant else {},
            extra_body={"cache_salt": salt} if salt else {},
        )
        found.append(answer.usage.prompt_tokens_details.cached_tokens > 0)  # type: ignore[union-attr]
    assert found == [False, False, True, False, False, True, False, True]


@pytest.mark.req("EG-05", "EG-08")
def test_stop_strings_cut_the_text_at_their_beginning(client: OpenAI) -> None:
    whole = greedy(client, max_tokens=40).choices[0].message.content
    stop = whole[len(whole) // 2 :][:3]
    expected = whole[: whole.index(stop)]
    answer = greedy(client, max_tokens=40, stop=[stop, "never there"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (expected, "stop")
    assert answer.choices[0].stop_reason == stop
    assert answer.usage.completion_tokens < 40
    streamed = greedy(client, max_tokens=40, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected


def test_choices_and_prompts_fan_out(client: OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["the river", "the mill"], n=2, seed=5, max_tokens=12)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert answer.usage is not None and answer.usage.completion_tokens == sum(12 for _ in texts)
    streamed: dict[int, str] = {}
    for chunk in client.completions.create(
        model="tiny", prompt=["the river", "the mill"], n=2, seed=5, max_tokens=12, stream=True
    ):
        streamed[chunk.choices[0].index] = streamed.get(chunk.choices[0].index, "") + chunk.choices[0].text
    assert [streamed[at] for at in range(4)] == texts


def test_seeds_make_answers_repeatable_whatever_runs_beside(client: OpenAI, server: Server) -> None:
    def ask(seed: int) -> str:
        return client.completions.create(model="tiny", prompt="the wheel", seed=seed, max_tokens=16).choices[0].text

    alone = [ask(seed) for seed in range(4)]

    async def crowd() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as many:
            tasks = [many.completions.create(model="tiny", prompt="the wheel", seed=seed, max_tokens=16) for seed in range(4)]
            return [answer.choices[0].text for answer in await asyncio.gather(*tasks)]

    assert asyncio.run(crowd()) == alone
    assert len(set(alone)) > 1


def test_logprobs_of_both_apis_agree_with_each_other(client: OpenAI) -> None:
    chat = greedy(client, max_tokens=6, logprobs=True, top_logprobs=3)
    content = chat.choices[0].logprobs.content
    assert len(content) == 6
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
    assert b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace") == chat.choices[0].message.content
    streamed = greedy(client, max_tokens=6, logprobs=True, stream=True)
    alone = [entry for chunk in streamed if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.logprob for entry in alone] == [entry.logprob for entry in content]
    assert all(entry.top_logprobs == [] for entry in alone)

    text = client.completions.create(model="tiny", prompt="the mill", temperature=0, max_tokens=6, logprobs=2)
    columns = text.choices[0].logprobs
    assert columns is not None and columns.top_logprobs and columns.token_logprobs and columns.tokens
    assert len(columns.tokens) == len(columns.token_logprobs) == len(columns.text_offset or []) == 6
    assert all(name in top for name, top in zip(columns.tokens, columns.top_logprobs, strict=True))


def test_min_p_and_top_k_of_one_are_greedy(client: OpenAI) -> None:
    expected = greedy(client, max_tokens=12).choices[0].message.content
    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, seed=3, extra_body=extra)
        assert answer.choices[0].message.content == expected
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, seed=3, top_p=1e-6)
    assert answer.choices[0].message.content == expected


def test_logprobs_name_tokens_by_id_where_that_is_asked_for(client: OpenAI) -> None:
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    fields: Any = {"max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    plain = greedy(client, **fields).choices[0].logprobs.content
    choice = greedy(client, extra_body=extra, **fields).choices[0]
    names = [f"token_id:{token}" for token in choice.token_ids]
    assert [entry.token for entry in choice.logprobs.content] == names
    assert [entry.bytes for entry in choice.logprobs.content] == [entry.bytes for entry in plain]
    assert [entry.top_logprobs[0].token for entry in choice.logprobs.content] == names
    streamed = greedy(client, stream=True, extra_body=extra, **fields)
    entries = [entry for chunk in streamed if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in entries] == names

    text: Any = {"model": "tiny", "prompt": "the mill", "temperature": 0, "max_tokens": 6, "logprobs": 2}
    plain = client.completions.create(**text).choices[0].logprobs
    named: Any = client.completions.create(extra_body=extra, **text).choices[0]
    names = [f"token_id:{token}" for token in named.token_ids]
    assert named.logprobs.tokens == names != plain.tokens
    assert all(name in top and len(top) == 2 for name, top in zip(names, named.logprobs.top_logprobs, strict=True))
    assert (named.logprobs.text_offset, named.logprobs.token_logprobs) == (plain.text_offset, plain.token_logprobs)
    chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(stream=True, extra_body=extra, **text)]
    assert [name for columns in chunks if columns for name in columns.tokens] == names


@pytest.mark.req("LP-01")
def test_prompt_logprobs_are_those_of_generation(client: OpenAI) -> None:
    """Before and after the prefix is cached."""
    ids = list(range(70, 100))
    fields: Any = {"model": "tiny", "max_tokens": 1, "logprobs": 0}
    forced = client.completions.create(prompt=ids[:-1], extra_body={"allowed_token_ids": ids[-1:]}, **fields)
    columns = forced.choices[0].logprobs
    assert columns is not None and columns.token_logprobs
    for _ in range(2):
        answer = client.completions.create(prompt=ids, n=2, extra_body={"prompt_logprobs": 2}, **fields)
        first, second = (choice.prompt_logprobs for choice in answer.choices)  # type: ignore[attr-defined]
        assert first == second and len(first) == 30 and first[0] is None
        assert first[-1]["99"]["logprob"] == columns.token_logprobs[0]
        for token, entry in zip(ids[1:], first[1:], strict=True):
            assert str(token) in entry and len(entry) in (2, 3)
            assert sorted(each["rank"] for each in entry.values())[:2] == [1, 2]
    chat = greedy(client, max_tokens=2, extra_body={"prompt_logprobs": 0})
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens and chat.usage.prompt_tokens_details.cached_tokens == 0
    assert not hasattr(greedy(client, max_tokens=2), "prompt_logprobs")


@pytest.mark.req("MR-09")
def test_prompt_logprobs_of_a_prompt_in_two_chunks(client: OpenAI, llama: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    ids = [(at * at + at // 7) % 300 + 5 for at in range(2500)]
    answer = client.completions.create(model="tiny", prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": 0})
    found = answer.choices[0].prompt_logprobs  # type: ignore[attr-defined]
    assert found[0] is None and len(found) == len(ids)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(llama)(torch.tensor([ids])).logits[0].log_softmax(-1)
    for position in [*range(1, 2500, 111), *range(2040, 2060), 2499]:
        assert abs(found[position][str(ids[position])]["logprob"] - expected[position - 1, ids[position]].item()) < 1e-3


@pytest.mark.req("LP-05")
def test_each_token_has_a_logprob_up_to_where_the_text_stops(client: OpenAI) -> None:
    def entries(**fields: Any) -> tuple[list[bytes], Any]:
        answer = greedy(client, max_tokens=30, logprobs=True, **fields)
        return [bytes(entry.bytes) for entry in answer.choices[0].logprobs.content], answer

    whole, answer = entries()
    assert len(whole) == answer.usage.completion_tokens == 30
    text = answer.choices[0].message.content
    stop = text[len(text) // 2 :][:3]
    cut, answer = entries(stop=stop)
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.content == text[: text.index(stop)]
    assert cut == whole[: len(cut)] and len(cut) == answer.usage.completion_tokens < 30


@pytest.mark.req("SMP-15", "SMP-16", "SMP-18", "SMP-19", "SMP-20")
def test_adjustments_of_the_logits_change_what_a_client_gets(client: OpenAI) -> None:
    def tokens(**extra: Any) -> list[bytes]:
        answer = greedy(client, max_tokens=20, logprobs=True, extra_body=extra)
        return [bytes(entry.bytes) for entry in answer.choices[0].logprobs.content]

    plain = tokens()
    assert len(set(tokens(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1000.0))) == 20 > len(set(plain))
    assert tokens(logit_bias={"70": 100}) == tokens(allowed_token_ids=[70]) == tokens(allowed_token_ids=[70])[:1] * 20
    word = next(token.decode() for token in plain if token.isascii() and token.strip())
    assert word.encode() not in tokens(bad_words=[word])
    # <|end|>, token 1, at once, or as soon as it may.
    for min_tokens, length in ((0, 1), (7, 8)):
        answer = greedy(client, max_tokens=20, extra_body={"logit_bias": {"1": 100}, "min_tokens": min_tokens})
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (length, "stop")


def test_errors_are_the_clients_own_types(client: OpenAI, llama: Path) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as penalty:
        client.chat.completions.create(model="tiny", messages=MESSAGES, frequency_penalty=3)
    assert penalty.value.param == "frequency_penalty"
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}])
    assert tools.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="the mill " * 5000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4096)
    models: Any = list(client.models.list())
    assert [model.id for model in models] == ["tiny", "random"]
    assert {(model.root, model.parent) for model in models} == {(str(llama), None)}


@pytest.mark.req("EG-12")
def test_a_client_that_disconnects_frees_its_blocks(client: OpenAI, server: Server) -> None:
    stream = greedy(client, max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    report = wait_idle(server)
    assert report["kv_blocks_reclaimable"] == report["kv_blocks_total"]
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        patient.post(f"{server.url}/v1/chat/completions", json=body, timeout=httpx.Timeout(60, read=0.05))
    report = wait_idle(server)
    assert report["kv_blocks_reclaimable"] == report["kv_blocks_total"]


@pytest.mark.req("IPC-01")
def test_the_frontend_has_no_torch(server: Server) -> None:
    assert "torch" in Path(f"/proc/{server.core_pid()}/maps").read_text()
    assert "torch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_sigterm_finishes_what_runs_and_refuses_what_comes(llama: Path, tmp_path: Path) -> None:
    with serving(llama, tmp_path / "log") as server:
        core = server.core_pid()
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = greedy(
                client, max_tokens=2000, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
            )
            next(stream)
            os.kill(core, signal.SIGSTOP)  # so that it runs until it may go on
            server.process.send_signal(signal.SIGTERM)
            wait_unready(server)
            refused = patient.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "x"})
            assert (refused.status_code, refused.headers["x-penstock-retriable"]) == (503, "true")
            os.kill(core, signal.SIGCONT)
            assert [chunk.usage.completion_tokens for chunk in stream if chunk.usage] == [2000]
        assert server.process.wait(timeout=60) == 0
        assert not Path(f"/proc/{core}").exists()


@pytest.mark.req("EG-20", "IPC-11")
def test_the_cores_death_ends_streams_with_an_error_and_the_process(llama: Path, tmp_path: Path) -> None:
    with serving(llama, tmp_path / "log") as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = greedy(client, max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
            next(stream)
            os.kill(server.core_pid(), signal.SIGKILL)
            with pytest.raises(openai.APIError, match="signal 9"):
                list(stream)
        assert server.process.wait(timeout=60) == 1


@pytest.mark.slow
def test_two_interrupts_end_at_once(llama: Path, tmp_path: Path) -> None:
    with serving(llama, tmp_path / "log", "--enable-control-endpoints") as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = greedy(client, max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
            next(stream)
            assert patient.post(f"{server.url}/pause?mode=keep").status_code == 200
            server.process.send_signal(signal.SIGINT)
            wait_unready(server)
            server.process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError, match="shut down"):
                list(stream)
        assert server.process.wait(timeout=60) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("break_it", "flags", "words"),
    [
        (lambda path: (path / "config.json").unlink(), [], "config.json"),
        (lambda path: (path / "tokenizer.json").unlink(), [], "tokenizer.json"),
        (lambda path: (path / "tokenizer.json").unlink(), ["--api-server-count", "2"], "tokenizer.json"),
        (lambda path: (path / "config.json").write_text("{"), [], "config.json: not valid JSON"),
        (lambda path: None, ["--max-model-len", "100000"], "--max-model-len"),
        (lambda path: None, ["--kv-cache-memory-bytes", "1000"], "too small"),
        (lambda path: None, ["--kv-cache-memory-bytes", "1000", "--api-server-count", "2"], "too small"),
        (lambda path: None, ["--host", "no.such.host.invalid", "--api-server-count", "2"], "no.such.host.invalid"),
    ],
    ids=[
        "no config",
        "no tokenizer",
        "no tokenizer for several",
        "broken config",
        "too long",
        "no memory",
        "no memory for several",
        "no host for several",
    ],
)
def test_what_cannot_be_served_is_said_in_a_sentence(
    llama: Path, tmp_path: Path, break_it: Any, flags: list[str], words: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    break_it(model)
    done = subprocess.run(command(model, *free_ports(3), *flags), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    sentence = done.stderr.splitlines()[-1]  # what the operator's conditions quote
    assert sentence.startswith("penstock serve: ") and words in sentence and str(model) in sentence
    assert "Traceback" not in done.stderr and done.stdout == ""
