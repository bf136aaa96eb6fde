"""Chained block hashes: the name of a KV block holds its tokens and its whole prefix, so equal names mean equal KV.

Engine and picker must agree to the bit. SHA-256 over packed little-endian u32 is collision-safe between tenants at 0.5 µs a
block.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence

import msgspec

DIGEST_BYTES = 32


class PromptItem(msgspec.Struct, frozen=True, array_like=True):
    """Something other than text that stands where the prompt has placeholder tokens: an image, or embeddings."""

    identifier: str
    """Of its content: equal ones mean equal embeddings."""
    start: int
    """Position of its first token."""
    length: int
    """Tokens."""


class ExtraKeys(msgspec.Struct, frozen=True, array_like=True):
    """What forks a chain besides its tokens."""

    lora: str | None = None
    """Adapter name: in every block, so that no KV is shared between adapters."""
    cache_salt: str | None = None
    """In the first block only, which forks the whole chain after it."""
    tenant: str = ""
    """In the first block too: nobody can tell by the time to the first token what another tenant has sent."""
    items: tuple[PromptItem, ...] = ()
    """In every block that they reach into, with where they begin as seen from there."""


def root_hash(seed: str) -> bytes:
    """The parent of every first block. Replicas of one revision share the seed, so that the picker can compare them."""
    return hashlib.sha256(b"penstock/" + seed.encode()).digest()


class BlockHasher:
    """Hashes the full blocks of token sequences.

    Args:
        block_size: Tokens in a block.
        seed: Names the hash space; equal in an engine and in the picker in front of it.
    """

    def __init__(self, block_size: int, seed: str) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        self.block_size = block_size
        self.root = root_hash(seed)

    def extend(self, hashes: list[bytes], tokens: Sequence[int], extra: ExtraKeys) -> None:
        """Appends the hashes of the full blocks of `tokens` that `hashes` does not cover yet (earlier blocks are not hashed
        again)."""
        size = self.block_size
        lora = extra.lora.encode() if extra.lora is not None else b""
        parent = hashes[-1] if hashes else self.root
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            packed = array("I", tokens[start : start + size])
            if sys.byteorder == "big":
                packed.byteswap()
            block = hashlib.sha256(parent)
            block.update(packed)
            # Length-prefixed, and after the tokens, whose length is fixed: no two sets of keys read the same.
            block.update(len(lora).to_bytes(4, "little") + lora)
            for item in extra.items:
                if item.start < start + size and item.start + item.length > start:
                    name = item.identifier.encode()
                    block.update(b"item" + len(name).to_bytes(4, "little") + name)
                    block.update((item.start - start).to_bytes(8, "little", signed=True))
            if start == 0 and extra.tenant:
                tenant = extra.tenant.encode()
                block.update(b"tenant" + len(tenant).to_bytes(4, "little") + tenant)
            if start == 0 and extra.cache_salt is not None:
                block.update(b"salt" + extra.cache_salt.encode())
            parent = block.digest()
            hashes.append(parent)

    def hash(self, tokens: Sequence[int], extra: ExtraKeys | None = None) -> list[bytes]:
        """The hashes of all full blocks of `tokens`."""
        hashes: list[bytes] = []
        self.extend(hashes, tokens, extra or ExtraKeys())
        return hashes
