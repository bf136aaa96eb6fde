"""To which sizes batches are padded, so that few graphs serve all of them."""

from bisect import bisect_left
from collections.abc import Sequence

DEFAULT_MAX_CAPTURE_SIZE = 512
"""Above it a step is so long that its launches hide behind the device's work."""
# Steps between sizes, each up to a bound: about as many graphs as a tenth of the sizes, and a padding that stays below 1/8.
_STEPS = ((64, 8), (256, 16))
_LAST_STEP = 32


def default_capture_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, then ever wider steps up to `largest`, which is one of them."""
    sizes = [size for size in (1, 2, 4) if size <= largest]
    size = 8
    while size <= largest:
        sizes.append(size)
        size += next((step for bound, step in _STEPS if size < bound), _LAST_STEP)
    if largest not in sizes:
        sizes.append(largest)
    return tuple(sizes)


def first_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Those to capture before the first request, largest first: with them every batch has a graph, of at most about twice its
    size."""
    chosen = [max(sizes)]
    for size in sorted(sizes, reverse=True):
        if 2 * size <= chosen[-1]:
            chosen.append(size)
    if min(sizes) not in chosen:
        chosen.append(min(sizes))
    return tuple(chosen)


class PaddedSizes:
    """From a number to the next size, in constant time.

    Args:
        sizes: Positive, in any order.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sorted(set(sizes))
        if self._sizes and self._sizes[0] < 1:
            raise ValueError(f"the size {self._sizes[0]} is not positive")
        self._table = [self._sizes[bisect_left(self._sizes, n)] for n in range(self.largest + 1)]

    @property
    def largest(self) -> int:
        """0: there are none."""
        return self._sizes[-1] if self._sizes else 0

    def padded(self, n: int) -> int | None:
        """The smallest size that holds `n`; None where there is none: never one below `n`."""
        return self._table[n] if n < len(self._table) and self._sizes else None
