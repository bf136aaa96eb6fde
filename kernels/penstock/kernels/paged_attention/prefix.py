"""When and how the requests of a step of decodes read a prefix that all of them share once, instead of once each (cascade)."""

from dataclasses import dataclass, replace

import torch

from penstock.kernels.paged_attention.launch import AttentionShape, Launch, fast_launches

SHARED_STEP = 128
"""Tokens: a shared prefix is taken in multiples of them, so that it ends where a tile ends."""
LEAST_BYTES = 32 << 20
"""That a layer's programs read less at the least: about what the second cache of an H100 hands out while two kernels are
launched. No GPU has shown yet where the two ways meet."""


def saved_bytes(shape: AttentionShape, token_bytes: int, requests: int, shared: int) -> int:
    """How many bytes less a layer's programs read and write, if each tile of rows reads a prefix once, not each request.

    Args:
        shape: The heads.
        token_bytes: Of keys and values of a token, in this layer.
        requests: That share it.
        shared: Tokens of the prefix.
    """
    tiles = -(-requests // prefix_launch(shape, requests, shared).block_q)
    between = 2 * 4 * requests * shape.num_heads * (shape.head_size + 1)  # results in float32, written and read
    return (requests - tiles) * shared * token_bytes - between


def pays(shape: AttentionShape, token_bytes: int, requests: int, shared: int) -> bool:
    """Whether a step of decodes should read a shared prefix apart."""
    return saved_bytes(shape, token_bytes, requests, shared) >= LEAST_BYTES


def prefix_launch(shape: AttentionShape, requests: int, max_keys: int) -> Launch:
    """The launch over the prefix: the tiles and splits of one request that has as many queries."""
    return replace(fast_launches(shape, 1, requests, max_keys, requests)[-1], search=False, skip=0, pads=False)


@dataclass(frozen=True)
class PrefixWorkspace:
    """Where the launch over a prefix leaves what it finds, for all layers in turn."""

    values: torch.Tensor
    """[requests · heads, head_size] float32: results over the prefix alone."""
    lse: torch.Tensor
    """[requests · heads] float32: the base-2 logarithms of their sums."""
    parts: torch.Tensor
    """As `values`, by split."""
    parts_lse: torch.Tensor
    arrived: torch.Tensor
    """int32: how many of a tile's programs have left what they found; 0 before a launch, and after it."""

    @staticmethod
    def sized(shape: AttentionShape, max_num_seqs: int, max_keys: int, device: torch.device | str) -> "PrefixWorkspace":
        """Room for every step of up to so many requests."""
        steps = [(number, prefix_launch(shape, number, max_keys)) for number in range(1, max_num_seqs + 1)]
        split = [(number, launch) for number, launch in steps if launch.splits > 1]
        parts = max((number * launch.splits for number, launch in split), default=0)
        counters = max((-(-number // launch.block_q) for number, launch in split), default=0) * shape.num_kv_heads

        def floats(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        heads, size = shape.num_heads, shape.head_size
        return PrefixWorkspace(
            floats(max_num_seqs * heads, size),
            floats(max_num_seqs * heads),
            floats(parts * heads, size),
            floats(parts * heads),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )

    def check(self, shape: AttentionShape, requests: int, max_keys: int) -> None:
        """ValueError where it is too small for a step."""
        launch = prefix_launch(shape, requests, max_keys)
        parts = requests * launch.splits * (launch.splits > 1)
        counters = -(-requests // launch.block_q) * shape.num_kv_heads * (launch.splits > 1)
        found = len(self.lse), len(self.parts_lse), len(self.arrived)
        if any(
            room < size for room, size in zip(found, (requests * shape.num_heads, parts * shape.num_heads, counters), strict=True)
        ):
            raise ValueError(f"the workspace is too small for a prefix of {requests} requests")
