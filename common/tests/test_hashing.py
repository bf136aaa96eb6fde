"""Chained block hashes."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.prompt.hashing import BlockHasher, ExtraKeys

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=70)


@pytest.mark.req("PC-01")
@given(tokens, st.integers(1, 16))
def test_only_full_blocks_are_hashed_and_a_hash_holds_its_whole_prefix(ids: list[int], size: int) -> None:
    hasher = BlockHasher(size, "seed")
    hashes = hasher.hash(ids)
    assert len(hashes) == len(ids) // size
    if hashes:
        changed = hasher.hash([ids[0] ^ 1, *ids[1:]])
        assert not set(changed) & set(hashes)


@pytest.mark.req("PC-02")
@given(tokens, tokens)
def test_extending_equals_hashing_at_once(first: list[int], second: list[int]) -> None:
    hasher = BlockHasher(4, "seed")
    hashes = hasher.hash(first)
    before = list(hashes)
    hasher.extend(hashes, first + second, ExtraKeys())
    assert hashes == hasher.hash(first + second)
    assert hashes[: len(before)] == before


@pytest.mark.req("PC-04", "PC-05", "PC-07")
def test_extra_keys_fork_the_chain() -> None:
    hasher, ids = BlockHasher(4, "seed"), list(range(12))
    chains = [
        hasher.hash(ids, extra)
        for extra in (
            ExtraKeys(),
            ExtraKeys(lora="a"),
            ExtraKeys(lora="b"),
            ExtraKeys(cache_salt="a"),
            ExtraKeys(lora="a", cache_salt="a"),
            ExtraKeys(cache_salt=""),
        )
    ]
    chains.append(BlockHasher(4, "other").hash(ids))
    every = [block for chain in chains for block in chain]
    assert len(set(every)) == len(every)


@pytest.mark.req("RT-21")
def test_names_are_the_same_in_another_process() -> None:
    code = "from penstock.prompt.hashing import BlockHasher; print(BlockHasher(4, 's').hash(range(8))[1].hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == BlockHasher(4, "s").hash(range(8))[1].hex()
