"""Brings a checkpoint's tensors to a device: threads read byte ranges of the files into pinned memory, from where the device
fetches them while the next ones are read.

```
files ──read──▶ slot 0 ┐
                slot 1 ├──upload──▶ tensor on the device ──load──▶ its place in the model
                slot 2 ┘
```

A slot is written again when the upload from it is over. A tensor lies on the device once more while it is put into its place: the
largest is all that loading takes beside the model, and the slots are all that it takes of the host.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from penstock.engine.config import ConfigError
from penstock.engine.loading.progress import Progress
from penstock.engine.loading.safetensors import DTYPES, Loadable, StoredTensor

SLOT_BYTES = 32 << 20
SLOTS = 8
THREADS = 4
"""One thread copies 2 to 5 GB/s from the page cache, and a PCIe link of the fifth generation takes 50."""


class Transfer(Protocol):
    """Copies under way."""

    def wait(self) -> None:
        """Wait until they are over."""
        ...


class Uploader(Protocol):
    """The part of `runner.device.runtime.DeviceRuntime` that loading needs."""

    device: torch.device

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that the device reads by itself."""
        ...

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies from there, in the order of what the device does."""
        ...

    def download(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        """Over when everything is that was uploaded before."""
        ...


class Piece(NamedTuple):
    """A part of a tensor that fits into a slot."""

    tensor: int
    """Index of its tensor."""
    begin: int
    """Offset of its first byte in the tensor."""
    size: int


def pieces(sizes: Sequence[int], slot_bytes: int) -> list[Piece]:
    """All tensors cut up, in order; an empty tensor is one empty piece."""
    return [
        Piece(index, begin, min(slot_bytes, size - begin))
        for index, size in enumerate(sizes)
        for begin in range(0, max(size, 1), slot_bytes)
    ]


def stream_weights(
    model: Loadable,
    tensors: Sequence[StoredTensor],
    uploader: Uploader,
    progress: Progress | None = None,
    slot_bytes: int = SLOT_BYTES,
) -> None:
    """Loads a checkpoint's tensors into a model on a device.

    Args:
        model: Takes each tensor by its name, on the device.
        tensors: As `check_weights` has found them.
        uploader: The device; the caller is on its main stream.
        progress: Told of the bytes that have been read.
        slot_bytes: Read at once.

    Raises:
        ConfigError: A file has become shorter since its header was read.
    """
    wanted, work = model.weights(), pieces([tensor.size for tensor in tensors], slot_bytes)
    raw = torch.empty(0, dtype=torch.uint8, device=uploader.device)
    with ExitStack() as stack:
        files = {path: os.open(path, os.O_RDONLY) for path in {tensor.file for tensor in tensors}}
        for descriptor in files.values():
            stack.callback(os.close, descriptor)
        for piece, slot in zip(work, _read(work, tensors, files, uploader, slot_bytes), strict=True):
            tensor = tensors[piece.tensor]
            if not piece.begin:
                raw = torch.empty(tensor.size, dtype=torch.uint8, device=uploader.device)
            uploader.upload(slot[: piece.size], raw[piece.begin : piece.begin + piece.size])
            if piece.begin + piece.size == tensor.size:
                wanted[tensor.name].load(raw.view(DTYPES[tensor.dtype]).view(tensor.shape))
            if progress is not None:
                progress.add(piece.size)


def _read(
    work: Sequence[Piece], tensors: Sequence[StoredTensor], files: dict[Path, int], uploader: Uploader, slot_bytes: int
) -> Iterator[torch.Tensor]:
    """For each piece the slot that holds it. Whoever gets it has begun the upload when the next one is asked for."""
    slots = [uploader.pinned(slot_bytes, dtype=torch.uint8) for _ in range(min(SLOTS, len(work)))]
    reading: list[Future[None]] = []

    def begin(index: int) -> None:
        piece, slot = work[index], slots[index % len(slots)]
        tensor = tensors[piece.tensor]
        reading.append(threads.submit(_fill, slot[: piece.size], files[tensor.file], tensor.offset + piece.begin, tensor))

    with ThreadPoolExecutor(THREADS, thread_name_prefix="weights") as threads:
        for index in range(len(slots)):
            begin(index)
        for index in range(len(work)):
            reading[index].result()
            yield slots[index % len(slots)]
            if index + len(slots) < len(work):
                uploader.download([]).wait()
                begin(index + len(slots))
        uploader.download([]).wait()


def _fill(slot: torch.Tensor, file: int, offset: int, tensor: StoredTensor) -> None:
    view, done = slot.numpy().data, 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if not count:
            raise ConfigError(f"{tensor.file} is damaged: it ends within tensor {tensor.name}")
        done += count
