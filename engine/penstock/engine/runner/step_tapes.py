"""Decode steps that run from a tape: on a CPU, a small model's step is mostly the interpreter's.

A tape belongs to a number of rows that have one token each and all sample. It is recorded by the first such step, which it is as
well, over inputs that stay where they are; each later step writes its own into them.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.engine.attention.context import ForwardContext, GroupInputs
from penstock.engine.cache.layout import KVGroup
from penstock.engine.runner.input_batch import StepInputs
from penstock.kernels.cpu.tape import NotTapeable, Pool, Tape
from penstock.kernels.ops import Ops
from penstock.kernels.paged_attention.batch import PagedBatch

log = logging.getLogger(__name__)

MAX_ROWS = 64
"""Rows of a step from a tape at most: the arithmetic of more takes far longer than what a tape saves."""


class StepTapes:
    """Of one model and one KV cache; to be thrown away with either.

    Args:
        model: `forward` and `compute_logits`.
        ops: Whose `tape` records.
        kv_caches: By layer.
        groups: The KV groups.
        layer_groups: By layer, its group.
        max_rows: Of a step.
        max_model_len: Tokens of a row at most.
    """

    def __init__(
        self,
        model: Any,
        ops: Ops,
        kv_caches: list[torch.Tensor],
        groups: Sequence[KVGroup],
        layer_groups: Sequence[int],
        max_rows: int,
        max_model_len: int,
    ) -> None:
        self._model, self._ops, self._kv_caches = model, ops, kv_caches
        self._groups, self._layer_groups = groups, layer_groups
        self._max_rows = rows = min(max_rows, MAX_ROWS)
        self._input_ids, self._positions = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._starts, self._seq_lens = np.arange(rows + 1, dtype=np.int32), np.zeros(rows, np.int32)
        self._slots = [np.zeros(rows, np.int64) for _ in groups]
        self._tables = [np.zeros((rows, -(-max_model_len // group.block_size)), np.int32) for group in groups]
        self._pool = Pool()
        self._tapes: dict[int, Tape] = {}

    def fits(self, inputs: StepInputs) -> bool:
        """Whether there is, or can be, a tape for a step."""
        rows = len(inputs.groups[0].batch.seq_lens)
        return len(inputs.input_ids) == rows == len(inputs.sampled_rows) and 0 < rows <= self._max_rows

    def logits(self, inputs: StepInputs) -> torch.Tensor | None:
        """[n, vocab], float32, of a step that fits; the next one overwrites them. None: no step of this model fits."""
        rows = len(inputs.input_ids)
        self._input_ids[:rows] = inputs.input_ids.numpy()
        self._positions[:rows] = inputs.positions.numpy()
        self._seq_lens[:rows] = inputs.groups[0].batch.seq_lens
        for slots, table, group in zip(self._slots, self._tables, inputs.groups, strict=True):
            slots[:rows] = group.slot_mapping.numpy()
            table[:rows, : group.batch.block_table.shape[1]] = group.batch.block_table
        tape = self._tapes.get(rows)
        if tape is not None:
            return tape.run()
        try:
            self._tapes[rows] = tape = self._record(rows)
        except NotTapeable as error:
            log.warning("decode steps run without tapes, and more slowly: %s", error)
            self._max_rows = 0
            return None
        return tape.result

    def _record(self, rows: int) -> Tape:
        ids, positions = torch.from_numpy(self._input_ids[:rows]), torch.from_numpy(self._positions[:rows])
        starts, lens = self._starts[: rows + 1], self._seq_lens[:rows]
        groups = [
            GroupInputs(torch.from_numpy(slots[:rows]), PagedBatch(group.block_size, starts, lens, table[:rows], group.window))
            for slots, table, group in zip(self._slots, self._tables, self._groups, strict=True)
        ]
        ctx = ForwardContext(self._ops, self._kv_caches, [groups[number] for number in self._layer_groups])
        assert self._ops.tape is not None
        return self._ops.tape(lambda: self._model.compute_logits(self._model.forward(ids, positions, ctx)), self._pool)
