"""A KV group of full attention: every request keeps every block of its sequence."""

from collections.abc import Callable, Sequence

from penstock.engine.cache.group_manager import GroupManager


class FullAttentionManager(GroupManager):
    """Block tables of a group whose layers attend to all earlier tokens."""

    def lookup(self, block_hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """Return the cached blocks from the left up to the first miss."""
        blocks: list[int] = []
        for at in range(num_tokens // self.block_size):
            block = self._pool.lookup(self._number, self._name(block_hashes, at))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def extend(self, block_hashes: Sequence[bytes], num_blocks: int, upto: int, has: Callable[[int, bytes], bool]) -> int:
        """Return the tokens up to the first block that is cached nowhere."""
        end = num_blocks
        while (end + 1) * self.block_size <= upto and self._is_had(block_hashes, end, has):
            end += 1
        return end * self.block_size
