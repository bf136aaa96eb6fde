"""Chained block hashes."""

import hashlib
import os
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.prompt.hashing import BlockHasher, ExtraKeys, PromptItem

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


@pytest.mark.req("PC-04", "PC-05", "PC-07", "LIM-08")
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
            ExtraKeys(tenant="a"),
            ExtraKeys(tenant="b"),
            ExtraKeys(tenant="a", cache_salt="a"),
            ExtraKeys(tenant="b", cache_salt="a"),
        )
    ]
    chains.append(BlockHasher(4, "other").hash(ids))
    every = [block for chain in chains for block in chain]
    assert len(set(every)) == len(every)


@pytest.mark.req("PC-04", "PC-07")
def test_the_bytes_of_a_name_stay_the_same_between_versions() -> None:
    """During an upgrade, pickers and replicas of two versions name blocks for each other."""
    extra = ExtraKeys(lora="ad", cache_salt="salt", tenant="team", items=(PromptItem("cat", 3, 1),))
    root = hashlib.sha256(b"penstock/seed").digest()
    tokens = bytes.fromhex("0100000002000000")  # little-endian words
    lora = b"\x02\0\0\0ad"
    first = hashlib.sha256(root + tokens + lora + b"tenant\x04\0\0\0team" + b"salt" + b"salt").digest()
    image = b"item\x03\0\0\0cat" + bytes([1, 0, 0, 0, 0, 0, 0, 0])
    second = hashlib.sha256(first + bytes.fromhex("0300000004000000") + lora + image).digest()
    assert BlockHasher(2, "seed").hash([1, 2, 3, 4], extra) == [first, second]
    assert msgspec.to_builtins(extra) == ["ad", "salt", "team", (["cat", 3, 1],)], "and send the keys by position"


def shared(one: ExtraKeys, other: ExtraKeys) -> list[bool]:
    """Which of six blocks of four equal tokens have equal names."""
    hasher, ids = BlockHasher(4, "seed"), [7] * 24
    return [a == b for a, b in zip(hasher.hash(ids, one), hasher.hash(ids, other), strict=True)]


@pytest.mark.req("PC-04", "PC-06", "PC-08")
def test_what_stands_for_placeholder_tokens_is_part_of_their_blocks_names() -> None:
    """An image of ten tokens from position 6 on: in blocks 1 to 3, and in the names of all after it."""
    image = ExtraKeys(items=(PromptItem("cat", 6, 10),))
    assert shared(image, ExtraKeys(items=(PromptItem("cat", 6, 10),))) == [True] * 6
    assert shared(image, ExtraKeys()) == [True] + [False] * 5
    assert shared(image, ExtraKeys(items=(PromptItem("dog", 6, 10),))) == [True] + [False] * 5
    assert shared(image, ExtraKeys(items=(PromptItem("cat", 5, 10),))) == [True] + [False] * 5
    # The second of two does not reach back.
    two = ExtraKeys(items=(PromptItem("cat", 6, 10), PromptItem("dog", 16, 4)))
    assert shared(image, two) == [True] * 4 + [False] * 2
    # Embeddings instead of a prompt: an item from the first token on, named by their content.
    embedded = [ExtraKeys(items=(PromptItem(content, 0, 24),)) for content in ("a", "b")]
    assert shared(*embedded) == [False] * 6


@pytest.mark.req("PC-05", "LIM-08")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ExtraKeys(tenant="asaltb"), ExtraKeys(tenant="a", cache_salt="b")),
        (ExtraKeys(cache_salt="a"), ExtraKeys(tenant="a")),
        (ExtraKeys(tenant="a", cache_salt=""), ExtraKeys(tenant="asalt")),
        (ExtraKeys(tenant="ab", cache_salt="c"), ExtraKeys(tenant="a", cache_salt="bc")),
        (ExtraKeys(tenant="b", cache_salt="s"), ExtraKeys(cache_salt="tenantb")),
        (ExtraKeys(lora="tenant", tenant="a"), ExtraKeys(lora="tenanta")),
    ],
)
def test_a_tenant_cannot_choose_a_salt_that_reads_as_another_tenant(one: ExtraKeys, other: ExtraKeys) -> None:
    """The lengths of names are part of the hash. Otherwise one tenant could name, and so time, another tenant's blocks."""
    assert shared(one, other) == [False] * 6


items_of_a_block = st.lists(st.tuples(st.text(max_size=3), st.integers(0, 3)), max_size=2)


@given(items_of_a_block, st.none() | st.text(max_size=6), st.text(max_size=3))
def test_no_two_sets_of_keys_read_the_same(items, salt, lora) -> None:
    """A salt that looks like an item is none."""
    hasher = BlockHasher(4, "seed")

    def name(lora: str | None, salt: str | None, items: tuple[PromptItem, ...]) -> bytes:
        return hasher.hash([1] * 4, ExtraKeys(lora=lora, cache_salt=salt, items=items))[0]

    chosen = tuple(PromptItem(identifier, start, 1) for identifier, start in items)
    one = name(lora or None, salt, chosen)
    assert one == name(lora or None, salt, chosen)
    forged = "".join(f"item{identifier}" for identifier, _ in items)
    if items:
        assert one != name(lora or None, (salt or "") + forged, ())
        assert one != name((lora or "") + forged, salt, ())
    assert one != name((lora or "") + "x", salt, chosen)
    assert one != name(lora or None, (salt or "") + "x", chosen)


@pytest.mark.req("RT-21", "PC-03", "LIM-09")
@pytest.mark.parametrize("python_hash_seed", ["random", "0"])
def test_names_are_the_same_in_another_process(python_hash_seed) -> None:
    """Whatever Python's own seed is: nothing need be set for replicas to agree, and another seed of ours is another space."""
    code = "from penstock.prompt.hashing import BlockHasher; print(BlockHasher(4, 's').hash(range(8))[1].hex())"
    environment = os.environ | {"PYTHONHASHSEED": python_hash_seed}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    other = done.stdout.strip()
    assert other == BlockHasher(4, "s").hash(range(8))[1].hex() != BlockHasher(4, "t").hash(range(8))[1].hex()
