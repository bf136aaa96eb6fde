"""The operations of sampling on a device, each in the form that suits it; chosen once at start."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.kernels.sampling import reference
from penstock.kernels.sampling.buffers import Path, SamplingBuffers
from penstock.kernels.sampling.reference import RowLogprobs


@dataclass(frozen=True)
class SamplingOps:
    """One form of every operation; the reference documents arguments and results."""

    form: str
    sample: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, SamplingBuffers, Path, bool], torch.Tensor]
    logprobs: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, bool, SamplingBuffers, bool], RowLogprobs]
    penalise: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None
    ]


REFERENCE = SamplingOps("reference", reference.sample, reference.logprobs, reference.penalise)


def triton_sampling_ops() -> SamplingOps:
    """Those of a GPU."""
    from penstock.kernels.sampling.logprobs import logprobs
    from penstock.kernels.sampling.penalties import penalise
    from penstock.kernels.sampling.triton import sample

    return SamplingOps("triton", sample, logprobs, penalise)


def sampling_ops(device: torch.device) -> SamplingOps:
    """The best form there is on a device."""
    return triton_sampling_ops() if device.type == "cuda" else REFERENCE
