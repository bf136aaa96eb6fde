"""How a linear layer holds its weight and multiplies by it: what quantisation replaces."""

import logging
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

log = logging.getLogger(__name__)

# Below four rows float32 GEMM takes other paths, with other bits, so that a lone request would differ from one in a batch.
PLAIN_MIN_ROWS = 4


class LinearMethod(Protocol):
    """Life of a weight: `create`, `load_shard` for each part, `finish`, then `apply` at each step."""

    def create(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        """Allocates the rank's weight [out, in] and bias [out]."""
        ...

    def load_shard(self, name: str, value: torch.Tensor, offset: int) -> None:
        """Copies a part of `weight` or `bias` to the output features from `offset` on."""
        ...

    def finish(self) -> None:
        """Brings the loaded weight into the form that `apply` wants."""
        ...

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] → [n, out]; a row's result does not depend on the others."""
        ...


LinearMethodFactory = Callable[[], LinearMethod]


class UnquantizedLinearMethod:
    """The weight in the model's dtype, multiplied by torch."""

    def create(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        """See LinearMethod."""
        self.weight = torch.empty(out_features, in_features, dtype=dtype)
        self.bias = torch.empty(out_features, dtype=dtype) if bias else None

    def load_shard(self, name: str, value: torch.Tensor, offset: int) -> None:
        """See LinearMethod."""
        target = self.weight if name == "weight" else self.bias
        if target is None:
            raise ValueError(f"the layer has no {name}")
        target[offset : offset + value.shape[0]].copy_(value)

    def finish(self) -> None:
        """Nothing to do: torch multiplies by the weight as it is."""

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        rows = x.shape[0]
        if rows >= PLAIN_MIN_ROWS:
            return F.linear(x, self.weight, self.bias)
        return F.linear(F.pad(x, (0, 0, 0, PLAIN_MIN_ROWS - rows)), self.weight, self.bias)[:rows]


class PrepackedLinearMethod(UnquantizedLinearMethod):
    """The weight in oneDNN's layout, reordered once: less time at small batches, and the same bits at every batch size.

    oneDNN compiles a kernel for each number of rows (over a millisecond, half a megabyte that is kept), so that rows are padded
    to few numbers.
    """

    def finish(self) -> None:
        """Reorders the weight; the plain copy is dropped."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        del self.weight

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        rows = x.shape[0]
        padded = padded_rows(rows)
        if padded == rows:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        x = F.pad(x, (0, 0, 0, padded - rows))
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")[:rows]


def padded_rows(rows: int) -> int:
    """The next number of rows for which there may be a kernel: all up to 16, then multiples of 8, 16 and 64."""
    if rows <= 16:
        return rows
    step = 8 if rows <= 64 else 16 if rows <= 256 else 64
    return -(-rows // step) * step


def linear_method(dtype: torch.dtype) -> LinearMethodFactory:
    """The unquantised method for a dtype; oneDNN's is tried first, since it is private to torch and depends on the CPU."""
    reason = _why_not_prepacked(dtype)
    if reason is None:
        log.info("linear layers in %s: weights prepacked for oneDNN", dtype)
        return PrepackedLinearMethod
    log.warning("linear layers in %s: plain torch, slower at small batches (%s)", dtype, reason)
    return UnquantizedLinearMethod


def _why_not_prepacked(dtype: torch.dtype) -> str | None:
    plain, packed = UnquantizedLinearMethod(), PrepackedLinearMethod()
    weight = torch.linspace(-1, 1, 32 * 48).view(32, 48)
    x = torch.linspace(-1, 1, 5 * 48).view(5, 48).to(dtype)
    for method in (plain, packed):
        method.create(48, 32, bias=False, dtype=dtype)
        method.load_shard("weight", weight, 0)
    try:
        packed.finish()
        result = packed.apply(x)
    except (RuntimeError, AttributeError) as error:
        return str(error).partition("\n")[0]
    if not torch.allclose(result.float(), plain.apply(x).float(), rtol=2e-2, atol=2e-2):
        return "oneDNN's result differs from torch's"
    return None
