"""Weights made up: for benchmarks and tests of a model's shape, without its checkpoint.

Every value is a hash of its tensor's name and its place in it, in integer arithmetic that is the same everywhere: a CPU and a GPU
make the same bits, and where a tensor is made says nothing about the others.
"""

import hashlib
import math

import torch

from penstock.engine.loading.progress import Progress
from penstock.engine.loading.safetensors import Loadable
from penstock.engine.models.layers.weight import Weight

_CHUNK = 1 << 21
"""Elements made at once: their intermediates, 16 bytes each, are all that is held beside the tensor."""
# lowbias32 of C. Wellons' hash prospector; the second as a signed number.
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)


def load_dummy(model: Loadable, dtype: torch.dtype, device: torch.device, progress: Progress | None = None) -> None:
    """Fills a model with small random weights: matrices with the variance 1 / columns, so that activations neither vanish nor
    grow; norms near 1; biases near 0.

    Args:
        model: Takes each tensor by its name.
        dtype: In which the tensors are made that a checkpoint may hold in it; others in the first dtype that they take.
        device: Where they are made.
        progress: Told of each tensor's bytes.
    """
    for name, weight in model.weights().items():
        value = dummy_tensor(name, weight.shape, stored_dtype(weight, dtype), device)
        weight.load(value)
        if progress is not None:
            progress.add(value.nbytes)


def stored_dtype(weight: Weight, dtype: torch.dtype) -> torch.dtype:
    """In which a tensor is made up, where the model's dtype is this one."""
    return dtype if dtype in weight.dtypes else weight.dtypes[0]


def dummy_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The tensor of that name, whatever model it belongs to. Whole numbers have random bits: they are packed values."""
    if not dtype.is_floating_point:
        words = _words(torch.arange(-(-math.prod(shape) * dtype.itemsize // 4), dtype=torch.int32, device=device), name)
        return words.view(torch.uint8)[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
    centre, spread = _range(name, shape)
    value = torch.empty(shape, dtype=dtype, device=device)
    flat, count = value.view(-1), value.numel()
    index = torch.arange(min(_CHUNK, count), dtype=torch.int32, device=device)
    for number, start in enumerate(range(0, count, _CHUNK)):
        part = flat[start : start + _CHUNK]
        part.copy_(_uniform(index[: part.numel()], f"{name}/{number}").mul_(spread).add_(centre))
    return value


def _range(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """The middle of a tensor's values, and how far from it they go."""
    if len(shape) > 1:
        return 0.0, math.sqrt(3.0 / shape[-1])
    return (0.0, 0.02) if name.endswith(".bias") else (1.0, 0.1)


def _uniform(index: torch.Tensor, key: str) -> torch.Tensor:
    """A float32 from -1 to 1 for each int32 index."""
    return _words(index, key).float().mul_(2.0**-31)


def _words(index: torch.Tensor, key: str) -> torch.Tensor:
    """32 random bits for each int32 index."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    add, mix = (int.from_bytes(digest[at : at + 4], "little", signed=True) for at in (0, 4))
    x = index + add
    x = (x ^ ((x >> 16) & 0xFFFF)).mul_(_FIRST).bitwise_xor_(mix)
    x = (x ^ ((x >> 15) & 0x1FFFF)).mul_(_SECOND)
    x ^= (x >> 16) & 0xFFFF
    return x
