"""What is asked: prompts, and how many tokens are wanted in return. The same seed gives the same requests."""

import csv
import itertools
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from tokenizers import Tokenizer

from penstock.client.bench.images import NO_IMAGES, RandomImages
from penstock.client.bench.prompts import Prompt, Prompts

# vLLM's limits on a conversation, so that the same file gives the same load: tokens of the prompt, and of prompt and answer.
_MIN_TOKENS, _MAX_PROMPT, _MAX_TOTAL = 4, 1024, 2048


class DatasetError(ValueError):
    """A file that cannot be used, or lengths that make no sense."""


class Request(NamedTuple):
    """One request."""

    prompt: Prompt
    output_len: int
    """Tokens wanted."""
    images: tuple[str, ...] = ()
    """URLs of images that go with it."""


class Lengths(NamedTuple):
    """Lengths drawn uniformly from `mean` · (1 - ratio) to `mean` · (1 + ratio), whole and at least 1."""

    mean: int
    ratio: float

    def draw(self, rng: np.random.Generator) -> int:
        """One of them."""
        low, high = round(self.mean * (1 - self.ratio)), round(self.mean * (1 + self.ratio))
        return max(1, int(rng.integers(low, high, endpoint=True)))


def random_requests(
    prompts: Prompts,
    rng: np.random.Generator,
    inputs: Lengths,
    outputs: Lengths,
    prefix_len: int = 0,
    images: RandomImages = NO_IMAGES,
) -> Iterator[Request]:
    """Yield endless requests of random tokens, after `prefix_len` tokens that all prompts share, and of random images."""
    prefix = prompts.tokens(rng, prefix_len)
    while True:
        tokens = prefix + prompts.tokens(rng, inputs.draw(rng))
        yield Request(prompts.prompt(tokens, rng), outputs.draw(rng), images.draw(rng))


def prefix_requests(
    prompts: Prompts, rng: np.random.Generator, num_prefixes: int, prefix_len: int, suffix_len: int, output_len: int
) -> Iterator[Request]:
    """Yield endless requests, each one of `num_prefixes` shared prefixes and a suffix of its own. Each round of `num_prefixes`
    requests
    uses every prefix once, in random order."""
    prefixes = [prompts.tokens(rng, prefix_len) for _ in range(num_prefixes)]
    while True:
        for at in rng.permutation(num_prefixes):
            yield Request(prompts.prompt(prefixes[at] + prompts.tokens(rng, suffix_len), rng), output_len)


# --- conversations ---


def read_conversations(path: Path) -> list[tuple[str, str]]:
    """The first question and answer of each conversation in a JSON list of `{"conversations": [{"from", "value"}, …]}` (ShareGPT)
    or `{"messages": [{"role", "content"}, …]}` (OpenAI). Raises `DatasetError`."""
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
        return [pair for entry in entries if (pair := _first_turns(entry))]
    except (OSError, msgspec.MsgspecError, TypeError, AttributeError, KeyError) as error:
        raise DatasetError(f"{path} is no JSON list of conversations: {error}") from None


def _first_turns(entry: dict[str, Any]) -> tuple[str, str] | None:
    turns = entry.get("conversations") or [
        {"from": message["role"], "value": message["content"]} for message in entry.get("messages") or []
    ]
    said = [(turn["from"], turn["value"]) for turn in turns if turn["from"] != "system"]
    if len(said) < 2 or said[0][0] not in ("human", "user") or not all(isinstance(text, str) for _, text in said[:2]):
        return None
    return said[0][1], said[1][1]


def conversation_requests(
    turns: Iterable[tuple[str, str]], tokenizer: Tokenizer, rng: np.random.Generator, output_len: int | None
) -> list[Request]:
    """The questions in random order, each asking for as many tokens as its answer has, or `output_len`. Those that are very short
    or long are left out, by vLLM's limits."""
    requests: list[Request] = []
    for question, answer in turns:
        asked = len(tokenizer.encode(question, add_special_tokens=False).ids)
        wanted = output_len or len(tokenizer.encode(answer, add_special_tokens=False).ids)
        long_enough = asked >= _MIN_TOKENS and (output_len or wanted >= _MIN_TOKENS)
        if long_enough and asked <= _MAX_PROMPT and asked + wanted <= _MAX_TOTAL:
            requests.append(Request(question, wanted))
    return [requests[at] for at in rng.permutation(len(requests))]


# --- traces ---


class TraceRow(NamedTuple):
    """One request of a trace."""

    at: float
    """Seconds after the trace's first request."""
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    """One id for each block of the prompt; equal ids mean an equal prefix up to there. Empty: not known."""


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: _Count
    output_length: _Count
    hash_ids: list[_Count] = []


def read_trace(path: Path) -> list[TraceRow]:
    """A trace in Mooncake's form (JSON lines with timestamps in ms, lengths and hash ids) or Azure's (CSV with TIMESTAMP,
    ContextTokens and GeneratedTokens), by its suffix. Raises `DatasetError`."""
    try:
        text = path.read_text()
        rows = _azure_rows(text) if path.suffix == ".csv" else _mooncake_rows(text)
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{path} is no trace in Mooncake's or Azure's form: {error!r}") from None
    if not rows:
        raise DatasetError(f"{path} holds no request")
    rows.sort(key=lambda row: row.at)
    return [row._replace(at=row.at - rows[0].at) for row in rows]


def _mooncake_rows(text: str) -> list[TraceRow]:
    rows = [msgspec.json.decode(line, type=_MooncakeRow) for line in text.splitlines() if line.strip()]
    return [TraceRow(row.timestamp / 1000, row.input_length, row.output_length, tuple(row.hash_ids)) for row in rows]


def _azure_rows(text: str) -> list[TraceRow]:
    return [
        # Seven digits of a second's fraction, of which Python reads six.
        TraceRow(
            datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"])
        )
        for row in csv.DictReader(text.splitlines())
    ]


def trace_requests(
    rows: Iterable[TraceRow], prompts: Prompts, seed: int, block_size: int, length_scale: float = 1.0
) -> Iterator[Request]:
    """A trace's requests, made one by one: an hour of them would fill the memory.

    Args:
        rows: What to make.
        prompts: Fill the blocks: a block's tokens depend on its id and the seed alone. Without ids they are random.
        seed: Of the tokens.
        block_size: Prompt tokens that an id stands for.
        length_scale: Multiplies all lengths, block size included, so that what is shared stays shared.
    """
    size = max(1, round(block_size * length_scale))
    for number, row in enumerate(rows):
        rng = np.random.default_rng([seed, 1, number])
        count = max(1, round(row.input_len * length_scale))
        blocks = (prompts.tokens(np.random.default_rng([seed, 2, block]), size) for block in row.hash_ids)
        tokens = list(itertools.islice(itertools.chain.from_iterable(blocks), count))
        tokens += prompts.tokens(rng, count - len(tokens))
        yield Request(prompts.prompt(tokens, rng), max(1, round(row.output_len * length_scale)))
