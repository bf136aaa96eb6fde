"""`/v1/embeddings` and `LLM.embed`: a real server with the official client, and a core that does what the test says."""

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import pytest
from aiohttp import web
from embedding_models import MODES, reference, write_modules
from frontend_fakes import FakeCore
from frontend_process import Server, make_llama, serving
from openai import BadRequestError, OpenAI
from tokenizers import Tokenizer

from penstock.engine import LLM, ConfigError, EngineArgs, SamplingParams
from penstock.engine.config import ModelConfig, PoolingConfig
from penstock.engine.frontend.async_llm import AsyncLLM
from penstock.engine.frontend.http.routes.embeddings import AT_ONCE
from penstock.engine.frontend.http.server import ApiServer
from penstock.engine.messages import Finished, FinishReason, Pooled, StepOutputs
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.processor import PromptProcessor
from testing import patient

Floats = npt.NDArray[np.float32]

TEXT = "the river turns the wheel"
CONTEXT, SIZE = 128, 48


def make_embedder(path: Path, tokenizer_files: Path, mode: str = "last", normalize: bool = True, **config: Any) -> Path:
    """A random two-layer Qwen3 without an LM head, as sentence-transformers saves it."""
    import torch
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=320,
        hidden_size=SIZE,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
    )
    Qwen3Model(shape).to(torch.float32).save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    for given in tokenizer_files.iterdir():
        shutil.copy(given, path)
    return write_modules(path, MODES[mode], SIZE, normalize)


def normalised(vector: Floats) -> Floats:
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module")
def model(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("embedder"), tokenizer_files, matryoshka_dimensions=[8, 16])


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("log") / "serve.log", "--max-num-batched-tokens", "64") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected(model: Path, byte_level: Tokenizer) -> Callable[[str | list[int]], Floats]:
    """What sentence-transformers defines: the last token's hidden state, of length 1."""
    from transformers import AutoModel

    theirs = AutoModel.from_pretrained(model)

    def embed(text: str | list[int]) -> Floats:
        return normalised(reference(theirs, byte_level.encode(text).ids if isinstance(text, str) else text, "last"))

    return embed


def test_the_openai_client_gets_what_transformers_gives(client: OpenAI, byte_level: Tokenizer, expected: Any) -> None:
    texts = [TEXT, "naïve café — 水車 🌊", "x"]
    answer = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    assert [entry.index for entry in answer.data] == [0, 1, 2] and answer.object == "list" and answer.model == "tiny"
    for entry, text in zip(answer.data, texts, strict=True):
        np.testing.assert_allclose(entry.embedding, expected(text), atol=1e-4)
    count = sum(len(byte_level.encode(text).ids) for text in texts)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)


def test_each_form_of_input_and_answer_has_the_same_bits(client: OpenAI, server: Server, byte_level: Tokenizer) -> None:
    ids = byte_level.encode(TEXT).ids
    forms: list[Any] = [TEXT, [TEXT], ids, [ids]]
    answers = [client.embeddings.create(model="tiny", input=form, encoding_format="float").data for form in forms]
    answers.append(client.embeddings.create(model="tiny", input=TEXT, user="me").data)  # asks for base64, and decodes it
    assert all(len(data) == 1 for data in answers)
    found = {np.array(data[0].embedding, np.float32).tobytes() for data in answers}
    body = {"model": "tiny", "input": TEXT, "encoding_format": "base64"}
    raw = patient.post(f"{server.url}/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert found == {base64.b64decode(raw)} and len(base64.b64decode(raw)) == 4 * SIZE


def test_many_inputs_come_back_in_their_order(client: OpenAI) -> None:
    inputs = [[at % 300, at // 300, 7] for at in range(2 * AT_ONCE + 3)]
    answer = client.embeddings.create(model="tiny", input=inputs)
    assert [entry.index for entry in answer.data] == list(range(len(inputs)))
    for at in (0, AT_ONCE, len(inputs) - 1):
        alone = client.embeddings.create(model="tiny", input=inputs[at])
        assert alone.data[0].embedding == answer.data[at].embedding


def test_a_text_that_fills_the_context_is_embedded_and_a_longer_one_cut(client: OpenAI, expected: Any) -> None:
    ids = [at % 320 for at in range(CONTEXT)]
    full = client.embeddings.create(model="tiny", input=ids).data[0].embedding
    np.testing.assert_allclose(full, expected(ids), atol=1e-4)
    cut = client.embeddings.create(model="tiny", input=[*ids, 5], extra_body={"truncate_prompt_tokens": -1})
    assert cut.data[0].embedding == full and cut.usage.prompt_tokens == CONTEXT
    left = {"truncate_prompt_tokens": 3, "truncation_side": "left"}
    cut = client.embeddings.create(model="tiny", input=ids, extra_body=left)
    assert cut.data[0].embedding == client.embeddings.create(model="tiny", input=ids[-3:]).data[0].embedding


def test_embeddings_are_cut_to_sizes_that_they_were_made_for(client: OpenAI, expected: Any) -> None:
    cut = client.embeddings.create(model="tiny", input=TEXT, dimensions=8).data[0].embedding
    np.testing.assert_allclose(cut, normalised(expected(TEXT)[:8]), atol=1e-4)
    with pytest.raises(BadRequestError, match="8, 16") as refused:
        client.embeddings.create(model="tiny", input=TEXT, dimensions=9)
    assert refused.value.param == "dimensions"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [1, 320]}, "input"),
        ({"input": [[1], [320]]}, "input[1]"),
        ({"input": [1, "a"]}, "input"),
        ({"input": 5}, "input"),
        ({"input": [1] * (CONTEXT + 1)}, "input"),
        ({"input": [[1], [1] * (CONTEXT + 1)]}, "input[1]"),
        ({"input": [[1]] * 2049}, "input"),
        ({"input": "a", "encoding_format": "binary"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "priority": 1}, "priority"),
        ({"input": "a", "temperature": 1}, "temperature"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": "a", "model": "other"}, "model"),
    ],
)
def test_what_cannot_be_embedded_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = patient.post(f"{server.url}/v1/embeddings", json={"model": "tiny", **fields})
    assert answer.status_code == (404 if "model" in fields else 400), answer.text
    assert answer.json()["error"]["param"] == param


