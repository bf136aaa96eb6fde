"""A device's state by request row, and the inputs of a step that are derived from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PAD_SLOT = -1
"""Where the keys and values of a padding token go: nowhere."""
NO_SLOT = -1
"""The LoRA slot of rows and tokens without an adapter."""


@dataclass(frozen=True)
class RowState:
    """Of `rows` requests; the last row is nobody's, and all that padding requests have. Changes by plans and by what is
    sampled."""

    token_ids: torch.Tensor
    """[rows, max_model_len], int32: known and sampled tokens."""
    num_computed: torch.Tensor
    """[rows], int32: tokens whose KV exists once all steps launched so far have run; where the row's next step begins."""
    block_tables: torch.Tensor
    """[groups, rows, max_blocks], int32: each KV group's table."""
    block_sizes: torch.Tensor
    """[groups], int32: tokens a block."""
    lora_slots: torch.Tensor
    """[rows], int32: where each row's adapter is; NO_SLOT: it has none."""

    @property
    def spare_row(self) -> int:
        """Of padding requests."""
        return self.num_computed.shape[0] - 1


class Targets:
    """Tensors that changes go to.

    Args:
        tensors: Contiguous, int32, on one device. Their addresses must stay.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        device = tensors[0].device
        addresses = [0 if device.type == "meta" else tensor.data_ptr() for tensor in tensors]
        self.addresses = torch.tensor(addresses, dtype=torch.int64).to(device)
        """[targets]."""


@dataclass(frozen=True)
class StepRequest:
    """What the host says of a step of r requests, padding included: neither positions nor tokens."""

    rows: torch.Tensor
    """[r], int32; the spare row pads."""
    query_start_loc: torch.Tensor
    """[r + 1], int32: request i has the tokens query_start_loc[i] to query_start_loc[i + 1]."""
    samples: torch.Tensor
    """[r], int32: 1 where the request's sampled token counts."""
    result: torch.Tensor
    """[1], int32: into which slot of the results the step's go."""
    shared: torch.Tensor
    """[1], int32: first tokens that all requests share; see `DeviceBatch.shared`."""


@dataclass(frozen=True)
class StepInputs:
    """What is derived: buffers of n tokens and r requests, padding included, written anew in every step."""

    input_ids: torch.Tensor
    """[n], int32; 0 pads."""
    positions: torch.Tensor
    """[n], int64; 0 pads."""
    slot_mapping: torch.Tensor
    """[groups, n], int64, not necessarily contiguous: block · block_size + offset; PAD_SLOT pads."""
    token_slots: torch.Tensor
    """[n], int32: the LoRA slot of each token's row; NO_SLOT pads."""
    seq_lens: torch.Tensor
    """[r], int32: tokens with keys once the step has run, which is also where its sampled token belongs; 0 pads."""
    logits_indices: torch.Tensor
    """[r], int64: the last token of each request."""
