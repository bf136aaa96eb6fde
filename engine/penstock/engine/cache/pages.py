"""What a page is called elsewhere: two descriptions go with every page that leaves a rank's cache.

The identity says what the bytes mean, and must be equal at both ends: with other weights or another dtype the same tokens have
other keys and values. The geometry says where the bytes are. Two ends may differ in it; `copies` is the map between them.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from penstock.engine.cache.layout import KVLayer, KVLayout


class PageIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal where a page is written and where it is read."""

    commit: str
    """Commit of the model's weights."""
    quantization: str
    """Method by which the weights are packed, and "" for none: their products are other numbers."""
    kv_dtypes: str
    """Dtypes of all planes; see `kv_dtypes`."""
    scales: str
    """Digest of the scales with which keys and values are quantized; "" where there are none or they lie in the page."""
    images: str = ""
    """How images are prepared, on which their embeddings depend besides the file; "" where the model reads text alone."""

    def differences(self, other: "PageIdentity") -> list[str]:
        """Why a page of one end must not be read at the other, each a clause; none where it may."""
        fields = ((name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)
        return [f"{name} {here!r} is not {there!r}" for name, here, there in fields if here != there]


class PageGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """Where a page's bytes are on one rank."""

    layers: tuple[KVLayer, ...]
    """Sizes are the rank's."""
    layout: KVLayout
    part: int = 0
    parts: int = 1
    """Of each page: ranks with the same heads, or the same latent, have the same part."""

    def span(self, block: int, group: int) -> range:
        """Bytes of the rank's part of a block where pages lie one after the other and the parts of each side by side."""
        return self.layout.span(block, group, self.part, self.parts)


class Piece(msgspec.Struct, frozen=True):
    """A plane of one layer in a page, in bytes from the beginning of the rank's part of it."""

    layer: int
    plane: str
    begin: int
    size: int


def pieces(geometry: PageGeometry, group: int) -> list[Piece]:
    """What a block of a group holds, in the order of its bytes; padding is left out."""
    found: list[Piece] = []
    of = geometry.layout.groups[group]
    for slot, layer in enumerate(of.layers):
        kept, begin = geometry.layers[layer], slot * geometry.layout.slot_bytes
        for plane, offset in zip(kept.planes, kept.offsets(of.block_size), strict=False):
            found.append(Piece(layer, plane.name, begin + offset, plane.nbytes(of.block_size)))
    return found


def overlapping(part: int, parts: int, others: int) -> range:
    """The parts that have some of the heads of one part, where the same heads are cut into so many others."""
    return range(part * others // parts, -(-(part + 1) * others // parts))


def copies(source: PageGeometry, group: int, target: PageGeometry) -> Iterator[tuple[int, Piece, Piece]]:
    """How a block of a group is copied into pages of another geometry: (the target's group, from, to) for each plane, or for keys
    and values of each head that both ends have where they cut the heads differently.

    Raises:
        ValueError: The two ends have no head in common, or keep another number of tokens in a block of some layer.
    """
    if source.part not in overlapping(target.part, target.parts, source.parts):
        raise ValueError(f"part {source.part} of {source.parts} has other heads than part {target.part} of {target.parts}")
    placed = {
        (piece.layer, piece.plane): (number, piece)
        for number in range(len(target.layout.groups))
        for piece in pieces(target, number)
    }
    for piece in pieces(source, group):
        number, place = placed.get((piece.layer, piece.plane), (-1, piece))
        if number >= 0 and place.size == piece.size:
            yield number, piece, place
        elif number >= 0 and place.size * target.parts == piece.size * source.parts:
            yield from ((number, *pair) for pair in _common(source, piece, target, place))
        else:
            raise ValueError(f"layer {piece.layer} keeps {piece.plane!r} of another size or none at the other end")


def _common(source: PageGeometry, piece: Piece, target: PageGeometry, place: Piece) -> Iterator[tuple[Piece, Piece]]:
    """Keys, and then values, of each head that is in both parts of a plane."""
    here, there = (next(it for it in of.layers[piece.layer].planes if it.name == piece.plane) for of in (source, target))
    each = piece.size // (2 * here.shape[1])
    first, begin = source.part * here.shape[1], target.part * there.shape[1]
    for head in range(max(first, begin), min(first + here.shape[1], begin + there.shape[1])):
        for half in range(2):
            row, place_row = half * here.shape[1] + head - first, half * there.shape[1] + head - begin
            yield (
                Piece(piece.layer, piece.plane, piece.begin + row * each, each),
                Piece(piece.layer, piece.plane, place.begin + place_row * each, each),
            )


def kv_dtypes(layers: Sequence[KVLayer]) -> str:
    """Names and dtypes of all planes, layer by layer; equal neighbours stand there once, with their number."""
    kinds = [" ".join(f"{plane.name}:{plane.dtype}" for plane in layer.planes) for layer in layers]
    return ", ".join(f"{len(list(same))} x {kind}" for kind, same in groupby(kinds))
