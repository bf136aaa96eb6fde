"""How experts move between ranks while steps run.

    a thread      for each layer: computes its new placement, sends and receives weights, and keeps them beside the old ones
    a step        tells, as it begins, how many layers a rank has ready; what all ranks have ready is served from this step on

The thread has a communicator of its own: no step waits for it, and it waits for none. All ranks count the same loads, so that
their threads begin after the same step, find the same placements, and exchange the same layers in the same order. At most one
layer is ready and not yet served.
"""

import hashlib
import logging
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.models.layers.expert_ranks import ExpertLayer
from penstock.engine.models.layers.placement import Int64, Placement
from penstock.engine.parallel.eplb import Float64, Gift, better_placement, moves
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.shared_comm import SharedComm

_DIGEST_BYTES: Final = 16

log = logging.getLogger(__name__)


class _Ready(NamedTuple):
    """A layer's next placement, and what the rank's slots then have."""

    layer: ExpertLayer
    placement: Placement
    slots: dict[int, list[torch.Tensor]]
    """By slot of the rank, its tensors."""
    moved_bytes: int
    """That ranks have taken from other ranks, all of them together."""


class ExpertMover:
    """One rank's. Its methods are for the thread that makes steps.

    Args:
        comm: Of all ranks, for nothing else.
    """

    def __init__(self, comm: SharedComm) -> None:
        self._comm = comm
        self._thread: threading.Thread | None = None
        self._ready: _Ready | None = None
        self._turn, self._stopped = threading.Semaphore(0), False
        self._error: Exception | None = None
        self._spare = dict[str, list[list[torch.Tensor]]]()
        """Memory of slots, by their form."""
        self.num_ready = 0
        """Layers and ends of rebalancings that this rank has had ready since the start."""
        self._num_served = 0
        self.num_rebalances = 0
        """That have come to their end."""
        self.moved_bytes = 0
        """Bytes of the weights that are served and that ranks have taken from other ranks, all of them together."""

    @property
    def is_moving(self) -> bool:
        """Whether a rebalancing has begun and not ended; on all ranks alike."""
        return self._thread is not None

    def begin(self, layers: Sequence[ExpertLayer], loads: Float64) -> None:
        """Begins a rebalancing.

        Args:
            layers: With experts.
            loads: [layers, experts].
        """
        assert not self.is_moving, "one rebalancing after the other"
        self._thread = threading.Thread(target=self._run, args=[layers, loads], name="expert-mover", daemon=True)
        self._thread.start()

    def serve(self, ready: int) -> None:
        """Serves with what all ranks have ready.

        Args:
            ready: The least `num_ready` of any rank, as all were told.
        """
        if self._error is not None:
            raise GroupFailed(f"experts cannot move: {self._error}") from self._error
        if ready == self._num_served:
            return
        assert ready == self._num_served + 1, "a layer is ready before the one before it is served"
        self._num_served, now, self._ready = ready, self._ready, None
        if now is None:
            self.num_rebalances += 1
            self._join()
            return
        with torch.inference_mode():
            for slot, tensors in now.slots.items():
                held = now.layer.held(slot)
                # The old memory takes what comes next, so that a rank never needs more than it did for one layer.
                self._spare.setdefault(_form(held), []).append([old.detach() for old in held])
                for old, new in zip(held, tensors, strict=True):
                    old.set_(new.untyped_storage(), 0, new.shape, new.stride())
        now.layer.place(now.placement)
        self.moved_bytes += now.moved_bytes
        self._turn.release()

    def stop(self) -> None:
        """Ends a rebalancing: layers that are not yet served stay as they are. All ranks call it between the same two steps."""
        if self._thread is not None:
            self._stopped = True
            self._join()
            self._stopped, self._ready, self.num_ready = False, None, self._num_served
        self._spare.clear()

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        assert thread is not None
        self._turn.release()
        thread.join()
        self._turn = threading.Semaphore(0)

    # --- in the thread ---

    def _run(self, layers: Sequence[ExpertLayer], loads: Float64) -> None:
        try:
            for layer, of_layer in zip(layers, loads, strict=True) if self._are_alike(layers) else ():
                new = better_placement(of_layer, layer.placement)
                if new is None:
                    continue
                self._offer(self._exchanged(layer, new))
                # Nowhere else: what one rank has begun to exchange, all have to.
                if self._stopped:
                    return
            self._offer(None)
        except Exception as error:
            log.exception("experts cannot move")
            self._comm.fail()
            self._error = error

    def _offer(self, ready: _Ready | None) -> None:
        """Has a layer served from some step on, and waits for that; None: all are."""
        self._ready = ready
        self.num_ready += 1
        self._turn.acquire()

    def _are_alike(self, layers: Sequence[ExpertLayer]) -> bool:
        """Whether the slots of each layer have one form on all ranks."""
        forms = [sorted({_form(layer.held(slot)) for slot in range(_own(layer.placement, self._comm.rank))}) for layer in layers]
        digest = hashlib.blake2b(repr(forms).encode(), digest_size=_DIGEST_BYTES).digest()
        told = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        sizes = np.full(self._comm.world, _DIGEST_BYTES)
        found = self._comm.gather_parts(told, sizes, np.stack((np.zeros_like(sizes), sizes))).view(-1, _DIGEST_BYTES)
        if len({bytes(other.tolist()) for other in found}) == 1 and all(len(each) == 1 for each in forms):
            return True
        log.warning("experts stay where they are: not all of a layer are held in the same form")
        return False

    def _exchanged(self, layer: ExpertLayer, new: Int64) -> _Ready:
        """A layer's next placement, after everything that the rank lacks of it has come."""
        old, rank = layer.placement, self._comm.rank
        first, rank_of, plan = int(old.starts[rank]), old.rank_of, moves(old, new)
        size = slot_bytes(layer)
        slots = {
            slot - first: self._taken(_given(layer, source - first, size), layer.held(slot - first))
            for source, slot in plan.within
            if rank_of[slot] == rank
        }
        for gifts in plan.rounds:
            sizes, wanted = np.zeros((2, self._comm.world), np.int64)
            takers = {giver: [slot for slot in gift.takers if rank_of[slot] == rank] for giver, gift in gifts.items()}
            for giver, own in takers.items():
                sizes[giver], wanted[giver] = size, size if own else 0
            given = _given(layer, gifts[rank].source - first, size) if rank in gifts else np.empty(0, np.uint8)
            found = self._comm.gather_parts(torch.from_numpy(given), sizes, np.stack((np.zeros_like(wanted), wanted))).numpy()
            parts = iter(np.split(found, len(found) // size)) if len(found) else iter(())
            for giver in sorted(giver for giver, own in takers.items() if own):
                part = next(parts)
                slots |= {slot - first: self._taken(part, layer.held(slot - first)) for slot in takers[giver]}
        moved = size * sum(_takes(gift, rank_of) for gifts in plan.rounds for gift in gifts.values())
        return _Ready(layer, Placement.of(new, old.starts, len(old.copies)), slots, moved)

    def _taken(self, data: npt.NDArray[np.uint8], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors with these bytes."""
        spare, at = self._spare.get(_form(like)), 0
        found = spare.pop() if spare else [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in like]
        for tensor in found:
            _bytes(tensor)[:] = data[at : at + tensor.nbytes]
            at += tensor.nbytes
        return found


def moving_bytes(layer: ExpertLayer, rank: int) -> int:
    """Bytes that a rank needs at most while experts move: other weights for all its slots of a layer, and what it sends and
    receives at once."""
    placement = layer.placement
    return slot_bytes(layer) * (_own(placement, rank) + len(placement.starts) - 1)


def slot_bytes(layer: ExpertLayer) -> int:
    """Bytes of an expert."""
    return sum(tensor.nbytes for tensor in layer.held(0))


def _own(placement: Placement, rank: int) -> int:
    """Slots of a rank."""
    return int(placement.starts[rank + 1] - placement.starts[rank])


def _form(tensors: Sequence[torch.Tensor]) -> str:
    """What two slots must have in common for their weights to be exchanged."""
    return repr([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])


def _takes(gift: Gift, rank_of: Int64) -> int:
    """Ranks that a gift goes to."""
    return len({int(rank_of[slot]) for slot in gift.takers})


def _given(layer: ExpertLayer, slot: int, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of one of the rank's slots, uint8, [size]. NumPy copies in the calling thread alone."""
    out, at = np.empty(size, np.uint8), 0
    for tensor in layer.held(slot):
        out[at : at + tensor.nbytes] = _bytes(tensor)
        at += tensor.nbytes
    return out


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return tensor.view(-1).view(torch.uint8).numpy()
