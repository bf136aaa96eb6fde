"""Launches every kernel variant that serving a model launches, on a device that is not there: within `compile_only` that fills
Triton's cache, so that no request waits for a compiler.

What runs is the device runner itself, with its weights and tensors on the device `meta`: shapes without content. So what is
compiled is what is launched, whatever the launches are made of.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.engine.attention.backends.gluon import GluonBackend
from penstock.engine.attention.backends.phases import AttentionPhases
from penstock.engine.attention.backends.triton import TritonBackend
from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.loading.loader import Source
from penstock.engine.models.config import DecoderConfig
from penstock.engine.runner.device.device_runner import DeviceForms, DeviceRunner
from penstock.engine.runner.device.graphs.runtime import CapturedGraph
from penstock.engine.runner.device.runtime import DeviceFailed, DeviceMemory
from penstock.engine.sampling import SamplingParams
from penstock.kernels.ops import triton_ops
from penstock.kernels.paged_attention.launch import attention_steps
from penstock.kernels.sampling.ops import sampling_ops
from penstock.kernels.step_state.ops import triton_step_ops

_DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
)
_SCORES: tuple[dict[str, Any], ...] = ({}, {"logprobs": 20, "prompt_logprobs": 5})
_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.1},
    {"logit_bias": ((1, 1.0),), "bad_words": ((1, 2),), "min_tokens": 1, "stop_token_ids": (0,)},
)
SAMPLING = [
    SamplingParams(max_tokens=2, **draw, **score, **change) for draw in _DRAWS for score in _SCORES for change in _CHANGES
]
"""One for each way that a row is sampled: how the token is drawn, whether it is scored, what changes its logits."""
_ROOM = 1 << 40


class _Nothing:
    def wait(self) -> None:
        """At once."""


class MetaRuntime:
    """A device without content: copies bring nothing, and memory has no end. See `DeviceRuntime`."""

    device = torch.device("meta")
    shares_memory = False

    def pinned(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Zeros, which is what every result is."""
        return torch.zeros(shape, dtype=dtype)

    def main_stream(self) -> nullcontext[None]:
        """There is one."""
        return nullcontext()

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Do nothing."""

    def download(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> _Nothing:
        """Do nothing."""
        return _Nothing()

    def synchronize(self) -> None:
        """Nothing runs."""

    def memory(self) -> DeviceMemory:
        """More than anybody wants."""
        return DeviceMemory(_ROOM, _ROOM, 0, 0, 0)

    def reset_peak(self) -> None:
        """There is none."""

    def return_free_memory(self) -> None:
        """There is none."""

    def failure(self, error: Exception) -> DeviceFailed | None:
        """It never fails."""
        return None


class MetaGraphs:
    """Captures nothing: what is launched under a capture is compiled, and that is all. See `GraphRuntime`."""

    def new_pool(self) -> None:
        """Memory of nobody."""

    def begin(self, pool: object) -> None:
        """Do nothing."""

    def end(self) -> CapturedGraph:
        """A graph of nothing."""
        return self

    def replay(self) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor."""
        return tensor


class MetaRunner(DeviceRunner):
    """A device runner whose weights are nowhere.

    Args:
        config: The engine's.
        arch: What is compiled for, such as sm_90.
    """

    def __init__(self, config: EngineConfig, arch: str) -> None:
        major, minor = divmod(int(arch.removeprefix("sm_")), 10)
        self._capability = (major, minor)
        super().__init__(config, MetaRuntime(), graphs=MetaGraphs())
        # Those of a GPU, which only sees shapes: nothing asks whether one is there.
        self._given = DeviceForms(
            triton_ops(self._dtype, self._capability), triton_step_ops(), sampling_ops(torch.device("cuda"))
        )

    def _choose_attention(self, config: DecoderConfig) -> AttentionPhases:
        """The one whose kernels are compiled here."""
        asked, needs = self.config.attention_backend, self._attention_needs(config)
        if asked not in (None, TritonBackend.name, GluonBackend.name):
            raise ConfigError(f"--attention-backend {asked} brings kernels of its own: those of triton alone are compiled ahead")
        chosen = GluonBackend if GluonBackend.name in (asked, self.config.prefill_attention_backend) else TritonBackend
        if reasons := chosen.refusals(replace(needs, device="cuda", capability=self._capability)):
            raise ConfigError(f"no kernels for this model's attention: {', '.join(reasons)}")
        backend = chosen(needs)
        return AttentionPhases(backend, backend, self._max_decode_tokens)

    def _fill(self, source: Source) -> None:
        """Nothing but the forms that weights take."""
        with torch.inference_mode():
            self.model.finish()
        self._source = source


class Shape(NamedTuple):
    """A step that is launched for its variants."""

    decodes: int
    """Requests with one token each."""
    prompt: int
    """Tokens of one more request; 0: there is none."""


def shapes(max_num_seqs: int, max_num_batched_tokens: int) -> list[Shape]:
    """Steps in which every number that a launch may depend on takes every kind of value: 1, multiples of 16 and others, powers of
    two, one less, one more, and the largest; and those of `attention_steps`."""
    found = [Shape(decodes, 0) for decodes in _numbers(max_num_seqs)]
    for prompt in _numbers(max_num_batched_tokens):
        found.append(Shape(0, prompt))
        if prompt + 1 < max_num_batched_tokens:
            found.append(Shape(min(max_num_seqs - 1, max_num_batched_tokens - prompt, max(prompt // 4, 1)), prompt))
    steps = attention_steps(max_num_seqs, max_num_batched_tokens, max_num_batched_tokens)
    return list(dict.fromkeys([*found, *(Shape(len(lengths) - 1, lengths[-1]) for lengths in steps)]))


def _numbers(most: int) -> list[int]:
    powers = [1 << power for power in range(most.bit_length())]
    near = chain.from_iterable((power - 1, power, power + 1, power * 3 // 2) for power in powers)
    return sorted({number for number in (*range(1, 17), *near, most) if 1 <= number <= most})


def launch_all(runner: MetaRunner) -> Iterator[Shape]:
    """Launches every step, and says which one is next.

    Args:
        runner: Loaded, with a cache.
    """
    scheduler, longest = runner.config.scheduler, runner.config.model.max_model_len - 1
    for shape in shapes(scheduler.max_num_seqs, scheduler.max_num_batched_tokens):
        yield shape
        # How a row is sampled has to do with how many are; of a prompt's tokens that are scored there may be any number.
        for sampling in SAMPLING if not shape.prompt else [it for it in SAMPLING if it.prompt_logprobs][:1]:
            lengths = np.array([1] * shape.decodes + [min(shape.prompt, longest)] * (shape.prompt > 0), np.int32)
            runner.run_null_step(lengths, np.ones(len(lengths), np.bool_), sampling)
    # Last, as steps that have a graph launch nothing.
    while runner.graphs.capture_next():
        pass
    if failed := runner.graphs.report().failed:
        raise RuntimeError(f"{failed} graphs could not be captured")