def test_an_engine_that_embeds_does_not_generate(client: OpenAI, server: Server) -> None:
    asks: list[Callable[[], Any]] = [
        lambda: client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}]),
        lambda: client.completions.create(model="tiny", prompt="x"),
        lambda: client.responses.create(model="tiny", input="x"),
    ]
    for ask in asks:
        with pytest.raises(BadRequestError, match="cannot generate") as refused:
            ask()
        assert refused.value.code == "unsupported_endpoint" and refused.value.param == "model"
    tokens = patient.post(f"{server.url}/tokenize", json={"prompt": TEXT}).json()
    assert tokens["max_model_len"] == CONTEXT and tokens["count"] > 0


def test_metrics_count_embeddings_as_requests(client: OpenAI, server: Server) -> None:
    def counts() -> dict[str, float]:
        lines = [line.rpartition(" ") for line in patient.get(f"{server.url}/metrics").text.splitlines() if line[:1] != "#"]
        return {name: float(value) for name, _, value in lines}

    def value(found: dict[str, float], *words: str) -> float:
        return sum(number for name, number in found.items() if all(word in name for word in words))

    before = counts()
    client.embeddings.create(model="tiny", input=[[1, 2, 3], [4, 5]])
    after = counts()
    for words, due in (
        (("request_success_total", "stop"), 2),
        (("prompt_tokens_total",), 5),
        (("e2e_request_latency_seconds_count",), 2),
        (("request_prefill_time_seconds_count",), 2),
        (("generation_tokens_total",), 0),
        (("sampled_tokens_total",), 0),
    ):
        assert value(after, *words) > 0 or due == 0, words
        assert value(after, *words) - value(before, *words) == due, words


# --- from Python ---


def test_python_gets_the_same(model: Path, client: OpenAI, byte_level: Tokenizer) -> None:
    with LLM(str(model), in_process=True, kv_cache_memory_bytes=4 * 2**20) as llm:
        ids = byte_level.encode(TEXT).ids
        [one, other] = llm.embed([TEXT, {"prompt_token_ids": ids}], progress=False)
        assert one.outputs.embedding == other.outputs.embedding and one.prompt_token_ids == ids and one.finished
        assert one.outputs.embedding == client.embeddings.create(model="tiny", input=TEXT).data[0].embedding
        assert len(llm.embed(TEXT, progress=False, dimensions=16)[0].outputs.embedding) == 16
        with pytest.raises(ValueError, match="cannot generate"):
            llm.generate(TEXT, SamplingParams(max_tokens=1), progress=False)
        with pytest.raises(ValueError, match="dimensions"):
            llm.embed(TEXT, progress=False, dimensions=3)
        with pytest.raises(ValueError, match="129 tokens"):
            llm.embed([[1] * (CONTEXT + 1)], progress=False)


