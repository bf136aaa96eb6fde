"""A step as launches on persistent tensors: what the host says of it is in a page on the device, the rest is derived there.

    page ──prepare_inputs──► input_ids, positions, slots, lengths ──model──► logits ──sampler──► tokens ──commit_step──► rows
      ▲                                                                                                        │
     host                                              results ◄───────────────────────────────────────────────┘

The same code runs eagerly, in a warm-up and under a graph's capture: a launch depends on the shape alone, and no tensor that
outlives a launch is made in a step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from penstock.engine.attention.context import ForwardContext, GroupInputs
from penstock.engine.cache.layout import KVGroup
from penstock.engine.models.model import Model
from penstock.engine.runner.device.staging import aligned
from penstock.kernels.lora.device import DeviceLoraBatch
from penstock.kernels.ops import Ops
from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.sampling.buffers import RESULT
from penstock.kernels.step_state.batch import NO_SLOT, RowState, StepInputs, StepRequest
from penstock.kernels.step_state.ops import StepOps


class StepShape(NamedTuple):
    """All that the host decides of a step's launches."""

    num_tokens: int
    """Padding included."""
    num_reqs: int
    """Padding included."""
    max_query_len: int
    """No request has more tokens; 1: a decode step."""


class StepBuffers:
    """Tensors that steps are made in, each as large as the largest step wants it.

    Args:
        max_tokens: Of a step, padding included.
        max_reqs: Of a step, padding included.
        max_logits_rows: Rows of logits of a step.
        num_groups: KV groups.
        num_slots: Results that the host may not have read yet.
        device: Where they are.
    """

    def __init__(
        self, max_tokens: int, max_reqs: int, max_logits_rows: int, num_groups: int, num_slots: int, device: torch.device
    ) -> None:
        max_tokens = aligned(max_tokens)
        self.inputs = StepInputs(
            input_ids=torch.zeros(max_tokens, dtype=torch.int32, device=device),
            positions=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            slot_mapping=torch.full((num_groups, max_tokens), -1, dtype=torch.int64, device=device),
            token_slots=torch.full((max_tokens,), NO_SLOT, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(max_reqs, dtype=torch.int32, device=device),
            logits_indices=torch.zeros(max_reqs, dtype=torch.int64, device=device),
        )
        self.lora = DeviceLoraBatch(self.inputs.token_slots)
        self.results = torch.zeros(num_slots, max_logits_rows, RESULT, dtype=torch.int32, device=device)
        """[slots, max_logits_rows, RESULT]: what the sampler says of each request, or of each choice of a step with drafts; see
        its `Column`."""

    def of(self, shape: StepShape) -> StepInputs:
        """The inputs of a step of that shape; ValueError where it is larger than any was to be."""
        tokens, reqs, inputs = shape.num_tokens, shape.num_reqs, self.inputs
        if tokens > len(inputs.input_ids) or reqs > len(inputs.seq_lens):
            most = f"{len(inputs.input_ids)} tokens of {len(inputs.seq_lens)} requests"
            raise ValueError(f"a step of {tokens} tokens of {reqs} requests, where there is room for {most}")
        return StepInputs(
            input_ids=inputs.input_ids[:tokens],
            positions=inputs.positions[:tokens],
            slot_mapping=inputs.slot_mapping[:, :tokens],
            token_slots=inputs.token_slots[:tokens],
            seq_lens=inputs.seq_lens[:reqs],
            logits_indices=inputs.logits_indices[:reqs],
        )


class Step(NamedTuple):
    """One step of a shape: views of what is persistent."""

    shape: StepShape
    request: StepRequest
    inputs: StepInputs
    ctx: ForwardContext


class StepProgram:
    """The launches of a step, in the order of their use.

    Args:
        step_ops: Around the model.
        state: The rows.
        buffers: The step's.
        groups: KV groups.
        layer_groups: Per layer, its group.
        kv_scales: [layers, 2, kv_heads] float32, of a cache whose keys and values are divided by such; else None. A reload
            changes what they are, never where.
    """

    def __init__(
        self,
        step_ops: StepOps,
        state: RowState,
        buffers: StepBuffers,
        groups: Sequence[KVGroup],
        layer_groups: list[int],
        kv_scales: torch.Tensor | None,
    ) -> None:
        self.state, self.buffers, self.kv_scales = state, buffers, kv_scales
        self._step_ops, self._groups, self._layer_groups = step_ops, groups, layer_groups

    def step(
        self,
        shape: StepShape,
        request: StepRequest,
        ops: Ops,
        kv_caches: list[torch.Tensor],
        has_lora: bool = True,
        shares: bool = False,
    ) -> Step:
        """What a step of that shape works on. It is launched before the next one is asked for: with adapters, or without. With
        `shares` its requests read a prefix of all apart."""
        inputs = self.buffers.of(shape)
        self.buffers.lora.is_used = has_lora
        groups = [
            GroupInputs(
                inputs.slot_mapping[number],
                DeviceBatch(
                    block_size=group.block_size,
                    rows=request.rows,
                    query_start_loc=request.query_start_loc,
                    seq_lens=inputs.seq_lens,
                    block_table=self.state.block_tables[number],
                    window=group.window,
                    max_query_len=shape.max_query_len,
                    num_tokens=shape.num_tokens,
                    shared=request.shared if shares else None,
                ),
            )
            for number, group in enumerate(self._groups)
        ]
        scales = None if self.kv_scales is None else self.kv_scales.unbind()
        ctx = ForwardContext(ops, kv_caches, [groups[number] for number in self._layer_groups], kv_scales=scales)
        return Step(shape, request, inputs, ctx)

    def prepare(self, step: Step) -> None:
        """Derives the inputs."""
        self._step_ops.prepare_inputs(step.request, self.state, step.inputs)

    def forward(self, step: Step, model: Model) -> torch.Tensor:
        """Derives the inputs and runs the model: [n, hidden]."""
        self.prepare(step)
        return model.forward(step.inputs.input_ids, step.inputs.positions, step.ctx)

    def commit(self, step: Step, sampled: torch.Tensor) -> None:
        """Puts what was sampled, [r, RESULT], where the next step and the host find it, and moves the rows on."""
        self._step_ops.commit_step(sampled, step.request, step.inputs, self.state, self.buffers.results)

    def advance(self, step: Step) -> None:
        """Moves the rows on without tokens."""
        live = step.request.rows != self.state.spare_row
        self.state.num_computed[step.request.rows.long()] = torch.where(live, step.inputs.seq_lens, 0)

    def skip(self, step: Step) -> None:
        """Moves the rows on after a failure, wherever it was: as the host counts, the step has run."""
        self.prepare(step)
        self.advance(step)
