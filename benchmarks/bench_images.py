"""What an image costs: the tower beside transformers', and the second question about an image beside the first.

    make bench-images
    make bench-images ARGS=--quick

The tower has CLIP-L's width and 577 tokens, and some of its layers, with random weights; the decoder is small. The gates:

- The tower makes at least as many embeddings a second as transformers', in the same number type, on one thread, with as many
  layers.
- The first token of a second question about an image takes at most a fifth of the time of the first question's.
- No step with a part of a tower's run takes more than twice as long as a chunk of text.
- Running decodes get their tokens at least 1 / 1.1 times as fast while images of 12 megapixels are fetched by HTTPS and decoded.
- The decoder of a model that reads images takes no more CPU time for text than one that reads text alone: at least 0.98 of its
  speed.

The sides take turns, so that a machine that others use too slows both alike.
"""

import argparse
import asyncio
import io
import json
import os
import ssl
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from aiohttp import web
from PIL import Image
from report import write_results
from tokenizers import Tokenizer, models

from penstock.engine import SamplingParams as RequestParams
from penstock.engine.args import EngineArgs
from penstock.engine.core.ipc.process import build_core, build_executor
from penstock.engine.frontend.async_llm import AsyncLLM
from penstock.engine.messages import AddRequest
from penstock.engine.models.model import VisionModel
from penstock.engine.multimodal.fetch import Fetcher
from penstock.engine.multimodal.inputs import ImageInput
from penstock.engine.multimodal.normalization import normalized
from penstock.engine.multimodal.reader import ImageReader
from penstock.engine.multimodal.resize import resized
from penstock.engine.runner.images import whole
from penstock.engine.runner.model_runner import ModelRunner
from penstock.engine.sampling import SamplingParams
from penstock.prompt.hashing import PromptItem
from penstock.prompt.images import ImagePart

SIZE, PATCH, LAYERS = 336, 14, 6
ROUNDS, QUICK_ROUNDS = 4, 2
CHUNK, TOKENS = 512, 200
"""Tokens of a step, and of an answer whose tokens are timed."""
HOST, PORT = "images.example", 18443
TOWER_GATE, TTFT_GATE, STEP_GATE, ITL_GATE, TEXT_GATE = 1.0, 0.2, 2.0, 1.1, 0.98
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def save_model(folder: Path) -> None:
    """A LLaVA with CLIP-L's width before a small Llama. All layers of the tower run, since transformers runs them anyway."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        image_size=SIZE,
        patch_size=PATCH,
    )
    text = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, eos_token_id=None
    )
    torch.manual_seed(0)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=999, vision_feature_layer=-1)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    sizes = {"size": {"shortest_edge": SIZE}, "crop_size": {"height": SIZE, "width": SIZE}}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    Tokenizer(models.WordLevel({f"w{at}": at for at in range(1000)}, "w0")).save(str(folder / "tokenizer.json"))


def picture(seed: int, height: int = 480, width: int = 640) -> Image.Image:
    """Of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def seconds(work: Callable[[], Any]) -> float:
    """CPU time that it takes: on one thread, the time that it would take on an idle machine."""
    began = time.process_time()
    work()
    return time.process_time() - began