async def test_asyncio_programs_get_the_same(model: Path, client: OpenAI) -> None:
    args = EngineArgs(model=str(model), kv_cache_memory_bytes=4 * 2**20)
    async with AsyncLLM.from_args(args, in_process=True) as llm:
        one, other = await asyncio.gather(llm.embed(TEXT, "mine"), llm.embed({"prompt": TEXT}, dimensions=16))
        assert one.outputs.embedding == client.embeddings.create(model="tiny", input=TEXT).data[0].embedding
        assert (one.request_id, len(other.outputs.embedding)) == ("mine", 16)
        for refused, kwargs in (("dimensions", {"dimensions": 3}), ("129 tokens", {})):
            with pytest.raises(ValueError, match=refused):
                await llm.embed([1] * (CONTEXT + 1) if not kwargs else TEXT, **kwargs)


def test_texts_are_no_longer_than_the_folder_says(tokenizer_files: Path, tmp_path: Path) -> None:
    path = make_embedder(tmp_path / "m", tokenizer_files)
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8, "do_lower_case": False}))
    with (
        LLM(str(path), in_process=True, kv_cache_memory_bytes=4 * 2**20) as llm,
        pytest.raises(ValueError, match="9 tokens; the model's context is 8"),
    ):
        llm.embed([[1] * 9], progress=False)


def test_a_model_that_generates_embeds_from_python_where_that_is_asked_for(tokenizer_files: Path, tmp_path: Path) -> None:
    path = make_llama(tmp_path / "llama", tokenizer_files)
    with (
        LLM(str(path), in_process=True, kv_cache_memory_bytes=4 * 2**20) as llm,
        pytest.raises(ValueError, match="cannot embed"),
    ):
        llm.embed(TEXT)
    with LLM(str(path), in_process=True, kv_cache_memory_bytes=4 * 2**20, runner="pooling") as llm:
        vector = np.array(llm.embed(TEXT, progress=False)[0].outputs.embedding)
        assert vector.shape == (64,) and abs(np.linalg.norm(vector) - 1) < 1e-5


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"device": "cuda"}, "pooling"),
        ({"enable_lora": True, "device": "cpu"}, "--enable-lora"),
        ({"logits_processors": ["a:B"], "device": "cpu"}, "--logits-processors"),
        ({"override_generation_config": {"top_k": 1}, "device": "cpu"}, "--override-generation-config"),
    ],
)
def test_what_an_engine_that_embeds_cannot_do_is_refused_at_start(
    model: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], named: str
) -> None:
    monkeypatch.setattr("penstock.engine.args_config.choose_device", lambda device: device)
    with pytest.raises(ConfigError, match=named):
        LLM(str(model), **flags)


def test_a_tokenizer_that_would_leave_out_the_end_is_refused(tokenizer_files: Path, tmp_path: Path) -> None:
    path = make_embedder(tmp_path / "m", tokenizer_files)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "add_eos_token": True}))
    with pytest.raises(ConfigError, match="add_eos_token"):
        LLM(str(path), in_process=True)


# --- a core that does what the test says ---


class Site:
    """A served engine that embeds."""

    def __init__(self, core: FakeCore, llm: AsyncLLM, url: str) -> None:
        self.core, self.llm = core, llm
        self.http = aiohttp.ClientSession(url)

    async def added(self, count: int) -> list[int]:
        """Waits until the core has so many requests; their indexes."""
        async with asyncio.timeout(60):
            while len(self.core.added) < count:
                await asyncio.sleep(0.01)
        return [request.index for request in self.core.added]

    async def aborted(self, indexes: list[int]) -> None:
        """Waits until the core has been told to end these."""
        async with asyncio.timeout(60):
            while sorted(chain.from_iterable(self.core.aborted)) != sorted(indexes):
                await asyncio.sleep(0.01)


