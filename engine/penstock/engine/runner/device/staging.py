"""How what a plan says gets to the device: in one copy from pinned memory a step.

A page of int32 numbers holds the step's request, then the changes to persistent arrays: runs of numbers, each with its place.
What changes in a step is little as a rule; a step with more than a page of it sends further pages ahead.

    page   │ request: result, shared, rows, query_start_loc, samples │ runs: (target, first, length, source) … │ numbers … │

The device has one page, which stream order protects. The host has several, and writes one again only after the step that it was
for is over.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.core.plan import NONE, Bool, Int32
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


class Runs(NamedTuple):
    """Changes as a page holds them."""

    table: Int32
    """[k, 4]: of each run the target, the place of its first number there, how many it has, and where in `numbers` they begin,
    counted from where those of some run of the same step do."""
    numbers: Int32
    """[n]: of all of them, one run after the other."""


class Changes:
    """Writes to persistent device arrays that the next step is to find; no place twice."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        self._names = {id(target): number for number, target in enumerate(targets)}
        self._tables: list[Int32] = []
        self._numbers: list[Int32] = []

    def write(self, target: torch.Tensor, first: int, values: npt.NDArray[np.generic]) -> None:
        """Puts values, [n], at the flat places from `first` on. Places and values are counted in numbers of four bytes, whatever
        the array's elements are.

        Raises:
            KeyError: The array is none of the staging's targets.
        """
        numbers = np.ascontiguousarray(values).view(np.int32)
        begins = np.arange(0, len(numbers), RUN, dtype=np.int32)
        self._add(target, first + begins, np.minimum(len(numbers) - begins, RUN), numbers)

    def scatter(self, target: torch.Tensor, places: Int32, values: Int32) -> None:
        """Puts values, [n], at flat places, [n]."""
        self._add(target, places, 1, values)

    def _add(self, target: torch.Tensor, firsts: Int32, lengths: Int32 | int, numbers: Int32) -> None:
        """Runs of these lengths, [k] or the same of all, from the places `firsts`, [k], on."""
        table = np.empty((len(firsts), 4), np.int32)
        table[:, 0], table[:, 1], table[:, 2] = self._names[id(target)], firsts, lengths
        self._tables.append(table)
        self._numbers.append(numbers)

    def take(self) -> Runs:
        """All of them, and forgets them."""
        if not self._tables:
            return _NO_RUNS
        runs = Runs(np.concatenate(self._tables), np.concatenate(self._numbers))
        self._tables, self._numbers = [], []
        lengths = runs.table[:, 2]
        runs.table[:, 3] = lengths.cumsum() - lengths
        return runs


_NO_RUNS = Runs(np.empty((0, 4), np.int32), NONE)


class _Slot:
    """One step's pages on the host."""

    def __init__(self) -> None:
        self.pages: list[tuple[torch.Tensor, Int32]] = []
        """Each as the device's copies and as the host's writes take it."""
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
            self._send_page(*self._host_page(slot, at), runs)
        (page, host), count = self._host_page(slot, len(ahead)), len(rows)
        host[0], host[self._shared] = number, shared
        host[self._rows : self._rows + count] = rows
        host[self._starts : self._starts + count + 1] = query_start_loc
        host[self._samples : self._samples + count] = samples
        self._send_page(page, host, last)
        return number

    def over(self, slot: int) -> None:
        """The step of a slot is over: its pages may be written again."""
        self._slots[slot].in_flight = False

    def _cut(self, runs: Runs) -> list[Runs]:
        """Into pages; at least one."""
        (table, numbers), room = runs, self._page_size - self._begin
        if table.size + len(numbers) <= room:
            return [runs]
        pages, first = list[Runs](), 0
        ends = np.cumsum(4 + table[:, 2])
        while first < len(table):
            last = int(np.searchsorted(ends, room + (ends[first - 1] if first else 0), "right"))
            begin, end = int(table[first, 3]), int(table[last - 1, 3] + table[last - 1, 2])
            pages.append(Runs(table[first:last], numbers[begin:end]))
            first = last
        return pages

    def _host_page(self, slot: _Slot, number: int) -> tuple[torch.Tensor, Int32]:
        if number == len(slot.pages):
            page = self._runtime.pinned(self._page_size)
            slot.pages.append((page, page.numpy()))
        return slot.pages[number]

    def _send_page(self, page: torch.Tensor, host: Int32, runs: Runs) -> None:
        """Sends a page, which the host writes through `host`, with these runs."""
        (table, numbers), at = runs, self._begin
        if count := len(table):
            at += table.size
            there = host[self._begin : at].reshape(-1, 4)
            there[:] = table
            there[:, 3] += at - table[0, 3]
            host[at : at + len(numbers)] = numbers
            at += len(numbers)
        self._runtime.upload(page[:at], self._page[:at])
        if count:
            self._ops.apply_changes(self._page, self._begin, count, self._targets)
