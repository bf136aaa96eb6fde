"""How a model's layers share one pool of equal pages.

Layers that see the same keys form groups of equally many layers; a page holds one block of every layer of one group, and any page
serves any group. A group has block tables of its own, so that pages outside a window can be given back without touching the
layers that see everything.

          slot 0    slot 1
 page 7  layer 0 │ layer 2     a block of group 0: full attention
 page 8  layer 1 │ layer 3     a block of group 1: a window
"""

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from penstock.engine.config import ConfigError


class KVLayer(msgspec.Struct, frozen=True, kw_only=True):
    """What one attention layer keeps of a token; sizes are the rank's."""

    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    window: int | None = None
    """Tokens that a query sees, itself included; None: all before it."""

    @property
    def bytes_per_token(self) -> int:
        """Of a key and a value in each head."""
        return 2 * self.num_kv_heads * self.head_size * self.dtype_bytes


class KVGroup(msgspec.Struct, frozen=True):
    """Layers with one block table. Group 0 sees everything where any layer does."""

    layers: tuple[int, ...]
    """In the order of their slots in a page."""
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
    """Of a block of one layer."""

    @property
    def num_slots(self) -> int:
        """Layers in a page; a group with fewer leaves the last slots unused."""
        return max(len(group.layers) for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """Of one block of any group."""
        return self.num_slots * self.slot_bytes

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
        block_size: Tokens in a block of the layers that keep most of a token; the blocks of others hold as many times more as
            makes their bytes equal.

    Raises:
        ConfigError: There is no such whole number.
    """
    largest = max(layer.bytes_per_token for layer in layers)
    kinds: dict[tuple[int, int], list[int]] = {}
    for index, layer in enumerate(layers):
        if largest % layer.bytes_per_token:
            raise ConfigError(
                f"layer {index} keeps {layer.bytes_per_token} bytes of a token and another one {largest}: pages of equal size "
                "need the one to be a multiple of the other"
            )
        kinds.setdefault((layer.window or 0, largest // layer.bytes_per_token), []).append(index)
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    slots = most if 4 * most <= 5 * fewest else fewest
    groups = [
        KVGroup(tuple(members[first : first + slots]), block_size * factor, window or None)
        for (window, factor), members in sorted(kinds.items())
        for first in range(0, len(members), slots)
    ]
    return KVLayout(tuple(groups), largest * block_size)