@torch.inference_mode()
def measure_tower(folder: Path, dtype: str, rounds: int) -> dict[str, Any]:
    """Embeddings a second of both, and the ratio by turns."""
    config = EngineArgs(model=str(folder), dtype=dtype, device="cpu").config()  # type: ignore[arg-type]
    settings, runner = config.model.images, ModelRunner(config)
    assert settings is not None
    runner.load()
    theirs = transformers.LlavaForConditionalGeneration.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
    image = torch.from_numpy(normalized(resized(picture(0), settings.resize).array(), settings.normalization))
    batch = image.permute(2, 0, 1)[None].to(DTYPES[dtype])
    model = cast("VisionModel", runner.model)
    sides: dict[str, Callable[[], Any]] = {
        "penstock": lambda: whole(model.encode_image(image, None)),
        "transformers": lambda: theirs.get_image_features(batch),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            times[side].append(seconds(sides[side]))
    ratio = statistics.median(b / a for a, b in zip(times["penstock"][1:], times["transformers"][1:], strict=True))
    rates = {side: round(settings.tokens / statistics.median(of[1:]), 1) for side, of in times.items()}
    return {"embeddings/s": rates, "ratio": round(ratio, 3), "gate": TOWER_GATE}


class Engine:
    """A core turned by hand."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        args = EngineArgs(model=str(folder), dtype="float32", device="cpu", kv_cache_memory_bytes=2**27, **fields)
        config = args.config()
        executor, blocks = build_executor(config)
        self._core = build_core(config, executor, blocks, epoch=1)
        self._settings = config.model.images
        self._added = 0

    def question(self, seed: int, question: int) -> AddRequest:
        """A question about an image."""
        assert self._settings is not None
        settings, length = self._settings, self._settings.tokens
        prompt = [1, *[settings.token_id] * length, *range(2, 22), question]
        pixels = resized(picture(seed), settings.resize)
        cost = settings.cost.tokens(pixels.height * pixels.width)
        return self.request(prompt, 1, [ImageInput(PromptItem(str(seed), 1, length), pixels, cost=cost)])

    def request(self, prompt: list[int], max_tokens: int, images: list[ImageInput]) -> AddRequest:
        """A request for so many tokens."""
        self._added += 1
        params = SamplingParams(max_tokens=max_tokens)
        return AddRequest(self._added, "", prompt, params, time.time(), images=images)

    def steps(self, request: AddRequest) -> list[float]:
        """Seconds of each step until a request is answered."""
        self._core.handle(request)
        found: list[float] = []
        while True:
            began = time.perf_counter()
            frame = self._core.step()
            found.append(time.perf_counter() - began)
            if frame is not None and frame.finished:
                if frame.finished[0].error is not None:
                    raise RuntimeError(f"a request failed: {frame.finished[0]}")
                return found

    def ttft(self, seed: int, question: int) -> float:
        """Seconds to the first token of a question about an image."""
        return sum(self.steps(self.question(seed, question)))


def measure_questions(folder: Path, rounds: int) -> dict[str, Any]:
    """The first question about an image, and the second."""
    engine = Engine(folder)
    engine.ttft(rounds, 30)  # warms the kernels
    times = [(engine.ttft(seed, 30), engine.ttft(seed, 31)) for seed in range(rounds)]
    first, second = (statistics.median(of) for of in zip(*times, strict=True))
    ratio = statistics.median(second / first for first, second in times)
    return {"first ms": round(1e3 * first, 1), "second ms": round(1e3 * second, 1), "ratio": round(ratio, 3), "gate": TTFT_GATE}


def measure_steps(folder: Path, rounds: int) -> dict[str, Any]:
    """The longest step of a prompt with an image, whose run is divided, beside a chunk of text of as many tokens."""
    engine, chunk = Engine(folder, max_num_batched_tokens=CHUNK, enable_prefix_caching=False), [7] * CHUNK
    engine.steps(engine.request(chunk, 1, []))
    text, image, parts = list[float](), list[float](), 0
    for seed in range(rounds):
        text.append(max(engine.steps(engine.request(chunk, 1, []))))
        steps = engine.steps(engine.question(seed, 30))
        image.append(max(steps))
        parts = len(steps)
    ratio = statistics.median(longest / of for longest, of in zip(image, text, strict=True))
    times = {"text ms": round(1e3 * statistics.median(text), 1), "image ms": round(1e3 * statistics.median(image), 1)}
    return times | {"steps": parts, "ratio": round(ratio, 3), "gate": STEP_GATE}


def measure_text(folder: Path, rounds: int) -> dict[str, Any]:
    """CPU time of text with and without images being read."""
    sides = {"images": Engine(folder), "text": Engine(folder, limit_mm_per_prompt={"image": 0})}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(4 * rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            began = time.process_time()
            sides[side].steps(sides[side].request([number + 1] * 64, 64, []))
            times[side].append(time.process_time() - began)
    ratio = statistics.median(text / image for image, text in zip(times["images"][1:], times["text"][1:], strict=True))
    cpu = {f"{side} CPU ms": round(1e3 * statistics.median(of[1:]), 1) for side, of in times.items()}
    return cpu | {"ratio": round(ratio, 3), "gate": TEXT_GATE}


def save_certificate(folder: Path) -> tuple[str, str]:
    """Files of a certificate of the site's own, and of its key."""
    certificate, key = str(folder / "tls.crt"), str(folder / "tls.key")
    made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "1")
    subprocess.run([*made, "-subj", f"/CN={HOST}", "-addext", f"subjectAltName=DNS:{HOST}"], check=True, capture_output=True)
    return certificate, key


