"""Prompts of the lengths asked for, shared where they should be, the same for the same seed."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from penstock.client.bench.datasets import (
    DatasetError,
    Lengths,
    conversation_requests,
    prefix_requests,
    random_requests,
    read_conversations,
    read_trace,
    trace_requests,
)
from penstock.client.bench.prompts import Prompts

TINY = Path(__file__).parents[2] / "examples/models/penstock-tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> Prompts:
    return Prompts(tokenizer, as_text=False)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.req("MET-12")
def test_random_lengths_are_uniform_in_the_range_asked_for(prompts: Prompts) -> None:
    requests = list(itertools.islice(random_requests(prompts, rng(), Lengths(100, 0.5), Lengths(20, 0.25)), 4000))
    inputs, outputs = [len(one.prompt) for one in requests], [one.output_len for one in requests]
    assert (min(inputs), max(inputs)) == (50, 150)
    assert (min(outputs), max(outputs)) == (15, 25)
    assert np.mean(inputs) == pytest.approx(100, rel=0.02)
    counts = np.histogram(inputs, bins=4, range=(49.5, 150.5))[0]
    assert counts.min() > 900


@pytest.mark.req("MET-12")
@pytest.mark.parametrize("as_text", [False, True])
def test_a_seed_fixes_the_requests(tokenizer: Tokenizer, as_text: bool) -> None:
    def some(seed: int) -> list:
        source = random_requests(Prompts(tokenizer, as_text), rng(seed), Lengths(30, 0.5), Lengths(9, 0.5))
        return list(itertools.islice(source, 5))

    assert some(1) == some(1) != some(2)


def test_random_tokens_are_ordinary_ones(tokenizer: Tokenizer, prompts: Prompts) -> None:
    tokens = prompts.tokens(rng(), 20_000)
    assert not set(tokens) & set(tokenizer.get_added_tokens_decoder())
    assert len(set(tokens)) > 3000
    assert "\N{REPLACEMENT CHARACTER}" not in tokenizer.decode(tokens)


def test_text_has_the_length_asked_for(tokenizer: Tokenizer) -> None:
    prompts, numbers = Prompts(tokenizer, as_text=True), rng()
    texts = [prompts.prompt(prompts.tokens(numbers, 100), numbers) for _ in range(50)]
    sizes = [len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
    assert sizes.count(100) >= 45 and all(abs(size - 100) <= 3 for size in sizes)


def test_a_prefix_of_all_comes_before_the_rest(prompts: Prompts) -> None:
    one, two = itertools.islice(random_requests(prompts, rng(), Lengths(10, 0), Lengths(1, 0), prefix_len=6), 2)
    assert one.prompt[:6] == two.prompt[:6] and one.prompt[6:] != two.prompt[6:]
    assert len(one.prompt) == 16


def test_each_prefix_comes_once_in_every_round(prompts: Prompts) -> None:
    source = prefix_requests(prompts, rng(), num_prefixes=5, prefix_len=12, suffix_len=4, output_len=3)
    requests = list(itertools.islice(source, 15))
    heads = [tuple(one.prompt[:12]) for one in requests]
    assert all(len(set(heads[at : at + 5])) == 5 for at in (0, 5, 10)) and len(set(heads)) == 5
    assert len({tuple(one.prompt[12:]) for one in requests}) == 15
    assert {(len(one.prompt), one.output_len) for one in requests} == {(16, 3)}


# --- conversations ---


def talk(question: str, answer: str) -> dict:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


@pytest.mark.req("MET-12")
def test_conversations_are_replayed_with_the_lengths_of_their_answers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    messages = [{"role": role, "content": f"the {role} says this much"} for role in ("system", "user", "assistant")]
    entries = [
        talk("what does json.loads do?", "it deserializes a string"),
        talk("hi", "you"),
        talk(" ".join(["json"] * 3000), "this is too long"),
        {"messages": messages},
        {"conversations": [{"from": "gpt", "value": "answers first"}, {"from": "human", "value": "asks then"}]},
        {"id": 1},
    ]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(entries))
    turns = read_conversations(path)
    assert len(turns) == 4
    requests = conversation_requests(turns, tokenizer, rng(), None)
    assert {one.prompt: one.output_len for one in requests} == {
        question: len(tokenizer.encode(answer, add_special_tokens=False).ids) for question, answer in (turns[0], turns[3])
    }
    assert {one.output_len for one in conversation_requests(turns, tokenizer, rng(), 77)} == {77}


def test_a_seed_fixes_the_order_of_conversations(tokenizer: Tokenizer) -> None:
    turns = [(f"question number {number} of many", f"answer number {number} of many") for number in range(30)]
    assert conversation_requests(turns, tokenizer, rng(1), None) == conversation_requests(turns, tokenizer, rng(1), None)
    assert conversation_requests(turns, tokenizer, rng(1), None) != conversation_requests(turns, tokenizer, rng(2), None)


@pytest.mark.parametrize("content", ["{}", "[1]", "no JSON", '[{"conversations": [{"value": "x"}]}]'])
def test_what_is_no_list_of_conversations_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(DatasetError, match=r"bad\.json"):
        read_conversations(path)


# --- traces ---

MOONCAKE = """\
{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 1000, "input_length": 1024, "output_length": 50, "hash_ids": [7, 8]}
{"timestamp": 1500, "input_length": 600, "output_length": 500, "hash_ids": [7, 10]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.2319600,31,8
"""


def test_a_mooncake_trace_shares_what_its_ids_share(prompts: Prompts, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    rows = read_trace(path)
    assert [row.at for row in rows] == [0.0, 0.5, 2.0]
    first, second, third = trace_requests(rows, prompts, seed=0, block_size=512)
    assert [len(one.prompt) for one in (first, second, third)] == [1024, 600, 1100]
    assert [one.output_len for one in (first, second, third)] == [50, 500, 5]
    assert third.prompt[:1024] == first.prompt
    assert second.prompt[:512] == first.prompt[:512] and second.prompt[512:] != first.prompt[512:600]


def test_a_trace_shrinks_with_what_it_shares(prompts: Prompts, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    first, second, third = trace_requests(read_trace(path), prompts, seed=0, block_size=512, length_scale=0.125)
    assert [len(one.prompt) for one in (first, second, third)] == [128, 75, 138]
    assert [one.output_len for one in (first, second, third)] == [6, 62, 1]
    assert third.prompt[:128] == first.prompt and second.prompt[:64] == first.prompt[:64]


def test_an_azure_trace_has_times_and_lengths(prompts: Prompts, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    rows = read_trace(path)
    assert [row.at for row in rows] == pytest.approx([0.0, 1.252])
    first, second = trace_requests(rows, prompts, seed=0, block_size=512)
    assert (len(first.prompt), first.output_len, len(second.prompt), second.output_len) == (4808, 10, 31, 8)
    assert second.prompt != first.prompt[:31]
    assert list(trace_requests(rows, prompts, seed=0, block_size=512)) == [first, second]


BAD_TRACES = [
    ("a.jsonl", "{}"),
    ("a.csv", "time,length\n1,2\n"),
    ("a.jsonl", ""),
    ("a.csv", ""),
    ("a.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [-1]}'),
    ("a.jsonl", '{"timestamp": 0, "input_length": -5, "output_length": 3}'),
]


@pytest.mark.parametrize(("name", "content"), BAD_TRACES)
def test_what_is_no_trace_is_refused(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DatasetError, match=name):
        read_trace(path)