@pytest.fixture
async def site(tokenizer_files: Path) -> AsyncIterator[Callable[..., Awaitable[Site]]]:
    closers: list[Callable[[], Awaitable[Any]]] = []

    async def start(pooling: PoolingConfig, max_num_waiting: int = 1024, others: Sequence[FakeCore] = ()) -> Site:
        core = FakeCore()
        config = ModelConfig(
            path=tokenizer_files,
            served_names=("m",),
            architecture="x",
            dtype="float32",
            max_model_len=64,
            eos_token_ids=(),
            pooling=pooling,
        )
        bundle = PromptBundle.from_checkpoint(tokenizer_files, served_names=("m",), block_size=4, hash_seed="s", max_model_len=64)
        llm = AsyncLLM([core, *others], config, PromptProcessor(bundle), max_num_waiting=max_num_waiting)
        runner = ApiServer(llm).runner(shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await llm.start()
        found = Site(core, llm, f"http://127.0.0.1:{runner.addresses[0][1]}")
        closers.extend([found.http.close, runner.cleanup, llm.close])
        return found

    yield start
    for close in closers:
        await close()


RAW = PoolingConfig(tokens="mean", normalize=False, size=3)


def vectors(found: dict[int, list[float]], *finished: Finished) -> StepOutputs:
    """A frame with embeddings of requests, which they end, and whatever else ended."""
    columns = Pooled(np.array(list(found), "<i8").tobytes(), 3, np.array(list(found.values()), "<f4").reshape(-1, 3).tobytes())
    ends = [Finished(index, FinishReason.STOP) for index in found]
    return StepOutputs(0, 0, 0.0, b"", b"\0\0\0\0", b"", [], [*ends, *finished], pooled=columns)


async def test_vectors_are_given_out_as_they_are_where_the_model_does_not_normalise(site: Any) -> None:
    served = await site(RAW)
    task = asyncio.create_task(served.http.post("/v1/embeddings", json={"model": "m", "input": ["a", "b"], "dimensions": 3}))
    first, second = await served.added(2)
    served.core.say(vectors({second: [4.0, 5.0, 0.1]}))
    served.core.say(vectors({first: [1.0, 2.0, 3.0]}))
    body = await (await task).json()
    assert [entry["embedding"] for entry in body["data"]] == [[1.0, 2.0, 3.0], [4.0, 5.0, 0.1]]
    assert [request.sampling.max_tokens for request in served.core.added] == [1, 1]


async def test_a_model_that_was_not_made_for_it_is_not_cut(site: Any) -> None:
    served = await site(RAW)
    answer = await served.http.post("/v1/embeddings", json={"model": "m", "input": "a", "dimensions": 2})
    assert answer.status == 400 and "not made to be cut" in (await answer.json())["error"]["message"]


async def test_one_input_that_fails_ends_them_all(site: Any) -> None:
    served = await site(RAW)
    task = asyncio.create_task(served.http.post("/v1/embeddings", json={"model": "m", "input": ["a", "b", "c"]}))
    first, second, third = await served.added(3)
    served.core.say(vectors({first: [1.0, 2.0, 3.0]}, Finished(second, FinishReason.ERROR, error="the hidden states …")))
    answer = await task
    assert answer.status == 500 and "the hidden states" in (await answer.json())["error"]["message"]
    await served.aborted([third])


async def test_a_client_that_leaves_ends_all_its_inputs(site: Any) -> None:
    served = await site(RAW)
    task = asyncio.create_task(served.http.post("/v1/embeddings", json={"model": "m", "input": ["a", "b"]}))
    indexes = await served.added(2)
    task.cancel()
    await served.aborted(indexes)


@pytest.mark.parametrize(("max_num_waiting", "at_once"), [(2, 2), (0, 1)])
async def test_no_more_inputs_are_sent_at_once_than_the_queue_takes(site: Any, max_num_waiting: int, at_once: int) -> None:
    served = await site(RAW, max_num_waiting)
    body = {"model": "m", "input": [[5], [6], [7]], "request_id": "mine"}
    task = asyncio.create_task(served.http.post("/v1/embeddings", json=body))
    done = 0
    while done < 3:
        indexes = (await served.added(min(done + at_once, 3)))[done:]
        assert len(indexes) <= at_once
        served.core.say(vectors({index: [float(index), 0.0, 0.0] for index in indexes}))
        done += len(indexes)
    answer = await task
    body = await answer.json()
    assert [entry["embedding"][0] for entry in body["data"]] == [request.index for request in served.core.added]
    assert [request.prompt_token_ids for request in served.core.added] == [[5], [6], [7]]
    assert answer.headers["x-request-id"] == served.core.added[0].request_id == "mine"


async def test_all_inputs_run_on_one_data_parallel_rank_which_the_answer_names(site: Any) -> None:
    """So no more of them are sent at once than that rank's queue takes."""
    other = FakeCore()
    served = await site(RAW, 1, [other])
    body = {"model": "m", "input": [[5], [6], [7]]}
    task = asyncio.create_task(served.http.post("/v1/embeddings", json=body))
    for done in (1, 2, 3):
        [index] = (await served.added(done))[done - 1 :]
        served.core.say(vectors({index: [1.0, 0.0, 0.0]}))
    answer = await task
    assert answer.status == 200 and answer.headers["x-data-parallel-rank"] == "0" and not other.added
