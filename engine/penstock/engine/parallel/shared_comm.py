"""How ranks add up and join what each has computed: through shared memory on a node, and over TCP between nodes."""

import ctypes
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.shared_memory import SharedMemory
from penstock.kernels.collective.native import DTYPES, FAILED, KINDS, MISMATCH, TIMEOUT, GroupView, NativeCollectives, Wire

SPIN_S = 10e-6
"""Longer than another rank's sum takes, when all have a core of their own; after it the core is free for whoever needs it."""
log = logging.getLogger(__name__)
_DOUBLE = struct.Struct("=d")
_DTYPE_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in DTYPES.items()}


class SharedComm:
    """See Comm. What a tape has taken down goes wrong in silence: `check` says so.

    Args:
        memory: The group's.
        rank: This process's.
        collectives: The compiled functions; those of the model's operations, so that tapes take them down too.
        timeout: Seconds that a rank may keep others waiting.
        outgoing: Sockets to the other nodes of the group, and the rank that reads each.
        incoming: Sockets whose messages this rank takes in for all ranks of its node.
    """

    def __init__(
        self,
        memory: SharedMemory,
        rank: int,
        collectives: NativeCollectives,
        timeout: float,
        outgoing: Sequence[tuple[int, int]] = (),
        incoming: Sequence[int] = (),
    ) -> None:
        self._memory, self._collectives = memory, collectives
        self._base = ctypes.c_char.from_buffer(memory.map)
        self._view = GroupView(
            memory=ctypes.addressof(self._base),
            data=memory.data_offset,
            slot_bytes=memory.slot_bytes,
            timeout_ns=round(1e9 * timeout),
            spin_ns=round(1e9 * SPIN_S),
            rank=rank,
            world=memory.world,
        )
        self._group = ctypes.addressof(self._view)
        self._timeout = timeout
        self._wires = (Wire * len(outgoing))(*outgoing)
        for fd, _ in outgoing:
            with socket.socket(fileno=os.dup(fd)) as wire:
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("=qq", *divmod(round(1e6 * timeout), 10**6)))
        self._view.wires, self._view.num_wires = ctypes.addressof(self._wires), len(outgoing)
        for fd in incoming:
            arguments = [collectives.library.penstock_receive, fd]
            threading.Thread(target=self._receive, args=arguments, name="wire", daemon=True).start()

    def _receive(self, receive: Callable[[int, int], int], fd: int) -> None:
        """Until the other node closes the connection; then its ranks are gone, which the core tells."""
        if receive(self._group, fd):
            log.error("another node sends what is no piece of a message")

    @property
    def rank(self) -> int:
        """This process's."""
        return self._view.rank

    @property
    def world(self) -> int:
        """Ranks of the group."""
        return self._view.world

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, added in the order of ranks, on all ranks."""
        out = self._collectives.all_reduce(self._group, x)
        self.check()
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, k] of each rank → [n, ranks · k], in the order of ranks, on all ranks."""
        out = self._collectives.all_gather(self._group, x, self.world)
        self.check()
        return out

    def gather_parts(self, x: torch.Tensor, sizes: npt.NDArray[np.int64], kept: npt.NDArray[np.int64]) -> torch.Tensor:
        """Some of the bytes that each rank gives; see `NativeCollectives.gather_parts`."""
        out = self._collectives.gather_parts(self._group, x, sizes, kept)
        self.check()
        return out

    def broadcast(self, data: bytes | None, root: int) -> bytes:
        """The root's bytes, on all ranks.

        Args:
            data: The root's; None on the others.
            root: Who sends.
        """
        length = ctypes.create_string_buffer(len(data or b"").to_bytes(8, "little"), 8)
        self._collectives.library.penstock_broadcast(self._group, length, 8, root)
        self.check()
        size = int.from_bytes(length.raw, "little")
        buffer = ctypes.create_string_buffer(data if data is not None and self.rank == root else b"", max(size, 1))
        self._collectives.library.penstock_broadcast(self._group, buffer, size, root)
        self.check()
        return buffer.raw[:size]

    def agree(self, value: float) -> float:
        """Rank 0's value, on all ranks: what they measure themselves is not the same."""
        return _DOUBLE.unpack(self.broadcast(_DOUBLE.pack(value), 0))[0]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._collectives.library.penstock_barrier(self._group)
        self.check()

    def fail(self) -> None:
        """Tells the others that this rank cannot go on."""
        self._collectives.library.penstock_fail(self._group, self.rank)

    def check(self) -> None:
        """Raises `GroupFailed` where any call since the last look has gone wrong."""
        if self._view.error:
            raise GroupFailed(self._told())

    def close(self) -> None:
        """Lets go of the memory; no call may follow."""
        del self._base
        self._memory.close()

    def _told(self) -> str:
        view, rank = self._view, self._view.error_rank
        if view.error == TIMEOUT:
            return f"rank {rank} has kept rank {self.rank} waiting for {self._timeout:g} seconds"
        if view.error == FAILED:
            return f"rank {rank} has failed"
        assert view.error == MISMATCH
        own = _message(view.own_kind, view.own_dtype, view.own_bytes)
        other = _message(view.other_kind, view.other_dtype, view.other_bytes)
        return f"rank {rank} and rank {self.rank} disagree: {other} there, {own} here"


def _message(kind: int, dtype: int, size: int) -> str:
    what = f" from rank {dtype}" if KINDS[kind] == "broadcast" else f" of {_DTYPE_NAMES.get(dtype, dtype)}"
    return f"{KINDS[kind]}{what}, {size:,} bytes"
