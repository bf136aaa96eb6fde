"""Logprobs as clients get them over HTTP equal Hugging Face transformers', for every family."""

import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from aiohttp import web
from test_parity import NAMES, prompt, reference_logprobs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.engine import AsyncLLM, EngineArgs
from penstock.engine.frontend.http.server import ApiServer

pytestmark = pytest.mark.slow

OUTPUTS, TOP, TOLERANCE = 5, 3, 3e-5
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token a byte, and one more: as many as the models know."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: at for at, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The HTTP server in front of an engine in this process."""
    args = EngineArgs(model=str(model), served_model_name=["m"], kv_cache_memory_bytes=8 * 2**20, device="cpu")
    async with AsyncLLM.from_args(args, in_process=True) as llm:
        runner = ApiServer(llm).runner(shutdown_timeout=0.2)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}", timeout=60) as http:
                yield http
        finally:
            await runner.cleanup()


async def ask(http: httpx.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    names_by_id = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    body = {"model": "m", "temperature": 0, "max_tokens": OUTPUTS, "ignore_eos": True, "prompt_logprobs": 0, **names_by_id}
    response = await http.post(path, json=body | fields)
    assert response.status_code == 200, response.text
    return response.json()


def check(
    expected: torch.Tensor, prompt_ids: list[int], prompt_logprobs: list[Any], steps: list[tuple[int, float, dict[str, float]]]
) -> None:
    """Holds what was said of a prompt and of the tokens behind it (id, logprob, alternatives by name) against transformers'."""
    assert prompt_logprobs[0] is None and len(prompt_logprobs) == len(prompt_ids)
    for at, token in enumerate(prompt_ids[1:]):
        assert prompt_logprobs[at + 1][str(token)]["logprob"] == pytest.approx(float(expected[at, token]), abs=TOLERANCE)
    for at, (token, logprob, others) in enumerate(steps, len(prompt_ids) - 1):
        best = torch.topk(expected[at], TOP)
        assert token == int(best.indices[0]) and logprob == pytest.approx(float(best.values[0]), abs=TOLERANCE)
        due = {f"token_id:{other}": float(value) for other, value in zip(best.indices, best.values, strict=True)}
        assert others == pytest.approx(due, abs=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
async def test_logprobs_over_http_equal_transformers(
    name: str, checkpoint: Callable[[str], Path], tokenizer_files: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = shutil.copytree(checkpoint(name), tmp_path / "model")
    shutil.copytree(tokenizer_files, model, dirs_exist_ok=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").float().eval()
    async with served(model) as http:
        ids = prompt(5, 90)
        [choice] = (await ask(http, "/v1/completions", prompt=ids, logprobs=TOP))["choices"]
        told = choice["logprobs"]
        steps = list(zip(choice["token_ids"], told["token_logprobs"], told["top_logprobs"], strict=True))
        check(reference_logprobs(reference, ids + choice["token_ids"]), ids, choice["prompt_logprobs"], steps)

        chat = {"messages": [{"role": "user", "content": "the wheel turns the mill " * 3}], "logprobs": True, "top_logprobs": TOP}
        answer = await ask(http, "/v1/chat/completions", **chat)
        [choice], ids = answer["choices"], answer["prompt_token_ids"]
        steps = [
            (token, entry["logprob"], {other["token"]: other["logprob"] for other in entry["top_logprobs"]})
            for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True)
        ]
        check(reference_logprobs(reference, ids + choice["token_ids"]), ids, answer["prompt_logprobs"], steps)
