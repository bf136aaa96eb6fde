"""How many requests have shown a block: a tier that keeps only what comes again writes less, and holds more of it."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

MOST: Final = 64_000
"""Blocks that are remembered: the last ones seen."""


def sightings_of(threshold: int) -> "Sightings | None":
    """The counts for `--kv-offload-threshold`; None where each block is worth a copy."""
    return Sightings(threshold) if threshold > 1 else None


class Sightings:
    """Counts of blocks in prompts.

    Args:
        threshold: Requests that must show a block before it is worth a copy.
        most: Blocks remembered.
    """

    def __init__(self, threshold: int, most: int = MOST) -> None:
        self._threshold, self._most = threshold, most
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def saw(self, block_hashes: Iterable[bytes]) -> None:
        """A request has come with these blocks."""
        for name in block_hashes:
            self._counts[name] = self._counts.pop(name, 0) + 1
        while len(self._counts) > self._most:
            self._counts.popitem(last=False)

    def enough(self, block_hash: bytes) -> bool:
        """Whether the block is worth a copy."""
        return self._counts.get(block_hash, 0) >= self._threshold
