"""What is known of the engine that a replica runs, besides its load."""

import msgspec

from penstock.api.fleet import Engine

FOREIGN_SEED = "foreign"
"""The hash space of engines whose own hashes we cannot compute: prompts and events are hashed alike, by us."""
BLOCK_SIZE = 16
"""Tokens, where an engine has not said."""


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one replica."""

    engine: Engine
    """`auto` until the engine is known."""
    block_size: int = BLOCK_SIZE
    """Tokens in a KV block."""
    num_blocks: int = 0
    """KV blocks in all; 0: unknown."""
