"""Prompts of each request's own: pieces of this repository's pages, and the tokenizer that reads them."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.prompt.bundle import PromptBundle

ROOT = Path(__file__).parents[2]
FILLER = b"#"
"""Stands for a prompt that is a request's own."""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
STEP = 7919


def chat_body(content: str) -> bytes:
    """The body of a chat completion."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 16}).encode()


DISTINCT = {"2 kB": chat_body(FILLER.decode() * 1_900), "16 kB": chat_body(FILLER.decode() * 16_000)}
"""Bodies by their names, with `FILLER` in place of the prompt."""


def pages() -> bytes:
    """This repository's pages, as they stand in a string of JSON; what is not ASCII is left out."""
    texts = [page.read_text().encode("ascii", "ignore").decode() for page in sorted((ROOT / "docs").rglob("*.md"))]
    return json.dumps("\n".join(texts)).encode()[1:-1]


def own_prompt(texts: bytes, number: int, size: int) -> bytes:
    """So many bytes of `texts`, others for each number."""
    at = number * STEP % (len(texts) - 2 * size)
    while texts[at - 1 : at] == b"\\" or texts[at + size - 1 : at + size] == b"\\":  # no half of an escape
        at += 1
    return texts[at : at + size]


def checkpoint() -> PromptBundle:
    """The tokenizer of the example's checkpoint."""
    folder = ROOT / "examples" / "models" / "penstock-tiny"
    of = PromptBundle.from_checkpoint(folder, served_names=("m",), block_size=16, hash_seed="bench", max_model_len=65_536)
    return msgspec.structs.replace(of, chat_template=TEMPLATE) if of.chat_template is None else of


def requests(name: str) -> Iterator[bytes]:
    """HTTP requests without end, each with a prompt of its own in the body of `DISTINCT` that is called so."""
    texts, body = pages(), DISTINCT[name]
    filler = FILLER * body.count(FILLER)
    before, _, after = body.partition(filler)
    fields = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    begins = f"POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\n".encode() + before
    for number in itertools.count():
        yield begins + own_prompt(texts, number, len(filler)) + after
