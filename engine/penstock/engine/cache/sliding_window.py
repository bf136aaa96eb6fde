"""A KV group whose layers see a window: a request keeps the blocks that its next token can see."""

from collections.abc import Callable, Sequence

from penstock.engine.cache.block_pool import NULL_BLOCK, BlockPool
from penstock.engine.cache.group_manager import GroupManager
from penstock.engine.cache.layout import KVGroup


class SlidingWindowManager(GroupManager):
    """Block tables of a group whose layers attend within a window."""

    def __init__(self, pool: BlockPool, number: int, group: KVGroup, hash_block_size: int) -> None:
        super().__init__(pool, number, group, hash_block_size)
        if group.window is None:
            raise ValueError(f"group {number} has no window")
        # A token sees itself and so many before it.
        self._reach = group.window - 1
        self._num_retired: dict[int, int] = {}

    def lookup(self, block_hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """Return the last end, from the right, before which everything within reach is cached."""
        end, needed = num_tokens // self.block_size, -(-self._reach // self.block_size)
        run: list[int] = []
        for at in reversed(range(end)):
            if len(run) == needed:
                return [NULL_BLOCK] * (at + 1) + run[::-1]
            block = self._pool.lookup(self._number, self._name(block_hashes, at))
            if block is None:
                run.clear()
            else:
                run.append(block)
        return run[::-1]

    def extend(self, block_hashes: Sequence[bytes], num_blocks: int, upto: int, has: Callable[[int, bytes], bool]) -> int:
        """Return the last end before which everything within reach is available elsewhere."""
        for end in range(upto // self.block_size, num_blocks, -1):
            first = max(num_blocks, self.num_unseen(end * self.block_size))
            if all(self._is_had(block_hashes, at, has) for at in range(first, end)):
                return end * self.block_size
        return num_blocks * self.block_size

    def num_unseen(self, num_tokens: int) -> int:
        """Blocks at the beginning of a sequence that no token from `num_tokens` on sees."""
        return max(num_tokens - self._reach, 0) // self.block_size

    def adopt(self, request: int, blocks: Sequence[int]) -> None:
        """Begin a request's table with cached blocks."""
        super().adopt(request, blocks)
        self._num_retired[request] = 0

    def retire(self, request: int, upto: int) -> None:
        """The blocks wholly before the window of token `upto`; published ones can be found until they are handed out again."""
        table, first = self._tables[request], self._num_retired[request]
        last = self.num_unseen(upto)
        if last <= first:
            return
        self._pool.free(block for block in reversed(table[first:last]) if block != NULL_BLOCK)
        table[first:last] = [NULL_BLOCK] * (last - first)
        self._num_retired[request] = last

    def free(self, request: int) -> None:
        """Gives the request's blocks back, tail first, so that shared roots are evicted last."""
        super().free(request)
        del self._num_retired[request]
