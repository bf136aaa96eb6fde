"""The operations of sampling, each in the form that suits the device; chosen once at start."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from penstock.kernels.cpu.build import CACHE, BuildError, library
from penstock.kernels.cpu.isa import IsaName, choose
from penstock.kernels.sampling import cpu, reference
from penstock.kernels.sampling.buffers import SamplingBuffers
from penstock.kernels.sampling.native import NativeSampling
from penstock.kernels.sampling.reference import RowLogprobs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingOps:
    """One form of every operation; the reference documents arguments and results."""

    form: str
    sample: Callable[..., torch.Tensor]
    processed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, SamplingBuffers], torch.Tensor]
    logprobs: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, bool, SamplingBuffers, bool], RowLogprobs]
    clean: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    penalise: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None
    ]
    mask: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    tiles: bool = True
    """Whether they work in the tiles of `SamplingBuffers`."""
    takes_masks: bool = False
    """Whether `sample` takes `masks`, as the native one does; else they are applied to a copy of the logits."""


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
"""In torch and numpy, where nothing is compiled."""


def cpu_sampling_ops(isa: IsaName | None = None) -> SamplingOps:
    """Return the operations for a CPU: compiled, or in torch where they cannot be.

    Args:
        isa: The CPU's instruction set; None: the best that it has.
    """
    try:
        native = NativeSampling(library(choose(isa), CACHE.expanduser()))
    except BuildError as error:
        log.warning("sampling: in torch, many times slower than compiled (%s)", error)
        return CPU
    return replace(CPU, form="native", sample=native.sample, processed=reference.processed, takes_masks=True)


def triton_sampling_ops() -> SamplingOps:
    """Return the operations for a GPU."""
    from penstock.kernels.sampling.logprobs import logprobs
    from penstock.kernels.sampling.penalties import penalise
    from penstock.kernels.sampling.triton import sample

    return SamplingOps("triton", sample, reference.processed, logprobs, reference.clean, penalise, reference.mask)


def sampling_ops(device: torch.device) -> SamplingOps:
    """The best form there is on a device."""
    return triton_sampling_ops() if device.type == "cuda" else cpu_sampling_ops()
