"""The operations around a step's forward pass, in the form that suits the device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.kernels.step_state import reference
from penstock.kernels.step_state.batch import RowState, StepInputs, StepRequest, Targets


@dataclass(frozen=True)
class StepOps:
    """One form of them; the reference documents arguments."""

    apply_changes: Callable[[torch.Tensor, int, int, Targets], None]
    prepare_inputs: Callable[[StepRequest, RowState, StepInputs], None]
    commit_step: Callable[[torch.Tensor, StepRequest, StepInputs, RowState, torch.Tensor], None]


STEP_REFERENCE = StepOps(reference.apply_changes, reference.prepare_inputs, reference.commit_step)


def triton_step_ops() -> StepOps:
    """Triton's."""
    from penstock.kernels.step_state import triton  # decides on import whether kernels are interpreted

    return StepOps(triton.apply_changes, triton.prepare_inputs, triton.commit_step)
