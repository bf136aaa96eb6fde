"""The rows on the device: where they begin, and what of a plan they must learn.

Little of it: what a step computes and samples moves them on by itself. The host's table knows the lengths, and with them the
places where blocks are appended.
"""

from collections.abc import Sequence

import numpy as np
import torch

from penstock.engine.cache.layout import KVGroup
from penstock.engine.config import ConfigError
from penstock.engine.core.plan import StepPlan
from penstock.engine.core.row_table import RowTable
from penstock.engine.runner.device.staging import MAX_TARGET, Changes, aligned
from penstock.kernels.step_state.batch import NO_SLOT, RowState


def new_rows(groups: Sequence[KVGroup], max_num_seqs: int, max_model_len: int, device: torch.device) -> RowState:
    """The state of no requests.

    Raises:
        ConfigError: The table of tokens would be too large.
    """
    rows, most = max_num_seqs + 1, aligned(max(-(-max_model_len // group.block_size) for group in groups))
    if rows * max_model_len > MAX_TARGET or len(groups) * rows * most > MAX_TARGET:
        raise ConfigError(
            f"--max-num-seqs {max_num_seqs} x --max-model-len {max_model_len}: the device's table of tokens would have more than "
            f"{MAX_TARGET} entries"
        )

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    sizes = torch.tensor([group.block_size for group in groups], dtype=torch.int32).to(device)
    tables = zeros(len(groups), rows, most)
    return RowState(zeros(rows, max_model_len), zeros(rows), tables, sizes, torch.full_like(zeros(rows), NO_SLOT))


def targets(state: RowState) -> list[torch.Tensor]:
    """What changes by plans."""
    return [state.token_ids, state.num_computed, state.block_tables, state.lora_slots]


def stage_rows(changes: Changes, plan: StepPlan, rows: RowTable, state: RowState) -> None:
    """Admissions and appended blocks. A row that is released stays as it is until its next tenant comes: nobody looks at it.

    Args:
        changes: To the device.
        plan: Of the next step.
        rows: To which it has been applied.
        state: The device's.
    """
    for admission in plan.admissions:
        row = admission.row
        changes.write(state.token_ids, row * state.token_ids.shape[1], rows.token_ids[row, : len(admission.token_ids)])
        changes.write(state.num_computed, row, np.array([admission.num_computed_tokens], np.int32))
        changes.write(state.lora_slots, row, np.array([admission.lora_slot], np.int32))
    _, size, most = state.block_tables.shape
    for group, (of, blocks) in enumerate(zip(plan.append_rows, plan.append_blocks, strict=True)):
        if len(of):
            changes.scatter(state.block_tables, (group * size + of) * most + rows.append_places[group], blocks)
