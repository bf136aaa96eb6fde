"""The block tables of one KV group, whatever its layers see."""

from collections.abc import Callable, Sequence, Set

from penstock.engine.cache.block_pool import NULL_BLOCK, BlockPool
from penstock.engine.cache.layout import KVGroup


class GroupManager:
    """What all kinds have in common. Within a request blocks are only ever appended; what a kind says it needs no longer is
    replaced by the null block.

    Args:
        pool: Shared by all groups.
        number: The group's.
        group: Its layers' blocks and window.
        hash_block_size: Tokens that a hash stands for; the group's blocks hold a multiple of it.
    """

    def __init__(self, pool: BlockPool, number: int, group: KVGroup, hash_block_size: int) -> None:
        self.block_size = group.block_size
        self._pool = pool
        self._number = number
        self._hashes_per_block = group.block_size // hash_block_size
        self._tables: dict[int, list[int]] = {}
        self._num_cached: dict[int, int] = {}

    def lookup(self, block_hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """The blocks of the longest cached prefix that is of use, up to `num_tokens`; the null block stands for those that need
        not be there."""
        raise NotImplementedError

    def retire(self, request: int, upto: int) -> None:
        """Gives back what no token from `upto` on sees. Steps before are done."""

    def has(self, request: int) -> bool:
        """Whether the request has a table, be it empty."""
        return request in self._tables

    def table(self, request: int) -> Sequence[int]:
        """The request's blocks in the order of its tokens; none where it holds none."""
        return self._tables.get(request, ())

    def num_missing(self, requests: Sequence[int], num_tokens: Sequence[int]) -> list[int]:
        """Blocks to append until each request's table holds so many tokens."""
        tables, size = self._tables, self.block_size
        return [
            max(-(-count // size) - len(tables.get(request, ())), 0) for request, count in zip(requests, num_tokens, strict=True)
        ]

    def num_unseen(self, num_tokens: int) -> int:
        """Blocks at the beginning of a sequence that no token from `num_tokens` on sees."""
        return 0

    def extend(self, block_hashes: Sequence[bytes], num_blocks: int, upto: int, has: Callable[[int, bytes], bool]) -> int:
        """Return where, up to `upto`, a request with `num_blocks` cached blocks could begin if all blocks that `has` reports were
        loaded."""
        raise NotImplementedError

    def missing(self, block_hashes: Sequence[bytes], num_blocks: int, upto: int) -> list[tuple[int, bytes]]:
        """What must come for a request to begin there: (place in its table, name) of each block."""
        places = range(max(num_blocks, self.num_unseen(upto)), upto // self.block_size)
        return [(at, self._name(block_hashes, at)) for at in places]

    def holders(self, blocks: Set[int]) -> list[int]:
        """Requests whose tables hold any of these blocks."""
        return [request for request, table in self._tables.items() if not blocks.isdisjoint(table)]

    def adopt(self, request: int, blocks: Sequence[int]) -> None:
        """Begin a request's table with cached blocks. They are held from now on, so that they are not evicted."""
        if request in self._tables:
            raise ValueError(f"request {request} holds blocks already")
        self._pool.touch(block for block in blocks if block != NULL_BLOCK)
        self._tables[request] = list(blocks)
        self._num_cached[request] = len(blocks)

    def append(self, requests: Sequence[int], blocks: Sequence[list[int]]) -> None:
        """Appends to each request's table its new blocks."""
        for request, appended in zip(requests, blocks, strict=True):
            self._tables[request].extend(appended)

    def publish(self, request: int, block_hashes: Sequence[bytes], upto: int, *, lasting: bool) -> None:
        """Publishes the request's blocks that token `upto` - 1 has filled, or one before it; each once. See `BlockPool.cache`."""
        table = self._tables[request]
        for at in range(self._num_cached[request], upto // self.block_size):
            first = at * self._hashes_per_block
            self._pool.cache(self._number, table[at], block_hashes[first : first + self._hashes_per_block], lasting=lasting)
            self._num_cached[request] = at + 1

    def num_published(self, request: int) -> int:
        """Hashes of the request's blocks that are found already, from the first one on."""
        return self._num_cached[request] * self._hashes_per_block

    def free(self, request: int) -> None:
        """Gives the request's blocks back, tail first, so that shared roots are evicted last."""
        self._pool.free(block for block in reversed(self._tables.pop(request)) if block != NULL_BLOCK)
        del self._num_cached[request]

    def _name(self, block_hashes: Sequence[bytes], at: int) -> bytes:
        """A block's name: the hash of its last tokens, which stands for all before them."""
        return block_hashes[(at + 1) * self._hashes_per_block - 1]

    def _is_had(self, block_hashes: Sequence[bytes], at: int, has: Callable[[int, bytes], bool]) -> bool:
        """Return whether block `at` of a sequence is available elsewhere."""
        return has(self._number, self._name(block_hashes, at))
