"""How what a plan says gets to the device: in one copy from pinned memory a step.

A page of int32 numbers holds the step's request, then the changes to persistent arrays: runs of numbers, each with its place.
What changes in a step is little as a rule; a step with more than a page of it sends further pages ahead.

    page   │ request: result, shared, rows, query_start_loc, samples │ runs: (target, first, length, source) … │ numbers … │

The device has one page, which stream order protects. The host has several, and writes one again only after the step that it was
for is over.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.core.plan import Bool, Int32
from penstock.engine.runner.device.runtime import DeviceRuntime
from penstock.kernels.step_state.batch import StepRequest, Targets
from penstock.kernels.step_state.ops import StepOps

RUN = 1024
"""Numbers in a run at most: one program's share."""
PAGE = 1 << 16
"""Numbers in a page."""
MAX_TARGET = (1 << 31) - 1
"""Elements of a target at most, so that places are int32."""


def aligned(count: int) -> int:
    """As many numbers or more, so that what follows begins at a multiple of 16 bytes."""
    return -(-count // 4) * 4


class Changes:
    """Writes to persistent device arrays that the next step is to find; no place twice."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        self._numbers = {id(target): number for number, target in enumerate(targets)}
        self._runs: list[tuple[int, int, Int32]] = []

    def write(self, target: torch.Tensor, first: int, values: npt.NDArray[np.generic]) -> None:
        """Puts values, [n], at the flat places from `first` on. Places and values are counted in numbers of four bytes, whatever
        the array's elements are.

        Raises:
            KeyError: The array is none of the staging's targets.
        """
        numbers = np.ascontiguousarray(values).view(np.int32)
        number = self._numbers[id(target)]
        for start in range(0, len(numbers), RUN):
            self._runs.append((number, first + start, numbers[start : start + RUN]))

    def scatter(self, target: torch.Tensor, places: Int32, values: Int32) -> None:
        """Puts values, [n], at flat places, [n]."""
        number = self._numbers[id(target)]
        self._runs += [(number, place, values[at : at + 1]) for at, place in enumerate(places.tolist())]

    def take(self) -> list[tuple[int, int, Int32]]:
        """(target, first, numbers) of each run, and forgets them."""
        runs, self._runs = self._runs, []
        return runs


class _Slot:
    """One step's pages on the host."""

    def __init__(self) -> None:
        self.pages: list[torch.Tensor] = []
        self.in_flight = False


class Staging:
    """See the module.

    Args:
        runtime: The device.
        ops: Apply changes there.
        max_num_seqs: Requests of a step at most, padding included.
        depth: Steps in flight at most.
        targets: Arrays that change: contiguous, of elements of 4 or 8 bytes, with lasting addresses.
        page_size: Numbers in a page; at least a step's request and one run more.

    Raises:
        ValueError: A target has too many elements for its places to be int32.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        ops: StepOps,
        max_num_seqs: int,
        depth: int,
        targets: Sequence[torch.Tensor],
        page_size: int = PAGE,
    ) -> None:
        if any(target.numel() > MAX_TARGET for target in targets):
            raise ValueError(f"a device array has more than {MAX_TARGET} elements")
        self._runtime, self._ops, self._targets = runtime, ops, Targets([target.view(torch.int32) for target in targets])
        self.changes = Changes(targets)
        # Kernels are compiled for arrays that begin at a multiple of 16 bytes, and once more for those that do not.
        self._shared, self._rows = 4, 8
        self._starts = self._rows + aligned(max_num_seqs)
        self._samples = self._starts + aligned(max_num_seqs + 1)
        self._begin = self._samples + aligned(max_num_seqs)
        self._page_size = max(page_size, self._begin + 4 + RUN)
        self.num_slots = depth + 1
        """Steps whose results may be on their way at a time, the one in the making included."""
        self._slots = [_Slot() for _ in range(self.num_slots)]
        self._next = 0
        self._page = torch.zeros(self._page_size, dtype=torch.int32, device=runtime.device)

    def request(self, num_reqs: int) -> StepRequest:
        """Where the device finds the request of a step of so many requests: always there."""
        page = self._page
        return StepRequest(
            rows=page[self._rows : self._rows + num_reqs],
            query_start_loc=page[self._starts : self._starts + num_reqs + 1],
            samples=page[self._samples : self._samples + num_reqs],
            result=page[:1],
            shared=page[self._shared : self._shared + 1],
        )

    def send(self, rows: Int32, query_start_loc: Int32, samples: Bool, shared: int = 0) -> int:
        """Brings a step's request and all changes to the device.

        Args:
            rows: [r], padding included.
            query_start_loc: [r + 1].
            samples: [r].
            shared: First tokens that all requests share.

        Returns:
            The slot, in which the step's result belongs too; it is taken until `over`.

        Raises:
            RuntimeError: The slot's last step is not over: there are more in flight than was agreed.
        """
        number = self._next
        slot = self._slots[number]
        if slot.in_flight:
            raise RuntimeError(f"more than {self.num_slots - 1} steps are in flight")
        slot.in_flight = True
        self._next = (number + 1) % self.num_slots
        *ahead, last = self._cut(self.changes.take())
        for at, runs in enumerate(ahead):
            self._send_page(self._host_page(slot, at), runs)
        page, count = self._host_page(slot, len(ahead)), len(rows)
        host = page.numpy()
        host[0], host[self._shared] = number, shared
        host[self._rows : self._rows + count] = rows
        host[self._starts : self._starts + count + 1] = query_start_loc
        host[self._samples : self._samples + count] = samples
        self._send_page(page, last)
        return number

    def over(self, slot: int) -> None:
        """The step of a slot is over: its pages may be written again."""
        self._slots[slot].in_flight = False

    def _cut(self, runs: list[tuple[int, int, Int32]]) -> list[list[tuple[int, int, Int32]]]:
        """Into pages; at least one."""
        pages: list[list[tuple[int, int, Int32]]] = [[]]
        room = self._page_size - self._begin
        for run in runs:
            needed = 4 + len(run[2])
            if needed > room:
                pages.append([])
                room = self._page_size - self._begin
            pages[-1].append(run)
            room -= needed
        return pages

    def _host_page(self, slot: _Slot, number: int) -> torch.Tensor:
        if number == len(slot.pages):
            slot.pages.append(self._runtime.pinned(self._page_size))
        return slot.pages[number]

    def _send_page(self, page: torch.Tensor, runs: list[tuple[int, int, Int32]]) -> None:
        host, at = page.numpy(), self._begin + 4 * len(runs)
        if runs:
            lengths = np.array([len(numbers) for _, _, numbers in runs])
            table = host[self._begin : at].reshape(-1, 4)
            table[:, 0] = [target for target, _, _ in runs]
            table[:, 1] = [first for _, first, _ in runs]
            table[:, 2] = lengths
            table[:, 3] = at + np.cumsum(lengths) - lengths
            numbers = np.concatenate([numbers for _, _, numbers in runs])
            host[at : at + len(numbers)] = numbers
            at += len(numbers)
        self._runtime.upload(page[:at], self._page[:at])
        if runs:
            self._ops.apply_changes(self._page, self._begin, len(runs), self._targets)
