"""Block hashes in compiled form."""

from array import array
from collections.abc import Sequence

from penstock.gateway.picker.compiled import Compiled
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.hashing import BlockHasher, ExtraKeys, every_key, first_keys


class CompiledHasher(BlockHasher):
    """The hashes of a bundle's blocks. Blocks with images are Python's, which are few."""

    def __init__(self, bundle: PromptBundle, compiled: Compiled) -> None:
        super().__init__(bundle.block_size, bundle.hash_seed)
        self._compiled = compiled

    def chain(self, parent: bytes | None, tokens: Sequence[int], extra: ExtraKeys, start: int) -> list[bytes]:
        """See `BlockHasher.chain`. Other threads run meanwhile."""
        if extra.items:
            return super().chain(parent, tokens, extra, start)
        if len(tokens) < self.block_size:
            return []
        first = first_keys(extra) if parent is None else b""
        return self._compiled.chain(parent or self.root, array("I", tokens), self.block_size, every_key(extra), first)
