"""What the demo model is asked for."""

import inspect
import itertools
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

MODEL = Path(__file__).parents[2] / "examples/models/penstock-tiny"
MODULES = ("json", "os.path", "itertools", "functools", "collections", "re", "math", "random", "shutil", "statistics", "textwrap")
BOS, EOS = "<|bos|>", "<|eot|>"
CODE_TOKENS = 192


def questions() -> Iterator[str]:
    """A question about each public function of some modules, for ever."""
    phrasings = ("What does {} do?", "Explain {}.", "Tell me about {}.", "{}", "How do I use {}?", "Describe {} please.")
    names = [
        f"{name}.{member}"
        for name in MODULES
        for member, value in inspect.getmembers(import_module(name))
        if not member.startswith("_") and callable(value)
    ]
    for phrasing in itertools.cycle(phrasings):
        for name in names:
            yield phrasing.format(name)


def prompts(count: int, source: Iterator[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The next questions as the model's chat template has them."""
    asked = (next(source) for _ in range(count))
    return [tokenizer.encode(f"{BOS}<|user|>{text}{EOS}<|assistant|>", add_special_tokens=False).ids for text in asked]


def code(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The beginnings of Python modules, each cut in the middle of a line or wherever it falls, for ever."""
    texts = [inspect.getsource(import_module(name)) for name in ("json.decoder", *MODULES[2:]) if _has_source(name)]
    known = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    for start in itertools.count(0, CODE_TOKENS):
        for ids in known:
            if len(part := ids[start % max(len(ids) - CODE_TOKENS, 1) :][:CODE_TOKENS]) == CODE_TOKENS:
                yield part


def _has_source(name: str) -> bool:
    return str(getattr(import_module(name), "__file__", "")).endswith(".py")


def random_text(seed: int, vocab_size: int, length: int = 64) -> Iterator[list[int]]:
    """Prompts of random tokens that are not special, for ever."""
    rng = np.random.default_rng(seed)
    while True:
        yield rng.integers(16, vocab_size, length).tolist()
