"""Adapters over HTTP, on a real engine: loaded at the start and while it runs, chosen by name, refused when broken."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp.test_utils import TestClient, TestServer
from frontend_fakes import FakeCore
from frontend_process import Server, make_llama, serving
from lora_adapters import make_adapter

from penstock.api.load_report import LoadReport
from penstock.engine import LLM, SamplingParams
from penstock.engine.args import EngineArgs
from penstock.engine.commands import Command, SyncAdapters
from penstock.engine.config import ConfigError, LoraModule
from penstock.engine.frontend.async_llm import AsyncLLM
from penstock.engine.frontend.http.intake import Intake
from penstock.engine.frontend.http.server import ApiServer
from penstock.engine.frontend.http.settings import ApiSettings
from penstock.engine.frontend.python.prompts import load_processor
from penstock.engine.messages import AdapterInfo, AdaptersChanged
from penstock.engine.stats import CoreStats

PROMPT = "the river turns the wheel and the wheel turns the mill"


@pytest.fixture(scope="module")
def llama(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), tokenizer_files)


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters `sql` and `chat`, and `broken` and `dora`, which are none."""
    from transformers import LlamaForCausalLM

    model, path = LlamaForCausalLM.from_pretrained(llama), tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "chat", "broken")):
        make_adapter(path / name, model, rank=8, seed=seed, scale=0.5)
    (path / "broken" / "adapter_model.safetensors").write_bytes(b"no weights")
    make_adapter(path / "dora", model, use_dora=True)
    return path


FLAGS = ("--enable-lora", "--max-loras", "1", "--max-cpu-loras", "2", "--allow-runtime-lora-updating", "--metrics-compat", "vllm")


@pytest.fixture(scope="module")
def server(llama: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with serving(llama, log, *FLAGS, "--lora-modules", f"sql={adapters / 'sql'}", "--api-server-count", "2") as running:
        yield running


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
        for name in ("chat", "other"):
            client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def ask(http: httpx.Client, model: str, max_tokens: int = 12, **fields) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **fields}
    return http.post("/v1/completions", json=body)


def text(http: httpx.Client, model: str, **fields) -> str:
    answer = ask(http, model, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == ("tiny" if model in ("tiny", "random") else model)
    return answer.json()["choices"][0]["text"]


def load(http: httpx.Client, name: str, path: Path | str, **fields) -> httpx.Response:
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})


@pytest.mark.req("LO-23", "LO-24")
def test_an_adapter_is_loaded_listed_served_by_its_name_and_unloaded(http: httpx.Client, adapters: Path) -> None:
    assert ask(http, "chat").status_code == 404
    assert load(http, "chat", adapters / "chat").status_code == 200
    assert load(http, "chat", adapters / "chat").status_code == 200, "loading it again is no error"
    listed = {entry["id"]: entry for entry in http.get("/v1/models").json()["data"]}
    assert list(listed) == ["tiny", "random", "sql", "chat"]
    assert (listed["chat"]["parent"], listed["chat"]["root"]) == ("tiny", str(adapters / "chat"))
    assert listed["tiny"]["parent"] is None
    assert http.get("/v1/models/chat").json() == listed["chat"]
    texts = [text(http, name) for name in ("tiny", "sql", "chat")]
    assert len(set(texts)) == 3
    assert [text(http, name) for name in ("tiny", "sql", "chat")] == texts
    chat = http.post("/v1/chat/completions", json={"model": "chat", "messages": [{"role": "user", "content": "turns"}]})
    assert chat.status_code == 200 and chat.json()["model"] == "chat"
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "chat"}).status_code == 200
    gone = ask(http, "chat")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "chat"}).status_code == 404


@pytest.mark.req("LO-17", "PC-05")
def test_equal_prompts_of_two_adapters_share_nothing(http: httpx.Client, adapters: Path) -> None:
    load(http, "chat", adapters / "chat").raise_for_status()

    def cached(model: str) -> int:
        return ask(http, model, prompt=PROMPT * 4, max_tokens=1).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("chat"), cached("sql"), cached("tiny")] == [0, 0, 0]
    assert min(cached("chat"), cached("sql"), cached("tiny")) > 0


