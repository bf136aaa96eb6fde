"""The compiled hashes of blocks against Python's, to the bit."""

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.gateway.load.compiled_hasher import CompiledHasher, CompiledMemo
from penstock.gateway.load.prompts import PromptLibrary
from penstock.gateway.load.tokenized import guessed_tokens
from penstock.gateway.picker.compiled import MODULE, installed
from penstock.gateway.picker.state import FleetState
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.hashing import BlockHasher, ExtraKeys, PromptItem
from penstock.prompt.memo import PrefixMemo

pytest.importorskip(MODULE, reason="penstock-gateway-native is not built: make native")
names = st.text(max_size=4)
keys = st.builds(
    ExtraKeys,
    lora=st.none() | names,
    cache_salt=st.none() | names,
    tenant=names,
    items=st.lists(st.builds(PromptItem, names, st.integers(0, 20), st.integers(1, 20)), max_size=1).map(tuple),
)


def bundle(block_size: int) -> PromptBundle:
    return PromptBundle(
        served_names=("m",), tokenizer="", chat_template=None, special_tokens={}, block_size=block_size, hash_seed="s",
        max_model_len=100,
    )  # fmt: skip


def hashers(block_size: int) -> tuple[BlockHasher, BlockHasher]:
    compiled = installed()
    assert compiled is not None
    return BlockHasher(block_size, "s"), CompiledHasher(bundle(block_size), compiled)


@given(st.integers(1, 20), st.lists(st.integers(0, 2**32 - 1), max_size=70), keys, st.integers(0, 70))
def test_chains_are_the_same(block_size: int, tokens: list[int], extra: ExtraKeys, cut: int) -> None:
    cut -= cut % block_size
    chains = []
    for hasher in hashers(block_size):
        whole, begun = hasher.hash(tokens, extra), hasher.chain(None, tuple(tokens[:cut]), extra, 0)
        start = len(begun) * block_size
        assert whole == begun + hasher.chain(begun[-1] if begun else None, tokens[start:], extra, start)
        chains.append(whole)
    assert chains[0] == chains[1]


def test_blocks_without_tokens_are_refused() -> None:
    compiled = installed()
    assert compiled is not None
    with pytest.raises(ValueError, match="a block has no tokens"):
        compiled.chain(b"", array("I", [1]), 0, b"", b"")
    assert compiled.chain(b"", array("I", [1]), 16, b"", b"") == []


def test_the_library_of_a_gateway_hashes_so() -> None:
    tokenizer = Tokenizer(models.WordLevel({"w": 0}, unk_token="w"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    of = msgspec.structs.replace(bundle(2), tokenizer=tokenizer.to_str())
    for compiled, kind in ((installed(), CompiledMemo), (None, PrefixMemo)):
        memo = PromptLibrary(FleetState(compiled=compiled))._memo_of(of)
        assert type(memo) is kind
        [prompt] = memo.hashed("/v1/completions", {"prompt": "w w"}, ExtraKeys())
        assert prompt.block_hashes == tuple(BlockHasher(2, "s").hash([0, 0]))


@given(st.lists(st.sampled_from([b'"data:', b'"', b" ", b"data:", b"A" * 40, b'\\"', b"\xff:", b'""data:']), max_size=12))
def test_text_is_told_from_files_alike(parts: list[bytes]) -> None:
    body = b"".join(parts)
    assert guessed_tokens(body, installed()) == guessed_tokens(body)
