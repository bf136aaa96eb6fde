"""The cache's events in vLLM's form, which needs what our own do without: the tokens of each block that is stored.

Blocks of tenants are left out: who reads vLLM's form knows no tenants, and would count them as everybody's.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from penstock.api import events
from penstock.api.vllm_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, name_of
from penstock.prompt.hashing import ExtraKeys


class _Content(msgspec.Struct, frozen=True):
    """What a block holds."""

    parent: bytes | None
    start: int
    """Position of its first token in the sequence."""
    token_ids: list[int]
    extra: ExtraKeys


class BlockContents:
    """What blocks hold whose storing has not been told yet.

    Args:
        block_size: Tokens that a hash stands for.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._contents: dict[bytes, _Content] = {}

    def add(self, hashes: Sequence[bytes], token_ids: Sequence[int], first: int, extra: ExtraKeys) -> None:
        """Note blocks `first` and later of a sequence.

        Args:
            hashes: Of all its full blocks.
            token_ids: All its tokens, from the first one.
            first: Number of a block.
            extra: What forks its chain.
        """
        if extra.tenant:
            return
        size = self._block_size
        for at in range(first, min(len(hashes), len(token_ids) // size)):
            tokens = [int(token) for token in token_ids[at * size : (at + 1) * size]]
            self._contents[hashes[at]] = _Content(hashes[at - 1] if at else None, at * size, tokens, extra)

    def translate(self, told: Iterable[events.Event]) -> list[Event]:
        """The same in vLLM's form, in their order; blocks in tiers are left out. Forgets all contents: what is not told with them
        was told before."""
        found = [event for own in told for event in self._translated(own)]
        self._contents.clear()
        return found

    def _translated(self, own: events.Event) -> Iterator[Event]:
        if isinstance(own, events.AllBlocksCleared):
            yield AllBlocksCleared()
        elif isinstance(own, events.BlockStored) and own.medium is None:
            known = [it for it in own.block_hashes if it in self._contents]
            while known:
                chain = list(self._chain(known))
                yield self._stored(chain)
                known = known[len(chain) :]
        elif isinstance(own, events.BlockRemoved) and own.medium is None:
            yield BlockRemoved(block_hashes=[name_of(it) for it in own.block_hashes])

    def _chain(self, hashes: Sequence[bytes]) -> Iterator[bytes]:
        """The first of these, and those that follow it in the same sequence."""
        yield hashes[0]
        for before, block_hash in zip(hashes, islice(hashes, 1, None), strict=False):
            if self._contents[block_hash].parent != before:
                return
            yield block_hash

    def _stored(self, chain: Sequence[bytes]) -> BlockStored:
        contents = [self._contents[it] for it in chain]
        first = contents[0]
        keys = [self._keys(it) for it in contents]
        return BlockStored(
            block_hashes=[name_of(it) for it in chain],
            parent_block_hash=None if first.parent is None else name_of(first.parent),
            token_ids=[token for it in contents for token in it.token_ids],
            block_size=self._block_size,
            lora_name=first.extra.lora,
            extra_keys=keys if any(keys) else None,
        )

    def _keys(self, content: _Content) -> list[object] | None:
        """In vLLM's order: adapter, images, salt."""
        extra, start = content.extra, content.start
        keys: list[object] = [] if extra.lora is None else [extra.lora]
        for item in extra.items:
            if item.start < start + self._block_size and item.start + item.length > start:
                keys.append([item.identifier, item.start - start])
        if content.parent is None and extra.cache_salt is not None:
            keys.append(extra.cache_salt)
        return keys or None
