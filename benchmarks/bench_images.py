"""What an image costs: the tower beside transformers', and the second question about an image beside the first.

    make bench-images
    make bench-images ARGS=--quick

The tower has CLIP-L's width and 577 tokens, and some of its layers, with random weights; the decoder is small. Two gates. The
tower makes at least as many embeddings a second as transformers', in the same number type, on one thread, with as many layers.
And the first token of a second question about an image takes at most a fifth of the time of the first question's. The sides take
turns in one process, so that a machine that others use too slows both alike.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from PIL import Image
from report import write_results

from penstock.engine.args import EngineArgs
from penstock.engine.core.ipc.process import build_core, build_executor
from penstock.engine.messages import AddRequest
from penstock.engine.models.model import VisionModel
from penstock.engine.multimodal.inputs import ImageInput
from penstock.engine.multimodal.normalization import normalized
from penstock.engine.multimodal.resize import resized
from penstock.engine.runner.images import whole
from penstock.engine.runner.model_runner import ModelRunner
from penstock.engine.sampling import SamplingParams
from penstock.prompt.hashing import PromptItem

SIZE, PATCH, LAYERS = 336, 14, 6
ROUNDS, QUICK_ROUNDS = 8, 2
TOWER_GATE, TTFT_GATE = 1.0, 0.2
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


def picture(seed: int) -> Image.Image:
    """Of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (480, 640, 3), np.uint8))


def seconds(work: Callable[[], Any]) -> float:
    """That it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


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

    def __init__(self, folder: Path) -> None:
        config = EngineArgs(model=str(folder), dtype="float32", device="cpu", kv_cache_memory_bytes=2**27).config()
        executor, blocks = build_executor(config)
        self._core = build_core(config, executor, blocks, epoch=1)
        self._settings = config.model.images
        self._added = 0

    def ttft(self, seed: int, question: int) -> float:
        """Seconds to the first token of a question about an image."""
        assert self._settings is not None
        length = self._settings.tokens
        prompt = [1, *[self._settings.token_id] * length, *range(2, 22), question]
        image = ImageInput(PromptItem(str(seed), 1, length), resized(picture(seed), self._settings.resize))
        self._added += 1
        request = AddRequest(self._added, "", prompt, SamplingParams(max_tokens=1), time.time(), images=[image])

        def run() -> None:
            self._core.handle(request)
            while (frame := self._core.step()) is None or not frame.finished:
                pass
            if frame.finished[0].error is not None:
                raise RuntimeError(f"a request failed: {frame.finished[0]}")

        return seconds(run)


def measure_questions(folder: Path, rounds: int) -> dict[str, Any]:
    """The first question about an image, and the second."""
    engine = Engine(folder)
    engine.ttft(rounds, 30)  # warms the kernels
    times = [(engine.ttft(seed, 30), engine.ttft(seed, 31)) for seed in range(rounds)]
    first, second = (statistics.median(of) for of in zip(*times, strict=True))
    ratio = statistics.median(second / first for first, second in times)
    return {"first ms": round(1e3 * first, 1), "second ms": round(1e3 * second, 1), "ratio": round(ratio, 3), "gate": TTFT_GATE}


def measure(rounds: int) -> dict[str, Any]:
    """All gates' figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        towers = {dtype: measure_tower(folder, dtype, rounds) for dtype in DTYPES}
        questions = measure_questions(folder, rounds)
    passed = {f"tower {dtype}": found["ratio"] >= TOWER_GATE for dtype, found in towers.items()}
    return {"tower": towers, "ttft": questions, "passed": passed | {"second question": questions["ratio"] <= TTFT_GATE}}


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; nothing is written")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    quick: bool = parser.parse_args().quick
    results = measure(QUICK_ROUNDS if quick else ROUNDS)
    print(json.dumps(results, indent=2))
    if not quick:
        print(write_results("images", results))


if __name__ == "__main__":
    main()
