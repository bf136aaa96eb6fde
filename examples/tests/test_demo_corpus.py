"""What the demo models are trained on: legible answers, rows of exact length, and no measured phrasing among the trained ones."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def corpus():
    """The script beside the models, which is not part of any package."""
    spec = importlib.util.spec_from_file_location("demo_corpus", Path(__file__).parents[1] / "models" / "corpus.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("doc", "prose"),
    [
        ("S.lower() -> str\n\nReturn a copy.  Nothing\nmore.", "Return a copy. Nothing more."),
        ("D.rotate(n) -- rotate the deque", "Rotate the deque."),
        ("string, format -> new datetime parsed from a string", "New datetime parsed from a string."),
        ("Deserialize ``s`` to a Python object.\n\nMore about it.", "Deserialize s to a Python object."),
        ("See :func:`os.stat` for details", "See os.stat for details."),
        (">>> f(1)\n2", ""),
        ("Too short", ""),
    ],
)
def test_first_paragraph_is_legible_prose(corpus, doc, prose):
    assert corpus.first_paragraph(doc) == prose


def test_answers_are_whole_sentences_that_fit(corpus):
    known = corpus.entries()
    assert len({entry.name for entry in known}) == len(known) > 500
    for entry in known:
        prose = entry.answer.removeprefix(f"{entry.name}: ")
        assert prose[-1] in ".!?"
        assert len(prose) <= corpus.MAX_ANSWER_CHARS + 2
    assert corpus.Entry("functools.lru_cache", "functools.lru_cache: Least-recently-used cache decorator.") in known


def test_the_measured_phrasings_are_not_trained(corpus):
    assert not set(corpus.HELD_OUT_PHRASINGS) & set(corpus.PHRASINGS)


def test_a_row_has_the_length_asked_for_and_learns_answers_only(corpus):
    # Characters stand for tokens, so that the row can be read back.
    special = {token: token for token in corpus.SPECIAL_TOKENS}
    drawn = corpus.Corpus(corpus.entries(), list, special)
    for seed in range(20):
        ids, learned = drawn.row(random.Random(seed), 700)
        assert len(ids) == len(learned) == 700
        assert (ids, learned) == drawn.row(random.Random(seed), 700)
        if corpus.USER in ids:
            answering = False
            for token, learn in zip(ids, learned, strict=True):
                assert learn == answering
                answering = (answering or token == corpus.ASSISTANT) and token != corpus.EOT


def test_a_short_name_is_used_only_where_it_means_one_thing(corpus):
    known = [corpus.Entry(name, name) for name in ("json.loads", "json.load", "pickle.load", "open", "os.open")]
    assert corpus.spellings(known) == [("loads", known[0])]
