"""How a pipeline stage takes a step's hidden states from the stage before it and passes its own on."""

import math
import mmap
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import torch

from penstock.engine.models.layers.shard import Stage
from penstock.engine.models.model import Carry
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.links import LinkEnd
from penstock.engine.parallel.words import FarLink

_HEAD: Final = struct.Struct("=qqBBBBB")
"""Step, tokens, the dtype's number (or `_LOST`, where it came to nothing), the parts of a `Carry`, and how many are `aux`, `deep`
and `following`."""
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_LOST: Final = 255


class StageLost(RuntimeError):
    """The stage before has lost the step."""


class Relay:
    """One rank's place between the stages.

    A sender never waits: the memory has room for more steps than can be under way. So a stage waits for earlier stages alone.
    Where a stage beside this one is on another node, a thread here stands in for it and exchanges with its thread there.

    Args:
        stage: The rank's.
        before: From the stage before; None: there is none.
        after: To the next stage; None: there is none.
        shape: Parts of a `Carry` and tokens of a step at most, and the size of a hidden state.
        dtype: The model's.
        depth: Steps under way at most.
        timeout: Seconds that the stage before may keep this one waiting.
        far: The stages beside this one that are on other nodes.
        aux: How many of the parts that come are `aux`.
    """

    def __init__(
        self,
        stage: Stage,
        before: LinkEnd | None,
        after: LinkEnd | None,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        depth: int,
        timeout: float,
        far: tuple[FarLink | None, FarLink | None] = (None, None),
        aux: int = 0,
    ) -> None:
        self._stage, self._hidden_size, self._dtype, self._timeout, self._aux = stage, shape[2], dtype, timeout, aux
        self._slots, self._slot_bytes = depth + 1, 4 * math.prod(shape)
        self._before, self._from = self._open(before)
        self._after, self._to = self._open(after)
        self._received = self._sent = 0
        self._arrived = torch.empty(self._slot_bytes, dtype=torch.uint8)
        """Of a step's beginning: the layers may write to it, and tapes know it by its address."""
        self.carry: Carry | None = None
        """What the step under way begins with; None: it begins with tokens."""
        self._alone = False
        if self._before is not None:
            self._before.settimeout(timeout)
        for link, carry, name in ((far[0], self._bring, "from-stage-before"), (far[1], self._carry, "to-next-stage")):
            if link is not None:
                threading.Thread(target=carry, args=[*self._open(link.end), link.wire], name=name, daemon=True).start()

    def _carry(self, stage: socket.socket, memory: mmap.mmap, wire: int) -> None:
        """Bring what is passed on to the next stage's node, until that is gone: the core tells so."""
        view, steps = memoryview(memory), 0
        with socket.socket(fileno=wire) as stream, suppress(OSError):
            while head := stage.recv(_HEAD.size):
                stream.sendall(head)
                at = steps % self._slots * self._slot_bytes
                stream.sendall(view[at : at + self._step_bytes(head)])
                steps += 1

    def _bring(self, stage: socket.socket, memory: mmap.mmap, wire: int) -> None:
        """Take in what the stage before passes on, on its node, until that is gone."""
        view, steps = memoryview(memory), 0
        with socket.socket(fileno=wire) as stream, suppress(OSError):
            while len(head := stream.recv(_HEAD.size, socket.MSG_WAITALL)) == _HEAD.size:
                at, size = steps % self._slots * self._slot_bytes, self._step_bytes(head)
                if size > self._slot_bytes or (size and stream.recv_into(view[at : at + size], size, socket.MSG_WAITALL) < size):
                    return
                stage.send(head)
                steps += 1

    def _step_bytes(self, head: bytes) -> int:
        """Bytes of a step's hidden states."""
        _, tokens, number, parts, *_ = _HEAD.unpack(head)
        return 0 if number == _LOST else parts * tokens * self._hidden_size * _DTYPES[number].itemsize

    def _open(self, end: LinkEnd | None) -> tuple[socket.socket | None, mmap.mmap]:
        if end is None:
            return None, mmap.mmap(-1, 1)
        size = self._slots * self._slot_bytes
        # Both sides do it. Memory is taken when it is first written, so that short steps take little.
        os.ftruncate(end.memory, size)
        return socket.socket(fileno=os.dup(end.socket)), mmap.mmap(end.memory, size)

    @property
    def is_alone(self) -> bool:
        """Whether steps are this stage's own."""
        return self._alone

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Steps in here are this stage's own: it reads zeros, and passes nothing on."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    @contextmanager
    def passing(self, step_id: int) -> Iterator[None]:
        """A step. Where it comes to nothing, the next stage is told."""
        try:
            yield
        except GroupFailed:
            raise
        except Exception:
            if self._after is not None and not self._alone:
                self._after.send(_HEAD.pack(step_id, 0, _LOST, 0, 0, 0, 0))
                self._sent += 1
            raise

    def receive(self, step_id: int, num_tokens: int) -> Carry | None:
        """What a step begins with, which `carry` is from then on.

        Raises:
            StageLost: The stage before has lost the step.
            GroupFailed: It keeps this one waiting, or is at another step.
        """
        if not self._stage.first:
            self.carry = self._received_carry(step_id, num_tokens)
        return self.carry

    def _received_carry(self, step_id: int, num_tokens: int) -> Carry:
        if self._alone:
            return Carry.of(self._place(num_tokens, self._dtype, 2 + self._aux).zero_(), self._aux)
        assert self._before is not None, "a later stage has a link from the one before"
        try:
            step, tokens, number, count, *kinds = _HEAD.unpack(self._before.recv(_HEAD.size))
        except TimeoutError:
            stage = self._stage.rank
            raise GroupFailed(f"stage {stage - 1} has kept stage {stage} waiting for {self._timeout:g} seconds") from None
        at = self._received % self._slots * self._slot_bytes
        self._received += 1
        if step != step_id or tokens != (0 if number == _LOST else num_tokens):
            raise GroupFailed(
                f"stage {self._stage.rank - 1} and stage {self._stage.rank} disagree: step {step} of {tokens} tokens there, "
                f"step {step_id} of {num_tokens} here"
            )
        if number == _LOST:
            raise StageLost(f"pipeline stage {self._stage.rank - 1} has lost it")
        dtype = _DTYPES[number]
        return Carry.of(self._place(tokens, dtype, count).copy_(self._parts(self._from, at, tokens, dtype, count)), *kinds)

    def _place(self, tokens: int, dtype: torch.dtype, number: int) -> torch.Tensor:
        """[number, tokens, hidden]: where the parts of a step lie."""
        return self._arrived.view(dtype)[: number * tokens * self._hidden_size].view(number, tokens, -1)

    def send(self, step_id: int, carry: Carry) -> None:
        """Passes on what a step's next stage begins with."""
        if self._alone:
            return
        assert self._after is not None, "an earlier stage has a link to the next one"
        parts = carry.parts()
        at = self._sent % self._slots * self._slot_bytes
        self._sent += 1
        count, dtype = len(carry.hidden), carry.hidden.dtype
        for place, part in zip(self._parts(self._to, at, count, dtype, len(parts)), parts, strict=True):
            place.copy_(part)
        kinds = len(carry.aux), len(carry.deep), int(carry.following is not None)
        self._after.send(_HEAD.pack(step_id, count, _DTYPES.index(dtype), len(parts), *kinds))

    def _parts(self, memory: mmap.mmap, at: int, tokens: int, dtype: torch.dtype, number: int) -> torch.Tensor:
        """[number, tokens, hidden]: the parts of one step in the memory."""
        whole = torch.frombuffer(memory, dtype=dtype, count=number * tokens * self._hidden_size, offset=at)
        return whole.view(number, tokens, -1)
