"""Tokens and block hashes of prompts, remembered by prefix: a conversation pays for its new part alone.

A text is cut where the tokens of the pieces are those of the whole (`cuts`). What is kept of a piece is found by the SHA-256 of
all that stands before it and of itself, so that a hit is the same text in the same place under the same keys, and holds what the
next piece needs to go on: the number of tokens, the block hashes, and the tokens that fill no block yet. Texts and token ids are
not kept.
"""

import hashlib
import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, Final, NamedTuple

import msgspec

from penstock.prompt.cuts import Cutter
from penstock.prompt.data_url import SCHEME, read_data_url
from penstock.prompt.hashing import DIGEST_BYTES, BlockHasher, ExtraKeys
from penstock.prompt.images import ImageCounts, ImagePart
from penstock.prompt.processor import PromptProcessor, TextPrompt, refuse_empty

MAX_BYTES: Final = 128 * 2**20
"""About 50 million tokens in blocks of 16."""
NODE_BYTES: Final = 500
"""What a piece takes besides its hashes (measured)."""
IDS_PIECE: Final = 512
"""Token ids of a piece where the client gave ids."""


class HashedPrompt(NamedTuple):
    """One prompt as the picker sees it."""

    tokens: int
    block_hashes: Sequence[bytes]
    images: tuple[tuple[int, int], ...] = ()
    """Of each different image, the position after its last token, and the cost of the tower's run: tokens of text that take as
    long."""


class Node(NamedTuple):
    """What is known at the end of a piece."""

    tokens: int
    """Tokens from the start of the prompt to the end of the piece."""
    hashes: bytes
    """Hashes of the blocks that this piece completes, concatenated."""
    parent: bytes | None
    """Hash of the last complete block of all."""
    tail: tuple[int, ...]
    """Tokens after that block."""


class Unremembered(Exception):
    """The tokenizer would have to read more than it may."""


