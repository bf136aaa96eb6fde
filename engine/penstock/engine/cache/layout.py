"""How a model's layers share one pool of equal pages.

Layers that see the same keys form groups of equally many layers; a page holds one block of every layer of one group, and any page
serves any group. A group has block tables of its own, so that pages outside a window can be given back without touching the
layers that see everything.

          slot 0    slot 1
 page 7  layer 0 │ layer 2     a block of group 0: full attention
 page 8  layer 1 │ layer 3     a block of group 1: a window
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import msgspec

TOKENS = -1
"""In the shape of a plane: the number of tokens in a block."""
_ALIGNMENT = 16
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}


class Plane(msgspec.Struct, frozen=True):
    """One array of a layer's block: keys and values together, a latent, or the scales of either."""

    name: str
    dtype: str
    """Torch's name of the dtype."""
    shape: tuple[int, ...]
    """Shape in a block: with `TOKENS` if it has an entry for each token, without if it has one for the block."""

    def of(self, block_size: int) -> tuple[int, ...]:
        """Return its shape in blocks of that many tokens."""
        return tuple(block_size if size == TOKENS else size for size in self.shape)

    def nbytes(self, block_size: int) -> int:
        """Return its bytes in such a block."""
        return math.prod(self.of(block_size)) * _BYTES[self.dtype]


class KVLayer(msgspec.Struct, frozen=True, kw_only=True):
    """What one layer keeps in a block; sizes are the rank's."""

    planes: tuple[Plane, ...]
    window: int | None = None
    """Tokens that a query sees, itself included; None: all before it."""

    def offsets(self, block_size: int) -> list[int]:
        """Return where each plane begins in a block, and finally where the block ends: in bytes, aligned for every dtype."""
        sizes = [-(-plane.nbytes(block_size) // _ALIGNMENT) * _ALIGNMENT for plane in self.planes]
        return list(accumulate(sizes, initial=0))


def attention_plane(num_kv_heads: int, row_size: int, dtype: str) -> Plane:
    """Keys and values, in the form that attention kernels read; a row holds a head's of one token."""
    return Plane("kv", dtype, (2, num_kv_heads, TOKENS, row_size))


class KVGroup(msgspec.Struct, frozen=True):
    """Layers with one block table. Group 0 sees everything where any layer does."""

    layers: tuple[int, ...]
    """Layers in the order of their slots in a page."""
    block_size: int
    """Tokens in a page."""
    window: int | None

    def max_blocks(self, num_tokens: int, in_flight: int) -> int:
        """Blocks that a sequence holds at most on its way to `num_tokens`.

        Args:
            num_tokens: Its length.
            in_flight: Tokens of it at most that are planned and not yet retired. Blocks leave a window when steps retire.
        """
        blocks = -(-num_tokens // self.block_size)
        if self.window is None:
            return blocks
        return min(blocks, -(-(self.window - 1) // self.block_size) + -(-in_flight // self.block_size) + 1)


class KVLayout(msgspec.Struct, frozen=True):
    """The groups of a model and the page that all of them use."""

    groups: tuple[KVGroup, ...]
    slot_bytes: int
    """Bytes of a slot: a block of the layer that keeps most. The blocks of other layers are padded to it."""

    @property
    def num_slots(self) -> int:
        """Layers in a page; a group with fewer leaves the last slots unused."""
        return max(len(group.layers) for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of any group."""
        return self.num_slots * self.slot_bytes

    def span(self, block: int, group: int, part: int = 0, parts: int = 1) -> range:
        """Bytes of one part of a block, without unused slots. Pages lie one after the other, and in each all of its `parts`; a
        rank's own memory has one."""
        begin = (block * parts + part) * self.page_bytes
        return range(begin, begin + len(self.groups[group].layers) * self.slot_bytes)

    def part(self, layers: Collection[int]) -> "KVLayout":
        """The same groups with some of their layers: what a pipeline stage keeps. Block tables fit all stages."""
        own = (tuple(layer for layer in group.layers if layer in layers) for group in self.groups)
        groups = (KVGroup(mine, group.block_size, group.window) for mine, group in zip(own, self.groups, strict=True))
        return KVLayout(tuple(groups), self.slot_bytes)

    @property
    def layer_groups(self) -> list[int]:
        """Per layer, its group."""
        numbers = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        return [numbers[layer] for layer in range(len(numbers))]


def max_blocks(groups: Sequence[KVGroup], num_tokens: int, in_flight: int) -> int:
    """Blocks over all groups that a sequence holds at most on its way to `num_tokens`; see `KVGroup.max_blocks`."""
    return sum(group.max_blocks(num_tokens, in_flight) for group in groups)


def longest_sequence(groups: Sequence[KVGroup], num_blocks: int, in_flight: int, limit: int) -> int:
    """The longest sequence, up to `limit` tokens, that never holds more than `num_blocks`."""
    return bisect_right(range(1, limit + 1), num_blocks, key=lambda length: max_blocks(groups, length, in_flight))


def full_attention(block_size: int) -> tuple[KVGroup, ...]:
    """One group of one layer that sees everything: a cache's whole layout, as far as block tables go, for most models."""
    return (KVGroup((0,), block_size, None),)


def kv_layout(layers: Sequence[KVLayer], block_size: int) -> KVLayout:
    """Groups layers by what they see and keep.

    Groups are as large as the smallest kind of layer, so that few slots stay empty: 4 layers of full attention and 20 with a
    window become one group and five. Where one kind has hardly more layers than the other, so many slots cost less than twice
    the tables.

    Args:
        layers: In the model's order.
        block_size: Tokens in a block of the layers that keep most; the blocks of others hold as many times more as fit into the
            same bytes. What is left of a slot stays unused.
    """
    slot_bytes = max(layer.offsets(block_size)[-1] for layer in layers)
    kinds: dict[tuple[int, int], list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault((layer.window or 0, _times(layer, block_size, slot_bytes)), []).append(index)
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    slots = most if 4 * most <= 5 * fewest or _fits_all(kinds, most, fewest) else fewest
    groups = [
        KVGroup(tuple(members[first : first + slots]), block_size * times, window or None)
        for (window, times), members in sorted(kinds.items())
        for first in range(0, len(members), slots)
    ]
    return KVLayout(tuple(groups), slot_bytes)


def _fits_all(kinds: Mapping[tuple[int, int], Sequence[int]], most: int, fewest: int) -> bool:
    """Whether a group for each kind takes no more bytes a token than smaller groups; what is in a window goes by other rules. A
    model and its draft model are such kinds."""

    def size(slots: int) -> float:
        return sum(-(-len(members) // slots) * slots / times for (_, times), members in kinds.items())

    return not any(window for window, _ in kinds) and size(most) <= size(fewest)


def _times(layer: KVLayer, block_size: int, slot_bytes: int) -> int:
    """How many times `block_size` tokens of a layer fit into a slot; once where it keeps the same of any number of tokens."""
    times = 1
    if any(TOKENS in plane.shape for plane in layer.planes):
        while layer.offsets(block_size * (times + 1))[-1] <= slot_bytes:
            times += 1
    return times
