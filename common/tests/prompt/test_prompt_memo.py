"""What is remembered of a prompt's beginning gives the tokens and hashes of the whole, for real tokenizers of every kind."""

import json
import random
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from penstock.prompt import cuts
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.cuts import Cutter
from penstock.prompt.errors import PromptError
from penstock.prompt.hashing import BlockHasher, ExtraKeys
from penstock.prompt.memo import NODE_BYTES, HashedPrompt, PrefixMemo, Unremembered
from penstock.prompt.processor import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH, PromptProcessor

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA3.replace("{1,3}", "")
MARKS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{MARKS[0]}*{MARKS[1]}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{MARKS[0]}+{MARKS[1]}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"""
    r"|\s+(?!\S)|\s+",
]
SPECIAL = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"]
WORDS = (
    "the river turns wheel don't we'll I'D naïve 2024 7 1234567 état München река 水车。河，轮 かな 한국어 "
    "e\u0301te\u0301 x=y() </b> 🙂 \u200d"
)
PARTS = [
    *(word for word in WORDS.split()),
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        " \n ",
        "\t",
        "\r\n",
        "。",
        "，",
        ".",
        "'",
        "'s",
        "'l",
        "\u0301",
        "\u3099",
        "か\u3099",
        " '",
        "\u3000",
        "　 ",
    ),
    *SPECIAL,
    *("<|", "<|us", "er|>", "|>", "<mask>", "hello world", "\n\n\n", "end"),
]
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level(before: pre_tokenizers.PreTokenizer, normalizer: Any = None, added: tuple[AddedToken, ...] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = before
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return trained(tokenizer, trainers.BpeTrainer, added, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def trained(tokenizer: Tokenizer, trainer: Any, added: tuple[AddedToken, ...] = (), **more: Any) -> Tokenizer:
    chance = random.Random(0)
    corpus = ["".join(chance.choice(PARTS) for _ in range(30)) for _ in range(60)]
    tokenizer.train_from_iterator(
        corpus, trainer(vocab_size=600, special_tokens=[*SPECIAL, "<unk>"], show_progress=False, **more)
    )
    tokenizer.add_tokens(list(added))
    return tokenizer


def sentencepiece(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return trained(tokenizer, trainers.BpeTrainer)


def wrapped(tokenizer: Tokenizer, single: str) -> Tokenizer:
    ids = [(name, tokenizer.token_to_id(name)) for name in SPECIAL[:2]]
    template = processors.TemplateProcessing(single=single, special_tokens=ids)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


@cache
def tokenizers() -> dict[str, Tokenizer]:
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["?", *SPECIAL, *WORDS.split()])}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(SPECIAL)
    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.normalizer = normalizers.NFKC()
    llama2 = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    llama2.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    looking = AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)
    runs = tuple(AddedToken("\n" * n, normalized=False) for n in (2, 3))
    return {
        "gpt2": byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), added=(looking,)),
        "gpt2+bos": wrapped(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)), "<|bos|> $A"),
        "llama3": wrapped(byte_level(split(LLAMA3)), "<|bos|> $A"),
        "qwen": byte_level(split(QWEN), normalizers.NFC()),
        "o200k": byte_level(split(O200K), added=runs),
        "tekken+both": wrapped(byte_level(split(TEKKEN)), "<|bos|> $A <|end|>"),
        "deepseek": byte_level(split(*DEEPSEEK)),
        "phrases": byte_level(split(QWEN), added=(AddedToken("hello world"), AddedToken("end", rstrip=True, normalized=False))),
        "single words": byte_level(split(QWEN), added=(AddedToken("end", single_word=True, normalized=False),)),
        "prefix space": byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "metaspace first": sentencepiece("first"),
        "metaspace always": sentencepiece("always"),
        "llama2": trained(llama2, trainers.BpeTrainer),
        "unigram": trained(unigram, trainers.UnigramTrainer, unk_token="<unk>"),
        "words": words,
    }


CUT = {"gpt2", "gpt2+bos", "llama3", "qwen", "o200k", "tekken+both", "deepseek", "words"}
KINDS = list(tokenizers())
texts = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)


def bundle_of(tokenizer: Tokenizer) -> PromptBundle:
    return PromptBundle(
        served_names=("tiny",),
        tokenizer=tokenizer.to_str(),
        chat_template=TEMPLATE,
        special_tokens={"bos_token": "<|bos|>"},
        block_size=4,
        hash_seed="s",
        max_model_len=4096,
    )


@cache
def processor_of(kind: str) -> PromptProcessor:
    return PromptProcessor(bundle_of(tokenizers()[kind]))


@cache
def cutter_of(kind: str) -> Cutter:
    return Cutter(processor_of(kind).bundle.tokenizer)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "MIN_PIECE", 2)


def plain(processor: PromptProcessor, path: str, body: dict[str, Any], extra: ExtraKeys) -> list[HashedPrompt]:
    hasher = BlockHasher(processor.bundle.block_size, processor.bundle.hash_seed)
    return [HashedPrompt(len(tokens), tuple(hasher.hash(tokens, extra))) for tokens in processor.tokens_of(path, body)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(text=texts, more=texts)
@pytest.mark.req("RT-22")
def test_the_pieces_tokens_are_those_of_the_whole(kind: str, text: str, more: str) -> None:
    processor, cutter = processor_of(kind), cutter_of(kind)
    pieces = cutter.pieces(text)
    assert "".join(pieces) == text
    whole = processor.encode_pieces([text], False, "prompt")[0]
    assert [token for ids in processor.encode_pieces(pieces, False, "prompt") for token in ids] == whole
    assert cutter.pieces(text + more)[: len(pieces) - 1] == pieces[:-1]


@pytest.mark.parametrize("kind", KINDS)
def test_which_tokenizers_texts_are_cut_between_words(kind: str) -> None:
    text = "the river turns the wheel " * 5
    assert (len(cutter_of(kind).pieces(text)) > 1) == (kind in CUT)
    chat = "<|user|>" + text + "<|end|>" + text
    assert (len(cutter_of(kind).pieces(chat)) > 1) == (kind != "single words")


turns = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), texts), min_size=1, max_size=5)
extras = st.builds(
    ExtraKeys, lora=st.sampled_from([None, "sql"]), cache_salt=st.sampled_from([None, "s"]), tenant=st.sampled_from(["", "t"])
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(
    conversation=turns,
    extra=extras,
    other=extras,
    room=st.sampled_from([0, 3 * NODE_BYTES, 10**6]),
    special=st.sampled_from([None, True, False]),
)
@pytest.mark.req("RT-20", "RT-22", "RT-39")
def test_a_growing_conversation_is_hashed_as_if_nothing_were_remembered(
    kind: str, conversation: list[tuple[str, str]], extra: ExtraKeys, other: ExtraKeys, room: int, special: bool | None
) -> None:
    processor = processor_of(kind)
    memo = PrefixMemo(processor, max_bytes=room)
    for end in range(1, len(conversation) + 1):
        messages = [{"role": role, "content": content} for role, content in conversation[:end]]
        chat: dict[str, Any] = {"messages": messages, "add_special_tokens": special}
        text = "x" + "".join(content for _, content in conversation[:end])
        bodies: list[tuple[str, dict[str, Any]]] = [
            (CHAT_PATH, chat),
            (COMPLETIONS_PATH, {"prompt": text, "add_special_tokens": special}),
            (COMPLETIONS_PATH, {"prompt": [text[:9], text, text[: 1 + len(text) // 2]]}),
            (RESPONSES_PATH, {"input": messages, "tools": [{"type": "function", "name": "turn"}]}),
        ]
        for path, body in bodies:
            for keys in (extra, other):
                assert memo.hashed(path, body, keys) == plain(processor, path, body, keys)
        assert memo.bytes <= room


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 599), min_size=1, max_size=40), min_size=1, max_size=4), extras)
def test_token_ids_are_hashed_as_they_are(prompts: list[list[int]], extra: ExtraKeys) -> None:
    processor = processor_of("llama3")
    memo = PrefixMemo(processor)
    for body in ({"prompt": prompts}, {"prompt": prompts[0]}, {"prompt": [ids + prompts[0] for ids in prompts]}):
        if all(token < processor.vocab_size for ids in prompts for token in ids):
            assert memo.hashed(COMPLETIONS_PATH, body, extra) == plain(processor, COMPLETIONS_PATH, body, extra)


@pytest.mark.req("RT-42")
def test_the_next_turn_tokenises_its_new_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "MIN_PIECE", 64)
    processor = processor_of("qwen")
    memo, counts = PrefixMemo(processor), list[int]()
    encode_pieces = processor.encode_pieces

    def counted(*arguments: Any) -> list[list[int]]:
        pieces = encode_pieces(*arguments)
        counts.append(sum(map(len, pieces)))
        return pieces

    monkeypatch.setattr(processor, "encode_pieces", counted)
    messages = [{"role": "user", "content": "the river turns the wheel " * 100}]
    [first] = memo.hashed(CHAT_PATH, {"messages": messages}, ExtraKeys())
    assert counts == [first.tokens]
    messages += [{"role": "assistant", "content": "and so it does"}, {"role": "user", "content": "why?"}]
    [second] = memo.hashed(CHAT_PATH, {"messages": messages}, ExtraKeys())
    new = second.tokens - first.tokens
    assert new <= counts[1] <= new + 40  # the new tokens, and what is left of the last piece
    memo.hashed(CHAT_PATH, {"messages": messages}, ExtraKeys(tenant="other"))
    assert counts[2:] == [second.tokens]  # nothing is shared between those who share no cache


def test_only_so_much_is_read_at_once() -> None:
    processor = processor_of("qwen")
    memo = PrefixMemo(processor)
    text = "the river turns the wheel " * 400
    with pytest.raises(Unremembered):
        memo.hashed(COMPLETIONS_PATH, {"prompt": text}, ExtraKeys(), len(text) - 1)
    whole = memo.hashed(COMPLETIONS_PATH, {"prompt": text}, ExtraKeys(), len(text))
    assert memo.hashed(COMPLETIONS_PATH, {"prompt": text}, ExtraKeys(), 0) == whole, "what is remembered is not read"
    for unread in ({"prompt": text, "truncate_prompt_tokens": 8}, {"prompt": text + "and turns"}):
        with pytest.raises(Unremembered):
            memo.hashed(COMPLETIONS_PATH, unread, ExtraKeys(), 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS_PATH, {"prompt": ""}),
        (COMPLETIONS_PATH, {"prompt": []}),
        (COMPLETIONS_PATH, {"prompt": "half of a pair: \ud800"}),
        (COMPLETIONS_PATH, {"prompt": ["fine", "the river \udfff turns"]}),
        (COMPLETIONS_PATH, {"prompt": [10**6]}),
        (COMPLETIONS_PATH, {"prompt": "x" * 10**6}),
        (CHAT_PATH, {"messages": [{"role": "user"}]}),
        (RESPONSES_PATH, {"input": [{"role": "nobody", "content": "x"}]}),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused_in_the_same_words(path: str, body: dict[str, Any]) -> None:
    processor = processor_of("qwen")
    with pytest.raises(PromptError) as plainly:
        processor.tokens_of(path, body)
    with pytest.raises(PromptError) as memoised:
        PrefixMemo(processor).hashed(path, body, ExtraKeys())
    assert (str(memoised.value), memoised.value.param, memoised.value.code) == (
        str(plainly.value),
        plainly.value.param,
        plainly.value.code,
    )


def test_memory_is_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "MIN_PIECE", 2048)
    memo = PrefixMemo(processor_of("qwen"), max_bytes=200_000)
    prompts = ["".join(random.Random(n).choices("the river turns ", k=8_000)) for n in range(40)]
    tracemalloc.start()
    for prompt in prompts:
        memo.hashed(COMPLETIONS_PATH, {"prompt": prompt}, ExtraKeys())
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 180_000 < memo.bytes <= 200_000
    assert taken < 1.2 * memo.bytes


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"type": "BPE", "dropout": 0.1}, "added_tokens": [{"content": "<|a|>", "normalized": False}]},
        {"model": {"type": "BPE"}, "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\w+|\s+"}, "behavior": "Isolated"}},
        {"model": {"type": "Unigram"}, "pre_tokenizer": {"type": "Whitespace"}},
        {
            "model": {"type": "BPE"},
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                    {"type": "Whitespace"},
                ],
            },
        },
        {"model": {"type": "BPE"}},
        {
            "model": {"type": "BPE"},
            "normalizer": {"type": "Lowercase"},
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        },
    ],
    ids=str,
)
def test_what_is_not_proven_is_not_cut(spec: dict[str, Any]) -> None:
    text = "the river turns <|a|> the wheel " * 1000
    assert Cutter(json.dumps(spec)).pieces(text) == [text]


def test_tokens_that_run_into_each_other_are_no_places_for_cuts() -> None:
    tokenizer = byte_level(split(LLAMA3), added=(AddedToken("<|a<|b", normalized=False), AddedToken("<|b|>", normalized=False)))
    cutter = Cutter(tokenizer.to_str())
    assert cutter._tokens is not None
    assert not cutter._tokens.search("<|b|>")
    assert cutter._tokens.search("<|a<|b")


def test_which_tokens_texts_may_be_cut_after() -> None:
    added = [AddedToken(name, normalized=False) for name in ("<|a|>x", "<|a|>")]
    added += [AddedToken("<|b|>", rstrip=True, normalized=False), AddedToken("<|c|>", lstrip=True, normalized=False)]
    cutter = Cutter(byte_level(split(LLAMA3), added=tuple(added)).to_str())
    assert {"<|a|>x", "<|end|>"} <= set(cutter.apart)
    assert not {"<|a|>", "<|b|>", "<|c|>"} & set(cutter.apart)


def test_the_demo_models_tokenizer_is_cut() -> None:
    folder = Path(__file__).parents[3] / "examples" / "models" / "penstock-tiny"
    cutter = Cutter((folder / "tokenizer.json").read_text())
    assert cutter._words
    assert cutter._tokens is not None