class PrefixMemo:
    """The prompts of one bundle. Thread-safe.

    Args:
        processor: Of the bundle.
        max_bytes: Of what is remembered; the prefixes that were used least recently go first.
        hasher: Of the bundle's blocks; None: Python's.
    """

    def __init__(self, processor: PromptProcessor, max_bytes: int = MAX_BYTES, hasher: BlockHasher | None = None) -> None:
        self.processor = processor
        bundle = processor.bundle
        self._max_bytes = max_bytes
        self._hasher = hasher or BlockHasher(bundle.block_size, bundle.hash_seed)
        self._cutter = Cutter(bundle.tokenizer)
        self._wrap = _special_ids(msgspec.json.decode(bundle.tokenizer).get("post_processor"))
        self._nodes: OrderedDict[bytes, Node] = OrderedDict()
        self._lock = Lock()
        self.bytes = 0

    def hashed(self, path: str, body: Mapping[str, Any], extra: ExtraKeys, most: int | None = None) -> list[HashedPrompt]:
        """Token counts and block hashes of the prompts in a request's body; raises as `PromptProcessor.tokens_of` does.

        Args:
            path: Of the request.
            body: Of the request.
            extra: What forks the hashes.
            most: Characters that the tokenizer may be asked to read of a text; `Unremembered` is raised where it would be more,
                and for prompts of which nothing is remembered as text. None: there is no limit.
        """
        if body.get("truncate_prompt_tokens") is not None:  # what is kept begins elsewhere each time
            if most is not None:
                raise Unremembered
            return [self._ids(ids, extra) for ids in self.processor.tokens_of(path, body)]
        if images := self.processor.images_of(path, body):
            if most is not None:
                raise Unremembered
            [ids] = self.processor.tokens_of(path, body)
            return [self._with_images(path, ids, images, extra)]
        given = self.processor.prompts_of(path, body)
        prompts = [
            self._text(prompt, extra, most) if isinstance(prompt, TextPrompt) else self._ids(prompt, extra) for prompt in given
        ]
        refuse_empty(path, [prompt.tokens for prompt in prompts])
        return prompts

    def _text(self, prompt: TextPrompt, extra: ExtraKeys, most: int | None) -> HashedPrompt:
        text, special, param = prompt
        self.processor.check_length(text, param)
        alone = special and self._wrap is None
        before, after = self._wrap if special and self._wrap is not None else ([], [])
        pieces = [text] if alone else self._cutter.pieces(text)
        # Half of a surrogate pair, which is no text, is refused when it comes to be tokenised.
        encoded = [piece.encode(errors="surrogatepass") for piece in pieces]
        keys = _keys(b"text" + bytes([special]), extra, encoded)
        if after:  # the piece that ends the prompt is another than the same piece in the middle of one
            keys[-1] = hashlib.sha256(b"end" + keys[-1]).digest()
        nodes = self._known(keys)
        if len(nodes) < len(pieces):
            ids = self._encode(pieces[len(nodes) :], alone=alone, param=param, most=most)
            if not nodes:
                ids[0] = before + ids[0]
            ids[-1] += after
            nodes += self._add(keys[len(nodes) :], self._chained(nodes, ids, extra))
        return self._joined(nodes)

    def _encode(self, texts: list[str], *, alone: bool, param: str, most: int | None) -> list[list[int]]:
        """The tokens of each of some texts; raises `PromptError`, and `Unremembered` where they have more than `most` characters.
        `alone`: the tokenizer itself adds special tokens, by a rule that is not known here."""
        if most is not None and sum(map(len, texts)) > most:
            raise Unremembered
        return self.processor.encode_pieces(texts, alone, param)

    def _with_images(self, path: str, ids: list[int], images: Sequence[ImagePart], extra: ExtraKeys) -> HashedPrompt:
        """The content of an image that has yet to be fetched is not known, and with it nothing that follows."""
        rules = self.processor.bundle.images
        assert rules is not None, "images in a prompt for a model that reads text alone"
        found: list[tuple[str, ImageCounts]] = []
        for part in images:
            data = read_data_url(part.url, part.param) if part.url.startswith(SCHEME) else None
            of = rules.sized(part.size)
            counts = None if data is None else of.counts_of(data)
            found.append(("", of.usual) if data is None or counts is None else (part.name(data), counts))
        placed = self.processor.place(path, ids, [(name, counts.tokens) for name, counts in found])
        known = next((item.start for item in placed.items if not item.identifier), len(placed.token_ids))
        items = tuple(item for item in placed.items if item.start < known)
        hashed = self._ids(placed.token_ids[:known], msgspec.structs.replace(extra, items=items))
        runs: dict[str, tuple[int, int]] = {}  # one for equal images
        for at, (item, (_, counts)) in enumerate(zip(placed.items, found, strict=True)):
            runs[item.identifier or str(at)] = item.start + item.length, counts.cost
        return hashed._replace(tokens=len(placed.token_ids), images=tuple(runs.values()))

    def _ids(self, ids: list[int], extra: ExtraKeys) -> HashedPrompt:
        pieces = [ids[start : start + IDS_PIECE] for start in range(0, len(ids), IDS_PIECE)]
        keys = _keys(b"ids", extra, (array("I", piece).tobytes() for piece in pieces))
        nodes = self._known(keys)
        nodes += self._add(keys[len(nodes) :], self._chained(nodes, pieces[len(nodes) :], extra))
        return self._joined(nodes)

    def _joined(self, nodes: list[Node]) -> HashedPrompt:
        return HashedPrompt(nodes[-1].tokens if nodes else 0, _unpacked(b"".join([node.hashes for node in nodes])))

    def _known(self, keys: Sequence[bytes]) -> list[Node]:
        """The longest remembered run from the beginning."""
        nodes: list[Node] = []
        with self._lock:
            for key in keys:
                node = self._nodes.get(key)
                if node is None:
                    break
                self._nodes.move_to_end(key)
                nodes.append(node)
        return nodes

    def _chained(self, known: list[Node], pieces: Sequence[Sequence[int]], extra: ExtraKeys) -> list[Node]:
        """The nodes of pieces in tokens, which follow `known`."""
        size = self._hasher.block_size
        tokens, parent, tail = (known[-1].tokens, known[-1].parent, known[-1].tail) if known else (0, None, ())
        added: list[Node] = []
        for piece in pieces:
            todo = (*tail, *piece)
            hashes = self._hasher.chain(parent, todo, extra, tokens - len(tail))
            tokens += len(piece)
            parent = hashes[-1] if hashes else parent
            tail = todo[len(hashes) * size :]
            added.append(Node(tokens, b"".join(hashes), parent, tail))
        return added

    def _add(self, keys: Sequence[bytes], added: list[Node]) -> list[Node]:
        """Remembers `added` by their names."""
        with self._lock:
            for key, node in zip(keys, added, strict=True):
                if key not in self._nodes:
                    self._nodes[key] = node
                    self.bytes += NODE_BYTES + len(node.hashes)
            while self.bytes > self._max_bytes:
                _, oldest = self._nodes.popitem(last=False)
                self.bytes -= NODE_BYTES + len(oldest.hashes)
        return added


def _keys(kind: bytes, extra: ExtraKeys, pieces: Iterable[bytes]) -> list[bytes]:
    """The names of the pieces, each with all that stands before it."""
    key = hashlib.sha256(kind + msgspec.msgpack.encode(extra)).digest()
    keys: list[bytes] = []
    for piece in pieces:
        key = hashlib.sha256(key + piece).digest()
        keys.append(key)
    return keys


def _unpacked(hashes: bytes) -> Sequence[bytes]:
    """The names of blocks, which are concatenated in `hashes`."""
    blocks = struct.Struct(f"{DIGEST_BYTES}s" * (len(hashes) // DIGEST_BYTES))  # a third of the price of slices; not kept
    return blocks.unpack(hashes)


def _special_ids(post: dict[str, Any] | None) -> tuple[list[int], list[int]] | None:
    """The special tokens that go before and after a text; None where that is not known."""
    match post:
        case None | {"type": "ByteLevel"}:
            return [], []
        case {"type": "Sequence", "processors": [*steps]}:
            before: list[int] = []
            after: list[int] = []
            for step in steps:
                if (wrap := _special_ids(step)) is None:
                    return None
                before, after = wrap[0] + before, after + wrap[1]
            return before, after
        case {"type": "TemplateProcessing", "single": [*parts], "special_tokens": dict(known)}:
            sides: tuple[list[int], list[int]] = ([], [])
            texts = 0
            for part in parts:
                if "Sequence" in part:
                    texts += 1
                else:
                    sides[min(texts, 1)].extend(known[part["SpecialToken"]["id"]]["ids"])
            return sides if texts == 1 else None
        case _:
            return None