@asynccontextmanager
async def site(certificate: str, key: str, data: bytes) -> AsyncIterator[Fetcher]:
    """A server of one file by HTTPS on this machine, as a fetcher that may ask it."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=data, content_type="image/jpeg")

    async def resolve(_host: str, _port: int) -> list[str]:
        return ["127.0.0.1"]

    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", PORT, ssl_context=tls).start()
    try:
        trusted = ssl.create_default_context(cafile=certificate)
        yield Fetcher([HOST], resolve=resolve, permits=lambda _: True, tls=trusted, port=PORT)
    finally:
        await runner.cleanup()


async def stream(llm: AsyncLLM) -> list[float]:
    """Seconds between the tokens of an answer."""
    params = RequestParams(max_tokens=TOKENS, output_kind="delta")
    stamps = [time.perf_counter() async for _ in llm.generate({"prompt_token_ids": [1, 2, 3]}, params)]
    return [after - before for before, after in pairwise(stamps)]


async def measure_decodes(folder: Path, certificate: tuple[str, str], rounds: int) -> dict[str, Any]:
    """Time between tokens, with images of 12 megapixels being fetched and decoded and without."""
    file = io.BytesIO()
    picture(0, 3000, 4000).save(file, "JPEG")
    args = EngineArgs(model=str(folder), dtype="float32", device="cpu", kv_cache_memory_bytes=2**27, max_num_seqs=8)
    config = args.config()
    assert config.model.images is not None
    quiet, busy, read, ratios = list[float](), list[float](), 0, list[float]()
    async with site(*certificate, file.getvalue()) as fetcher, AsyncLLM.from_config(config) as llm:
        reader = ImageReader(config.model.images, fetcher)
        await stream(llm)
        for _ in range(rounds):
            quiet.append(statistics.median(await stream(llm)))
            running = asyncio.ensure_future(stream(llm))
            while not running.done():
                await reader.read([ImagePart(f"https://{HOST}:{PORT}/a.jpg", "url")])
                read += 1
            busy.append(statistics.median(await running))
            ratios.append(busy[-1] / quiet[-1])
        reader.close()
    times = {"quiet ms": round(1e3 * statistics.median(quiet), 2), "busy ms": round(1e3 * statistics.median(busy), 2)}
    return times | {"images read": read, "ratio": round(statistics.median(ratios), 3), "gate": ITL_GATE}


def measure(rounds: int) -> dict[str, Any]:
    """All gates' figures, with a verdict for each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        # More turns where a gate is near.
        towers = {dtype: measure_tower(folder, dtype, rounds * (1 if dtype == "bfloat16" else 3)) for dtype in DTYPES}
        questions, steps = measure_questions(folder, rounds), measure_steps(folder, rounds)
        text = measure_text(folder, 3 * rounds)
        decodes = asyncio.run(measure_decodes(folder, save_certificate(folder), rounds))
    passed = {f"tower {dtype}": found["ratio"] >= TOWER_GATE for dtype, found in towers.items()} | {
        "second question": questions["ratio"] <= TTFT_GATE,
        "longest step": steps["ratio"] <= STEP_GATE,
        "time between tokens": decodes["ratio"] <= ITL_GATE,
        "text alone": text["ratio"] >= TEXT_GATE,
    }
    figures = {"tower": towers, "ttft": questions, "steps": steps, "decodes": decodes, "text": text}
    return figures | {"passed": passed}


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; nothing is written")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the core's process
    transformers.logging.set_verbosity_error()
    quick: bool = parser.parse_args().quick
    results = measure(QUICK_ROUNDS if quick else ROUNDS)
    print(json.dumps(results, indent=2))
    if not quick:
        print(write_results("images", results))


if __name__ == "__main__":
    main()
