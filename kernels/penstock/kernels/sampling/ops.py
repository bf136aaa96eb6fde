"""The operations of sampling, each in the form that suits the device; chosen once at start."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.kernels.sampling import cpu, reference
from penstock.kernels.sampling.buffers import Path, SamplingBuffers
from penstock.kernels.sampling.reference import RowLogprobs


@dataclass(frozen=True)
class SamplingOps:
    """One form of every operation; the reference documents arguments and results."""

    form: str
    sample: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, SamplingBuffers, Path, bool], torch.Tensor]
    processed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, SamplingBuffers], torch.Tensor]
    logprobs: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, bool, SamplingBuffers, bool], RowLogprobs]
    clean: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    penalise: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None
    ]
    mask: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    tiles: bool = True
    """Whether they work in the tiles of `SamplingBuffers`."""


REFERENCE = SamplingOps(
    "reference",
    reference.sample,
    reference.processed,
    reference.logprobs,
    reference.clean,
    reference.penalise,
    reference.mask,
)
CPU = SamplingOps("cpu", cpu.sample, cpu.processed, cpu.logprobs, cpu.clean, cpu.penalise, cpu.mask, tiles=False)


def triton_sampling_ops() -> SamplingOps:
    """Return the operations for a GPU."""
    from penstock.kernels.sampling.logprobs import logprobs
    from penstock.kernels.sampling.penalties import penalise
    from penstock.kernels.sampling.triton import sample

    return SamplingOps("triton", sample, reference.processed, logprobs, reference.clean, penalise, reference.mask)


def sampling_ops(device: torch.device) -> SamplingOps:
    """The best form there is on a device."""
    return triton_sampling_ops() if device.type == "cuda" else CPU
