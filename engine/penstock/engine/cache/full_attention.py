"""One KV group of full attention: every request keeps every block of its sequence."""

from collections.abc import Sequence

from penstock.engine.cache.block_pool import BlockPool


class FullAttentionManager:
    """The block tables of one group. Within a request blocks are only ever appended.

    Args:
        pool: Shared by all groups.
        group: This group's number.
        block_size: Tokens in a block.
    """

    def __init__(self, pool: BlockPool, group: int, block_size: int) -> None:
        self._pool = pool
        self._group = group
        self._block_size = block_size
        self._tables: dict[int, list[int]] = {}
        self._num_cached: dict[int, int] = {}

    def lookup(self, block_hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix, from the left up to the first miss."""
        blocks: list[int] = []
        for block_hash in block_hashes:
            block = self._pool.lookup(self._group, block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def table(self, request: int) -> Sequence[int]:
        """The request's blocks in the order of its tokens; none where it holds none."""
        return self._tables.get(request, ())

    def num_missing(self, request: int, num_tokens: int) -> int:
        """Blocks to append until the request's table holds `num_tokens`."""
        return max(-(-num_tokens // self._block_size) - len(self.table(request)), 0)

    def adopt(self, request: int, blocks: Sequence[int]) -> None:
        """Begins a request's table with cached blocks, held from now on, so that nobody evicts them."""
        if request in self._tables:
            raise ValueError(f"request {request} holds blocks already")
        self._pool.touch(blocks)
        self._tables[request] = list(blocks)
        self._num_cached[request] = len(blocks)

    def append(self, request: int, count: int) -> list[int]:
        """Appends `count` new blocks and returns them."""
        blocks = self._pool.get_new_blocks(count)
        self._tables[request].extend(blocks)
        return blocks

    def commit(self, request: int, block_hashes: Sequence[bytes], count: int) -> None:
        """Publishes the request's first `count` blocks, which are full, under their hashes; each once."""
        table = self._tables[request]
        for at in range(self._num_cached[request], count):
            self._pool.cache(self._group, table[at], block_hashes[at])
            self._num_cached[request] = at + 1

    def free(self, request: int) -> None:
        """Gives the request's blocks back, tail first, so that shared roots are evicted last."""
        self._pool.free(reversed(self._tables.pop(request)))
        del self._num_cached[request]