def test_what_is_no_adapter_is_a_400_and_disturbs_nothing(http: httpx.Client, adapters: Path) -> None:
    before = text(http, "sql")
    for name, path, words in (
        ("other", adapters / "broken", "damaged"),
        ("other", adapters / "dora", "use_dora"),
        ("other", adapters / "nowhere", "does not exist"),
        ("other", "hf://nobody", "expected hf://"),
        ("tiny", adapters / "chat", "the model's"),
        ("sql", adapters / "chat", "unload it, or replace it"),
    ):
        refused = load(http, name, path)
        assert refused.status_code == 400 and words in refused.json()["error"]["message"], refused.text
    for body in ({"lora_name": "x"}, {"lora_name": "x", "lora_path": "/x", "rank": 8}):
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 400
    assert text(http, "sql") == before
    assert [entry["id"] for entry in http.get("/v1/models").json()["data"]] == ["tiny", "random", "sql"]


@pytest.mark.req("LO-17")
def test_other_weights_may_take_a_name_while_it_is_served(http: httpx.Client, adapters: Path) -> None:
    load(http, "other", adapters / "chat").raise_for_status()
    before = text(http, "other", prompt=PROMPT * 3)
    load(http, "other", adapters / "sql", load_inplace=True).raise_for_status()
    assert text(http, "other", prompt=PROMPT * 3) == text(http, "sql", prompt=PROMPT * 3) != before


@pytest.mark.req("LO-18", "LO-19", "LO-20", "LO-08")
def test_more_adapters_than_slots_all_get_served_and_the_report_says_who_waits(http: httpx.Client, adapters: Path) -> None:
    load(http, "chat", adapters / "chat").raise_for_status()
    load(http, "other", adapters / "sql").raise_for_status()
    expected = {name: text(http, name, max_tokens=300) for name in ("sql", "chat", "other")}
    waited: set[str] = set()
    answers: dict[int, str] = {}
    threads = []
    for at in range(9):
        name = ("sql", "chat", "other")[at % 3]

        def run(at: int = at, name: str = name) -> None:
            with httpx.Client(base_url=http.base_url, timeout=60) as mine:
                answers[at] = name if text(mine, name, max_tokens=300) == expected[name] else "wrong"

        threads.append(threading.Thread(target=run))
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        report = http.get("/load").json()
        assert sum(1 for count in report.get("lora_running", {}).values() if count) <= 1
        if report["num_requests_waiting"].get("lora"):
            waited.update(report["lora_waiting"])
    for thread in threads:
        thread.join()
    assert answers == {at: ("sql", "chat", "other")[at % 3] for at in range(9)}
    assert len(waited) >= 2, "with one slot for three adapters"
    page = http.get("/metrics").text
    assert "penstock_lora_slots{" in page and "vllm:lora_requests_info{" in page and 'max_lora="1"' in page
    assert 'penstock_num_requests_waiting{engine="0",model_name="tiny",reason="lora"} 0.0' in page


@pytest.mark.parametrize("allowed", [True, False])
def test_the_endpoints_are_there_only_where_they_are_allowed(allowed: bool, llama: Path) -> None:
    config = EngineArgs(model=str(llama), enable_lora=True).config()
    llm = AsyncLLM(FakeCore(), config.model, load_processor(config))
    app = ApiServer(llm, ApiSettings(runtime_lora_updating=allowed)).app()
    paths = {route.resource.canonical for route in app.router.routes() if route.resource is not None}
    assert ({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"} <= paths) is allowed and "/v1/models" in paths


@pytest.mark.req("LO-05")
def test_settings_that_make_no_sense_are_refused(llama: Path, adapters: Path, tmp_path: Path) -> None:
    for flags, words in (
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3}, "--max-cpu-loras 3 is below --max-loras 4"),
        ({"lora_modules": ["a=b"]}, "needs --enable-lora"),
        ({"enable_lora": True, "lora_modules": ["a"]}, "is not NAME=PATH"),
        ({"enable_lora": True, "lora_modules": ["a=x", "a=y"]}, "is taken"),
        ({"enable_lora": True, "max_lora_rank": 1000}, "max_lora_rank"),
    ):
        with pytest.raises(ConfigError, match=words):
            EngineArgs(model=str(llama), **flags).config()
    config = EngineArgs(model=str(llama), enable_lora=True, max_loras=3, lora_modules=["a=hf://b/c=d"]).config()
    assert config.lora is not None and config.lora.max_cpu_loras == 3
    assert config.lora.modules == (LoraModule("a", "hf://b/c=d"),)


