"""Block hashes, and what is remembered of texts, in compiled form."""

from array import array
from collections.abc import Sequence

from penstock.gateway.load.merges import merges_of
from penstock.gateway.picker.compiled import Compiled
from penstock.prompt import cuts
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.hashing import DIGEST_BYTES, BlockHasher, ExtraKeys, every_key, first_keys
from penstock.prompt.memo import MAX_BYTES, Node, PrefixMemo, Rest
from penstock.prompt.processor import PromptProcessor


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


class CompiledMemo(PrefixMemo):
    """A memo that goes from a text to its hashes in one call, asks the tokenizer only for words that it neither remembers nor can
    read by the merges, and makes no list of the tokens."""

    def __init__(self, processor: PromptProcessor, compiled: Compiled, max_bytes: int = MAX_BYTES) -> None:
        hasher = CompiledHasher(processor.bundle, compiled)
        super().__init__(processor, max_bytes, hasher)
        self._root = hasher.root
        self._named = compiled.BlockHashes
        merges = merges_of(processor.bundle.tokenizer) if self._cutter.by_words else None
        self._texts = compiled.TextHasher(hasher.block_size, self._cutter.apart, merges)

    def _keeps_none(self, text: str, *, alone: bool) -> bool:
        """Where words are remembered, to hash a text of one piece costs less than to keep it. Only its like would find it."""
        return not alone and self._cutter.by_words and len(text) <= cuts.MIN_PIECE

    def _encoded(self, known: list[Node], rest: Rest, extra: ExtraKeys) -> list[Node]:
        """The nodes of the rest of a text, in one call of the package; see `PrefixMemo`."""
        tokens, parent, tail = (known[-1].tokens, known[-1].parent, known[-1].tail) if known else (0, None, ())
        by_words = self._cutter.by_words and not rest.alone
        first = first_keys(extra) if parent is None else b""
        try:
            hashed = self._texts.hashed(
                rest.pieces,
                rest.encode,
                by_words,
                rest.most,
                rest.before,
                rest.after,
                parent or self._root,
                tail,
                every_key(extra),
                first,
            )
        except UnicodeEncodeError:
            return super()._encoded(known, rest, extra)  # which refuses it by name
        added: list[Node] = []
        for count, hashes, last in hashed:
            tokens += count
            parent = hashes[-DIGEST_BYTES:] if hashes else parent
            added.append(Node(tokens, hashes, parent, tuple(last)))
        return added
