"""A device runner's step as what graphs are captured of."""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.model import Model
from penstock.engine.runner.device.graphs.descriptor import BatchDescriptor
from penstock.engine.runner.device.graphs.pieces import Attend
from penstock.engine.runner.device.program import Step, StepProgram, StepShape
from penstock.engine.runner.device.runtime import DeviceRuntime
from penstock.engine.runner.device.staging import Staging
from penstock.engine.runner.sampler.sampler import Sampler
from penstock.kernels.ops import Ops
from penstock.kernels.prepare_kv.reference import Rotary
from penstock.kernels.sampling.buffers import Path

LOGITS: Final = "logits"
"""The variant that ends with the logits: what follows runs kernel by kernel."""
VERIFICATION: Final = "verification"
"""The variant of steps in which each request has as many drafts as it may: it ends with the logits of all tokens."""
SERVED_BY: Mapping[Hashable, Sequence[Hashable]] = {
    Path.GREEDY: (Path.GREEDY, Path.RANDOM, Path.FILTERED),
    Path.RANDOM: (Path.RANDOM, Path.FILTERED),
    Path.FILTERED: (Path.FILTERED,),
    LOGITS: (LOGITS,),
    VERIFICATION: (VERIFICATION,),
}
"""Variants of a step: how far the sampler must go, of which a longer way leads to the same tokens."""
VARIANTS: Sequence[Hashable] = (Path.FILTERED, Path.GREEDY, LOGITS, Path.RANDOM)
"""In the order of their capture: with the first every step that samples has a graph. With drafts, `VERIFICATION` comes beside
it."""

SHARING: Final = Path.FILTERED
"""The variant that is also captured in the form that reads a shared prefix apart: it serves every step that samples."""

FEW: Final = Path.FILTERED
"""The variant whose mixed graphs are also captured for few requests; likewise."""


@dataclass(frozen=True)
class _PieceContext:
    """A forward context whose attention is somebody else's."""

    attend: Attend


class Loaded(Protocol):
    """What steps run on. Another model or another cache needs other graphs."""

    @property
    def model(self) -> Model:
        """The model that is served."""
        ...

    @property
    def ops(self) -> Ops:
        """Its operations."""
        ...

    @property
    def kv_caches(self) -> list[torch.Tensor]:
        """Of its layers."""
        ...


class CapturableStep:
    """See `Capturable`.

    Args:
        loaded: As it is at each step.
        program: The launches.
        staging: Brings requests to the device.
        sampler: The last part of a step.
        runtime: The device.
    """

    def __init__(self, loaded: Loaded, program: StepProgram, staging: Staging, sampler: Sampler, runtime: DeviceRuntime) -> None:
        self._loaded = loaded
        self._program, self._staging, self._sampler, self._runtime = program, staging, sampler, runtime
        self._current: Step | None = None
        self._replayed: dict[BatchDescriptor, Step] = {}

    def arguments(self) -> dict[str, torch.Tensor]:
        """The persistent tensors that a step reads."""
        state, buffers = self._program.state, self._program.buffers
        return {
            "page": self._staging.request(1).rows,
            "token_ids": state.token_ids,
            "num_computed": state.num_computed,
            "block_tables": state.block_tables,
            "input_ids": buffers.inputs.input_ids,
            "positions": buffers.inputs.positions,
            "slot_mapping": buffers.inputs.slot_mapping,
            "seq_lens": buffers.inputs.seq_lens,
            "logits_indices": buffers.inputs.logits_indices,
            "results": buffers.results,
            "params": self._sampler.params,
            "kv_cache": self._loaded.kv_caches[0],
        }

    def at(self, key: BatchDescriptor, num_reqs: int, max_query_len: int) -> Step:
        """The step that is launched next: of the key's size, or of `num_reqs` requests where the key leaves that open."""
        shape = StepShape(key.num_tokens, key.num_reqs or num_reqs, key.uniform_query_len or max_query_len)
        request, loaded = self._staging.request(shape.num_reqs), self._loaded
        self._current = self._program.step(shape, request, loaded.ops, loaded.kv_caches, key.has_lora, key.shares)
        return self._current

    def replayed(self, key: BatchDescriptor) -> Step:
        """What a graph of the whole step works on: always the same, and made once."""
        step = self._replayed.get(key)
        if step is None:
            step = self._replayed[key] = self.at(key, key.num_reqs or key.num_tokens, key.num_tokens)
        return step

    def forget(self) -> None:
        """Lets go of the steps, and with them of the cache that they were on."""
        self._current = None
        self._replayed.clear()

    def pad(self, key: BatchDescriptor) -> None:
        """Makes the persistent inputs those of a batch of padding alone, which changes nothing that anybody reads."""
        requests, length = key.num_reqs or 1, key.uniform_query_len or 0
        rows = np.full(requests, self._program.state.spare_row, np.int32)
        starts = np.arange(requests + 1, dtype=np.int32) * length
        slot = self._staging.send(rows, starts, np.zeros(requests, np.bool_))
        with ExitStack() as ends:
            # Also of a capture that fails here, after which steps follow. Its page may be read until the device is done.
            ends.callback(self._staging.over, slot)
            ends.callback(self._runtime.synchronize)
            self._program.prepare(self.at(key, requests, max_query_len=key.num_tokens))

    def step(self, key: BatchDescriptor) -> torch.Tensor:
        """The whole step, as far as its variant goes; its logits."""
        # A batch of its own for each run: what attention derives from one lies in the graph that it was captured in.
        shape = self._of(key).shape
        step = self.at(key, shape.num_reqs, shape.max_query_len)
        hidden = self._program.forward(step, self._loaded.model)
        # Every row of hidden states counts, in the order in which they are: requests have one token each, or drafts.
        rows = hidden if key.uniform else hidden.index_select(0, step.inputs.logits_indices)
        logits = self._loaded.model.compute_logits(rows)
        if isinstance(key.variant, Path):
            sampled = self._sampler.sample(logits, step.request.rows, step.inputs.seq_lens, key.variant)
            self._program.commit(step, sampled)
        return logits

    def forward(self, key: BatchDescriptor, attend: Attend) -> torch.Tensor:
        """See Capturable; the inputs have been prepared."""
        inputs = self._of(key).inputs
        return self._loaded.model.forward(inputs.input_ids, inputs.positions, _PieceContext(attend))

    def attend(
        self,
        layer: Attention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The attention of the inputs as they are; see `ForwardContext.attend`."""
        assert self._current is not None
        return self._current.ctx.attend(layer, q, k, v, rotary, out)

    def _of(self, key: BatchDescriptor) -> Step:
        step = self._current
        if step is None or step.shape.num_tokens != key.num_tokens:
            raise RuntimeError(f"the inputs are not those of {key}")
        return step
