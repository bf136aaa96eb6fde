"""Which kernel multiplies by weights in the model's dtype: the first of its platform's list that can."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Final, NamedTuple

import torch

from penstock.engine.config import ConfigError
from penstock.engine.devices import MIN_CAPABILITY
from penstock.engine.models.layers.linear_method import (
    CPU,
    DeviceLinearMethod,
    LinearMethodFactory,
    NativeLinearMethod,
    PrepackedLinearMethod,
    UnquantizedLinearMethod,
)
from penstock.engine.models.layers.projection import LinearLayer, Projection
from penstock.engine.models.layers.shard import Span
from penstock.kernels.ops import Ops

DISABLED_VARIABLE: Final = "PENSTOCK_DISABLED_KERNELS"
"""Names of linear kernels that are not to be chosen, with commas between them."""

log = logging.getLogger(__name__)


class LinearNeeds(NamedTuple):
    """What layers ask of a kernel, on the device that they run on."""

    dtype: torch.dtype
    """Of weights and activations."""
    ops: Ops
    threads: int
    """Of a CPU."""
    device: torch.device
    capability: tuple[int, int] | None
    """Compute capability of a CUDA device."""
    moves: bool = False
    """Whether experts go from process to process, so that the kernel's weights must be plain tensors."""


class Candidate(NamedTuple):
    """A kernel that may be chosen."""

    name: str
    refusal: Callable[[LinearNeeds], str | None]
    """Why it cannot serve such layers, a clause; None: it can."""
    method: Callable[[LinearNeeds], LinearMethodFactory]
    capability: tuple[int, int] | None = None
    """The least compute capability of its device; None: it needs no CUDA device."""
    drawback: str | None = None
    """What users should know when it is chosen."""


def linear_method(
    dtype: torch.dtype, ops: Ops, threads: int = 1, device: torch.device = CPU, *, moves: bool = False
) -> LinearMethodFactory:
    """Returns the unquantised method for a dtype. See `LinearNeeds` for the arguments.

    Raises:
        ConfigError: No kernel can serve it here, or the environment disables one that does not exist; the message says why.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    names = {name.strip() for name in os.environ.get(DISABLED_VARIABLE, "").split(",")} - {""}
    return choose_linear(LinearNeeds(dtype, ops, threads, device, capability, moves), KERNELS, names)


def choose_linear(
    needs: LinearNeeds, kernels: Mapping[str, Sequence[Candidate]], disabled: Set[str] = frozenset()
) -> LinearMethodFactory:
    """Returns the first method whose kernel is not disabled, suits the device's compute capability, and can serve the layers.

    Args:
        needs: What the layers ask.
        kernels: By type of device, in the order in which they are tried.
        disabled: Names of kernels that are not to be chosen.

    Raises:
        ConfigError: With the reason for each kernel.
    """
    known = dict.fromkeys(kernel.name for platform in kernels.values() for kernel in platform)
    if unknown := disabled - known.keys():
        wrong, right = ", ".join(sorted(unknown)), ", ".join(known)
        raise ConfigError(f"{DISABLED_VARIABLE}: no linear kernel is called {wrong} (there are {right})")
    refused: list[str] = []
    for kernel in kernels["cpu" if needs.device.type == "cpu" else "cuda"]:
        reason = _refusal(kernel, needs, disabled)
        if reason is None:
            why = f" ({'; '.join(refused)})" if refused else ""
            level = logging.INFO if kernel.drawback is None else logging.WARNING
            drawback = "" if kernel.drawback is None else f", {kernel.drawback}"
            log.log(level, "linear layers in %s: %s%s%s", needs.dtype, kernel.name, drawback, why)
            return kernel.method(needs)
        refused.append(f"{kernel.name}: {reason}")
    raise ConfigError(f"no kernel can multiply by weights in {needs.dtype} here: {'; '.join(refused)}")


def _refusal(kernel: Candidate, needs: LinearNeeds, disabled: Set[str]) -> str | None:
    if kernel.name in disabled:
        return f"{DISABLED_VARIABLE} names it"
    if kernel.capability is not None and needs.capability is not None and needs.capability < kernel.capability:
        return "needs compute capability {}.{}, and the device has {}.{}".format(*kernel.capability, *needs.capability)
    return kernel.refusal(needs)


def _no_native(needs: LinearNeeds) -> str | None:
    return "no compiled operations for this dtype" if needs.ops.linear is None else None


def _native(needs: LinearNeeds) -> LinearMethodFactory:
    assert needs.ops.linear is not None
    return partial(NativeLinearMethod, linear=needs.ops.linear)


def _no_native_threads(needs: LinearNeeds) -> str | None:
    return _no_native(needs) or (None if needs.threads == 1 else f"one thread instead of {needs.threads}")


def _no_onednn(needs: LinearNeeds) -> str | None:
    """Tries it, since it is private to torch and depends on the CPU."""
    if needs.moves:
        return "weights in its layout cannot move, as --enable-eplb has experts do"
    projection = Projection("trial", Span(48, 0, 48), Span(32, 0, 32), offset=0)
    layer = LinearLayer("trial", (projection,), bias=False, dtype=needs.dtype)
    plain, packed = UnquantizedLinearMethod(layer), PrepackedLinearMethod(layer)
    weight = torch.linspace(-1, 1, 32 * 48).view(32, 48)
    x = torch.linspace(-1, 1, 5 * 48).view(5, 48).to(needs.dtype)
    for method in (plain, packed):
        method.load(projection, "weight", weight)
    try:
        packed.finish()
        result = packed.apply(x)
    except (RuntimeError, AttributeError) as error:
        return str(error).partition("\n")[0]
    if not torch.allclose(result.float(), plain.apply(x).float(), rtol=2e-2, atol=2e-2):
        return "its result differs from torch's"
    return None


def _always(needs: LinearNeeds) -> None:
    del needs


KERNELS: Mapping[str, Sequence[Candidate]] = {
    "cpu": (
        Candidate("native", _no_native_threads, _native),
        Candidate("onednn", _no_onednn, lambda needs: PrepackedLinearMethod),
        Candidate("native-one-thread", _no_native, _native, drawback="slower than several threads"),
        Candidate("torch", _always, lambda needs: UnquantizedLinearMethod, drawback="slower at small batches"),
    ),
    "cuda": (
        Candidate("cublas", _always, lambda needs: partial(DeviceLinearMethod, device=needs.device), capability=MIN_CAPABILITY),
    ),
}
"""Our own kernel has one thread, and the same bits at every batch size without padding: it comes first where one is asked for."""
