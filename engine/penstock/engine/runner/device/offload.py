"""A model's tensors while it sleeps at level 1: in pinned memory of the host, and none on the device.

The tensors stay the objects that they are, with every view of them and everybody who holds one; it is their storage that is given
back and comes again. It comes at another address, as a rule: tables of addresses are made anew, and CUDA graphs, which remember
some too, must be dropped.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from penstock.engine.runner.device.runtime import DeviceRuntime
from penstock.kernels.experts.table import AddressTable

SLAB_BYTES = 256 << 20
"""Pinned at once; a power of two, to which torch rounds up whatever is asked for."""


class HostCopy:
    """Takes a model's tensors off the device, and brings them back.

    Args:
        runtime: The device.
        model: As the runner holds it.
        slab_bytes: Of the host's memory at once.
    """

    def __init__(self, runtime: DeviceRuntime, model: Any, slab_bytes: int = SLAB_BYTES) -> None:
        self._runtime, self._slab_bytes = runtime, slab_bytes
        self._storages = list(storages_of(model))
        self._tables = [thing for thing in _parts_of(model) if isinstance(thing, AddressTable)]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self.nbytes = sum(self._sizes)
        """Of the device's memory."""
        self._slabs = [runtime.pinned(slab_bytes, dtype=torch.uint8) for _ in range(-(-self.nbytes // slab_bytes))]
        runtime.synchronize()
        runtime.download([(device, host) for device, host in self._pairs()]).wait()
        for storage in self._storages:
            storage.resize_(0)
        runtime.return_free_memory()

    def restore(self) -> None:
        """Once: the host's memory is free afterwards."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        for device, host in self._pairs():
            self._runtime.upload(host, device)
        for table in self._tables:
            table.find()
        self._runtime.synchronize()
        self._slabs = []
        self._runtime.return_free_memory()

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Ranges of bytes on the device, and where each lies on the host: storages one after the other, cut where a slab ends."""
        at = 0
        for storage, size in zip(self._storages, self._sizes, strict=True):
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            done = 0
            while done < size:
                slab, offset = divmod(at, self._slab_bytes)
                count = min(size - done, self._slab_bytes - offset)
                yield whole[done : done + count], self._slabs[slab][offset : offset + count]
                done, at = done + count, at + count


def storages_of(model: Any) -> Iterator[torch.UntypedStorage]:
    """Every storage that a model's tensors lie in, once each. Weights that a CPU's library has packed hide theirs and are left
    out."""
    seen: set[int] = set()
    for part in _parts_of(model):
        if isinstance(part, torch.Tensor) and part.layout is torch.strided:
            storage = part.untyped_storage()
            if storage.data_ptr() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage


def _parts_of(model: Any) -> Iterator[Any]:
    """Tensors, and objects of ours once each: as deep as they and containers go."""
    seen: set[int] = set()
    stack = [model]
    while stack:
        thing = stack.pop()
        if isinstance(thing, torch.Tensor):
            yield thing
        elif isinstance(thing, list | tuple):
            stack.extend(thing)
        elif isinstance(thing, Mapping):
            stack.extend(thing.values())
        elif type(thing).__module__.startswith("penstock.") and id(thing) not in seen:
            seen.add(id(thing))
            yield thing
            stack.extend(getattr(thing, "__dict__", {}).values())
