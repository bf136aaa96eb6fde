"""Passes of a drafter on a device: the host says which tokens they read, and where those stand in the cache."""

from collections.abc import Sequence

import numpy as np
import torch

from penstock.engine.attention.backends.interface import StepLengths
from penstock.engine.attention.backends.phases import AttentionPhases
from penstock.engine.attention.context import GroupInputs
from penstock.engine.cache.layout import KVGroup
from penstock.engine.core.plan import NONE, Int32
from penstock.engine.runner.device.runtime import Copies
from penstock.engine.runner.device.uploads import upload
from penstock.engine.runner.input_batch import LazyGroups, Placed, StepArrays, StepInputs
from penstock.kernels.paged_attention.device_batch import DeviceBatch


class DeviceArrays(StepArrays):
    """Brings a pass to the device in one copy.

    Args:
        max_num_tokens: Of a pass at most.
        max_num_seqs: Rows.
        max_model_len: Tokens of a row at most.
        groups: The KV groups.
        runtime: The device.
        block_tables: [groups, at least rows, blocks]: the device's, of the last step.
        attention: Of the drafter's layers.
    """

    def __init__(
        self,
        max_num_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        groups: Sequence[KVGroup],
        runtime: Copies,
        block_tables: torch.Tensor,
        attention: AttentionPhases,
    ) -> None:
        super().__init__(max_num_tokens, max_num_seqs, max_model_len, groups, max_num_seqs)
        self._runtime, self._block_tables, self._attention = runtime, block_tables, attention

    def inputs(
        self, placed: Placed, token_ids: Int32 | torch.Tensor, logits_indices: Int32, sampled_rows: Int32 = NONE
    ) -> StepInputs:
        """The step of tokens that have been placed, which may be on the device; its tensors are there."""
        lengths = StepLengths(placed.rows.astype(np.int32), placed.query_start_loc, placed.seq_lens)
        wide = [placed.positions, logits_indices, *(placed.groups[at].slot_mapping.numpy() for at in range(len(self._groups)))]
        here = [lengths.rows, lengths.query_start_loc, lengths.seq_lens, *(array.astype(np.int64) for array in wide)]
        if not isinstance(token_ids, torch.Tensor):
            here.append(token_ids)
        rows, begins, seq_lens, positions, wanted, *rest = upload(self._runtime, *here)
        self._attention.begin_step(lengths)
        longest = int(np.diff(placed.query_start_loc).max(initial=1))
        groups = [
            GroupInputs(
                slots,
                DeviceBatch(
                    block_size=group.block_size,
                    rows=rows,
                    query_start_loc=begins,
                    seq_lens=seq_lens,
                    block_table=self._block_tables[number],
                    window=group.window,
                    max_query_len=longest,
                    num_tokens=len(placed.positions),
                ),
            )
            for number, (group, slots) in enumerate(zip(self._groups, rest, strict=False))
        ]
        ids = token_ids if isinstance(token_ids, torch.Tensor) else rest[-1]
        return StepInputs(ids, positions, LazyGroups(groups.__getitem__), wanted, False, sampled_rows, placed)
