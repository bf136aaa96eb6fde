"""A runner's profile: torch's own, of all threads, with the parts of a step by name."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.model import Model
from penstock.engine.ranges import Ranges, named


class RunnerProfile:
    """Begins at once; `end` writes it.

    Args:
        runner: Whose steps; its model is made of `layers` with `self_attn` and `mlp`, and of an `lm_head` unless that is None.
            What a graph launches as a whole has no parts in it.
        model: Of the runner.
        config: The model's shape.
    """

    def __init__(self, runner: Any, model: Model, config: DecoderConfig) -> None:
        self._ranges = ranges = Ranges()
        ranges.around(runner, "execute", "execute")
        ranges.around(runner, "sample", "sample")
        for layer, window in zip(model.layers, config.windows, strict=True):
            ranges.around(layer, "self_attn", "attention" if window is None else "sliding attention")
            ranges.around(layer, "mlp", "mlp")
        ranges.replace(model, "layers", [named(f"layer {index}", layer) for index, layer in enumerate(model.layers)])
        if model.lm_head is not None:
            ranges.around(model, "lm_head", "lm_head")
        ops = runner.ops
        attend, prepare = named("attend", ops.paged_attention), named("prepare_kv", ops.prepare_kv)
        ranges.replace(runner, "ops", replace(ops, paged_attention=attend, prepare_kv=prepare))
        # Private, and the only way: the scheduler may be in another thread than the runner.
        everywhere = _ExperimentalConfig(profile_all_threads=True)
        cuda = [ProfilerActivity.CUDA] if runner.config.device == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *cuda], experimental_config=everywhere)
        self._profile.start()

    def end(self, folder: Path, suffix: str = "") -> Path:
        """Writes a trace for Chrome (chrome://tracing) or Perfetto into a folder, which is made where it is not; returns the
        file. Where that is an `OSError`, such as a full disk, no part of it is left."""
        self._profile.stop()
        self._ranges.end()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"penstock-{time.time_ns() // 10**6}{suffix}.json.gz"
        try:
            self._profile.export_chrome_trace(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path