def test_in_python_adapters_are_chosen_by_name(llama: Path, adapters: Path) -> None:
    """Whether the next step is planned while one runs or not."""
    modules = [f"{name}={adapters / name}" for name in ("sql", "chat")]
    small = {"kv_cache_memory_bytes": 4 * 2**20, "in_process": True}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    texts: list[list[str]] = []
    for ahead in (False, True):
        flags = {"enable_lora": True, "max_loras": 1, "lora_modules": modules, "async_scheduling": ahead}
        with LLM(str(llama), **flags, **small) as llm:
            names = (None, "sql", "chat", "sql")
            texts.append([llm.generate(PROMPT, params, adapter=it, progress=False)[0].outputs[0].text for it in names])
            with pytest.raises(ValueError, match="no adapter 'x'"):
                llm.generate(PROMPT, params, adapter="x", progress=False)
    assert texts[0] == texts[1] and len(set(texts[0])) == 3 and texts[0][1] == texts[0][3]
    with pytest.raises(ConfigError, match=r"--lora-modules dora=.*use_dora"):
        LLM(str(llama), enable_lora=True, lora_modules=[f"dora={adapters / 'dora'}"], **small)


async def test_a_name_is_unknown_only_once_all_is_read_that_the_core_has_said(llama: Path) -> None:
    """A gateway may hear of a new adapter before a busy frontend does."""
    core = LateCore()
    config = EngineArgs(model=str(llama), enable_lora=True).config()
    async with AsyncLLM(core, config.model, load_processor(config)) as llm:
        assert not await llm.has_adapter("sql"), "before the first report nobody knows of any"
        core.say(CoreStats(LoadReport(epoch=1, seq=1, lora_slots=1), 0, 0, 0, 0))
        while llm.load is None:
            await asyncio.sleep(0)
        assert await llm.has_adapter("sql") and core.asked == 1
        assert await llm.has_adapter("sql") and core.asked == 1, "what is known is not asked for"
        assert not await llm.has_adapter("other")


async def test_an_adapter_that_goes_while_its_prompt_becomes_tokens_leaves_no_request_for_the_model(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = LateCore()
    config = EngineArgs(model=str(llama), enable_lora=True).config()
    async with AsyncLLM(core, config.model, load_processor(config)) as llm:
        core.say(CoreStats(LoadReport(epoch=1, seq=1, lora_slots=1), 0, 0, 0, 0))
        while llm.load is None:
            await asyncio.sleep(0)
        prompts = Intake.prompts

        async def meanwhile(intake: Intake, *body: Any) -> list[Any]:
            core.say(AdaptersChanged([]))
            while "sql" in llm.adapters:
                await asyncio.sleep(0)
            return await prompts(intake, *body)

        monkeypatch.setattr(Intake, "prompts", meanwhile)
        async with TestClient(TestServer(ApiServer(llm).app())) as client:
            answer = await client.post("/v1/completions", json={"model": "sql", "prompt": PROMPT, "max_tokens": 1})
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")


class LateCore(FakeCore):
    """Has said which adapters there are, and nobody has read it when the question comes."""

    asked = 0

    async def call(self, command: Command) -> None:
        assert isinstance(command, SyncAdapters)
        self.asked += 1
        self.say(AdaptersChanged([AdapterInfo(1, "sql", "/sql", None)]))
        while not self._outputs.empty():
            await asyncio.sleep(0)
