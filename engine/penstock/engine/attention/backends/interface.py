"""What an attention backend is: capabilities that are known before anything is loaded, and a call that is bound once.

A backend has three parts. `refusals` and `graph_support` say, of a model's layers on a device, whether and how they can be
served, from facts alone. What a library wants beside a `DeviceBatch` is built when the first layer of a step asks for it
(`StepMetadata`). `attend` is what every layer calls; `AttentionPhases` puts it into `Ops`.

All read the cache as it is, [blocks, 2, kv_heads, block_size, row], which others call HND; those that want heads after tokens get
a transposed view.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.runner.device.graphs.descriptor import GraphSupport
from penstock.kernels.ops import Ops
from penstock.kernels.paged_attention.device_batch import DeviceBatch

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionNeeds:
    """What one kind of layers asks of a backend, on the device that it runs on."""

    device: str
    """`cpu` or `cuda`."""
    capability: tuple[int, int] | None
    """Compute capability of the CUDA device."""
    dtype: torch.dtype
    """Dtype of queries."""
    kv_dtype: torch.dtype
    """Dtype of keys and values in the cache."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_sizes: tuple[int, ...]
    """Tokens a block, of each KV group."""
    scale: float
    softcap: float
    """0 where there is none."""
    sinks: bool
    value_size: int
    """Elements of a value that are the last of its key, as in latent attention; 0: values are as large as keys, beside them."""
    max_num_seqs: int
    """Requests of a step, padding included."""
    max_num_tokens: int
    """Queries of a step, padding included."""
    max_model_len: int

    @property
    def max_blocks(self) -> int:
        """Entries of a row of a block table."""
        return -(-self.max_model_len // min(self.block_sizes))


@dataclass(frozen=True)
class StepLengths:
    """What the host knows of a step, padding not included, for backends that cannot plan on the device."""

    rows: npt.NDArray[np.int32]
    """[r]: of the block table."""
    query_start_loc: npt.NDArray[np.int32]
    """[r + 1]."""
    seq_lens: npt.NDArray[np.int32]
    """[r]."""


class AttentionBackend(ABC):
    """One for a model's layers. Made before the weights are loaded: what it allocates is never the KV cache's."""

    name: ClassVar[str]

    def __init__(self, needs: AttentionNeeds) -> None:
        self.needs = needs

    @classmethod
    @abstractmethod
    def refusals(cls, needs: AttentionNeeds) -> list[str]:
        """Why it cannot serve these layers, each a clause; none where it can."""

    @classmethod
    @abstractmethod
    def graph_support(cls, needs: AttentionNeeds) -> GraphSupport:
        """Return the graph support for layers that it can serve."""

    def bind(self, ops: Ops) -> Ops:
        """The operations with this backend's attention among them."""
        return replace(ops, paged_attention=self.attend)

    def begin_step(self, lengths: StepLengths) -> None:
        """Called before a step that is not a captured graph."""
        del lengths

    @property
    def shares(self) -> bool:
        """Whether it reads a prefix that all requests of a step of decodes share once, if a batch says so."""
        return False

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: DeviceBatch,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        value_size: int = 0,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend, with the arguments of `paged_attention_device`."""


class StepMetadata(Generic[T]):
    """What a backend derives from a batch, kept for the layers of its KV group.

    The first layer of a forward pass has it built, also in a pass over a batch that was seen before: in a captured graph the
    lengths are others each time, and what was derived from them must lie in it.
    """

    def __init__(self, build: Callable[[DeviceBatch], T]) -> None:
        self._build = build
        self._found: dict[int, tuple[DeviceBatch, int, T]] = {}

    def of(self, batch: DeviceBatch, kv_cache: torch.Tensor) -> T:
        """A batch's, for the layer that has this cache."""
        group, layer = batch.block_table.data_ptr(), kv_cache.data_ptr()
        found = self._found.get(group)
        if found is not None and found[0] is batch and found[1] != layer:
            return found[2]
        built = self._build(batch)
        self._found[group] = (batch, layer, built)
        return built


def placed(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The result of a library that takes no place for it, where it is wanted."""
    return result if out is None else out.copy_(result)


def outside(value: object, allowed: tuple[object, ...], what: str) -> list[str]:
    """A refusal where a value is none of those allowed."""
    return [] if value in allowed else [f"{what} {value} is none of {', '.join(map(str, allowed))}"]


def other_cache(needs: AttentionNeeds) -> list[str]:
    """A refusal where the cache has another dtype than the queries."""
    return [] if needs.kv_dtype is needs.dtype else [f"a KV cache of {needs.kv_dtype} is not in the calls that are used here"]


def below(needs: AttentionNeeds, capability: tuple[int, int]) -> list[str]:
    """A refusal where there is no CUDA device of that compute capability or a later one."""
    if needs.device != "cuda" or needs.capability is None:
        return [f"needs a CUDA device, not {needs.device!r}"]
    if needs.capability < capability:
        return ["compute capability {}.{} is below {}.{}".format(*needs.capability, *capability)]
    return []
