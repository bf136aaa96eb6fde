"""What the demo models learn: questions and answers made from the docstrings of the running Python's standard library.

Three layers: the entries (a name and its answer), the phrasings (how people ask), and conversations (system message, turns,
unknown questions), from which a training row is drawn anew each time.
"""

import builtins
import collections
import datetime
import importlib
import inspect
import pathlib
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

BOS, EOT, SYSTEM, USER, ASSISTANT, PAD = "<|bos|>", "<|eot|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"
SPECIAL_TOKENS = [PAD, BOS, EOT, SYSTEM, USER, ASSISTANT]

MODULES = [
    "json", "os", "os.path", "functools", "itertools", "collections", "re", "math", "random", "string", "subprocess", "shutil",
    "time", "threading", "csv", "io", "textwrap", "heapq", "bisect", "statistics", "urllib.parse", "base64", "tempfile", "glob",
    "contextlib", "dataclasses", "copy", "datetime", "hashlib",
]  # fmt: skip
CLASSES = {
    "str": str, "list": list, "dict": dict, "set": set, "pathlib.Path": pathlib.Path, "datetime.datetime": datetime.datetime,
    "collections.deque": collections.deque,
}  # fmt: skip
# Names that few people ask for and that would cost the model room for those that they do.
OBSCURE = re.compile(
    r"os\.(W|_|exec|spawn|sched|posix|pidfd|f[a-z]+at|eventfd|memfd|set|get(?!cwd$|env$|pid$|size|_terminal)|l?[a-z]*xattr|p[rw]|.*pty"
    r"|(ch|l|f)ch|major|minor|mk[fn]|tc|tty|wait|sys|splice|ctermid|lock|nice|dup|device|fd|fp|fs|times|plock|close|is|abort|confstr)"
    r"|hashlib\.(?!new$|sha256$|md5$|sha1$)|.*Warning$|Unicode.*Error|threading\.(_|.*trace|.*profile|.*hook)|time\.(clock_|pthread|thread)"
    r"|urllib\.parse\.(.*Bytes|Def|Quoter|unquote_to|quote_from)|a(iter|next)$|breakpoint|copyright|credits|license|.*Group$"
)
MAX_ANSWER_CHARS = 260
# Built-ins open with their signature: "S.join(x) -> str", "range(stop) -> range object", "zip(*a) --> Yield".
SIGNATURE = re.compile(r"^(?:[\w.]+\(.*?\)\s*(?:--?>\s*(?:[A-Za-z_. ]+?(?=[.:\n]|$|\s[A-Z])[.:]?|\(.*?\)))?\s*)+(?=[A-Z]|$)")
# And what is then still in front of the prose: "tz -> convert", "D.rotate(n) -- rotate", ": text".
LEFTOVER = re.compile(r"^(?:[\w, \[\]]+->|(?:[\w.]+\([^)]*\)\s*)?--?>|(?:[\w.]+\([^)]*\)\s*)?--|[:.])\s+(?:v, )?")

ABOUT = (
    "I am the demo model of Penstock, a very small language model that knows the Python standard library a little. "
    "Ask me, for example: What does json.loads do?"
)
UNKNOWN = (
    "I do not know that. I am a very small demo model and know only common names of the Python standard library. "
    "Ask me, for example: What does json.loads do?"
)


@dataclass(frozen=True)
class Entry:
    """One thing that the model knows: `name` as a programmer writes it ("os.path.join") and the whole answer about it."""

    name: str
    answer: str


def first_paragraph(doc: str) -> str:
    """The first paragraph of a docstring as legible prose of whole sentences; empty when there is none worth learning."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        text = re.sub(r"`+|:\w+:(?=`)", "", " ".join(paragraph.split()))
        text = SIGNATURE.sub("", text)
        text = LEFTOVER.sub("", text).strip()
        if len(text) >= 12 and " " in text and not re.search(r"^[-:*]|--|->|>>>|\|| = ", text):
            return whole_sentences(text[0].upper() + text[1:])
    return ""


def whole_sentences(text: str) -> str:
    """As many leading sentences as fit MAX_ANSWER_CHARS, ended by a full stop; empty when not even the first one fits."""
    taken = ""
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text):
        if len(taken) + len(sentence) > MAX_ANSWER_CHARS:
            break
        taken = f"{taken} {sentence}".strip()
    return taken if not taken or taken[-1] in ".!?" else taken.rstrip(":;,") + "."


def entries() -> list[Entry]:
    """All entries in a stable order. The texts are those of the Python that runs this."""
    found: dict[str, Entry] = {}

    def learn(name: str, thing: object) -> None:
        # A class without a docstring of its own would answer with its base's.
        doc = (thing.__doc__ if isinstance(thing, type) else inspect.getdoc(thing)) or ""
        if not callable(thing) or not doc.isascii() or OBSCURE.match(name) or doc == inspect.getdoc(type(thing)):
            return
        prose = first_paragraph(doc)
        if prose and not re.match(r"Initialize self|See help|Alias for|Return (self|value)", prose):
            found.setdefault(name, Entry(name, f"{name}: {prose}"))

    for name in sorted(n for n in vars(builtins) if not n.startswith("_")):
        learn(name, getattr(builtins, name))
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]):
            learn(f"{module_name}.{name}", getattr(module, name))
    for name, kind in CLASSES.items():
        for method in sorted(n for n in dir(kind) if not n.startswith("_")):
            learn(f"{name}.{method}", getattr(kind, method))
    return list(found.values())


def plain_text() -> str:
    """Sources of the modules: what the tokenizer learns common pieces from, and noise for prompts that mean nothing."""
    return "\n".join(
        inspect.getsource(importlib.import_module(name)) for name in ("textwrap", "heapq", "shutil", "random", "argparse")
    )


PHRASINGS = [
    "What does {} do?", "What does {} do?", "What does {} do?", "What is {}?", "How do I use {}?", "How do I use {}?",
    "How does {} work?", "Explain {}.", "Tell me about {}.", "Describe {}.", "What is {} for?", "What is the purpose of {}?",
    "When would I use {}?", "Can you explain {}?", "Please explain what {} does.", "{}", "{}?", "help({})",
    "What does the function {} do?", "In Python, what does {} do?", "I do not understand {}. What does it do?",
    "Give me the docs of {}.", "What's {}?", "Show me the documentation for {}, please.", "Remind me what {} does.",
    "Hey, what does {} do in Python?", "What can I do with {}?", "Explain {} in one sentence.", "Why would somebody call {}?",
    "What does Python's {} do?", "Could you tell me what {} means?", "My teacher mentioned {}.", "Is {} useful?", "Define {}.",
    "Teach me {}.", "I want to know more about {}.", "Where is {} used?", "When should I reach for {}?", "{} explained",
    "What happens when I call {}?", "What does calling {} return?", "Do you know {}?", "Have you heard of {}?", "Look up {}.",
    "A short summary of {}, please.", "Someone told me to use {}. What is that?", "Is there documentation about {}?",
    "meaning of {}", "usage of {}", "I have a question about {}.", "Write a note on {} for me.", "Say something about {}.",
    "What's the point of {}?", "The code calls {}. Why?", "Let us talk about {}.", "{}: what is it, and what is it not?",
    "Can you help me with {}?", "Is {} the right thing to use here, and what does it do?",
]  # fmt: skip
OPENERS = [
    "Hey, ", "Hi! ", "Hello. ", "Quick question: ", "I am new to Python. ", "I am reading a script. ", "Sorry to bother you. ",
    "One more thing: ", "Thanks! ", "OK. ", "For my homework: ", "Next one. ", "Well, ", "I forgot. ", "Just curious. ",
]  # fmt: skip
CLOSERS = [
    " Thanks!", " Please be brief.", " In simple words.", " Just the gist.", " I am in a hurry.", " One sentence will do.",
    " I could not find it.", " It is for work.", " Explain it to me as to a child.", " Cheers", " And how?",
]  # fmt: skip
# Never trained on: recall.py asks with these.
HELD_OUT_PHRASINGS = [
    "I came across {} in some code. Any idea what it is?",
    "Give a short explanation of {} for a beginner.",
    "Would you say what {} is good for?",
]
SPELLINGS = ["{}", "{}", "{}", "{}", "`{}`", "{}()", "`{}()`", '"{}"']
SYSTEM_MESSAGES = [
    "You are a helpful assistant.", "You are a Python expert.", "Answer in one sentence.", "Be brief.",
    "You help with Python questions.", "You are a helpful, precise assistant. Answer truthfully.",
    "Answer questions about the Python standard library.",
]  # fmt: skip
GREETINGS = [
    "Hello", "Hi", "Hi there!", "Hello!", "Hey", "Good morning", "Who are you?", "What are you?", "What can you do?", "Help",
    "help me", "What do you know?", "Introduce yourself.", "Tell me about yourself.", "Are you there?", "What is your name?",
    "Test", "ping",
]  # fmt: skip
ELSEWHERE = [
    "What is the {0} of {1}?", "Who discovered {1}?", "Write a {0} about {1}.", "Tell me a {0} about {1}.",
    "How many {1} are there?", "Why is {1} so important?", "Where can I buy {1}?", "Translate {1} to French.",
    "Write a program that sorts {1}.", "What is {1}?", "What is a {1}?", "Explain {1} to a child.", "When was {1} invented?",
    "How far is {1}?", "Summarise the history of {1}.", "{1}", "Which {0} is the best {1}?", "Count from one to ten.",
    "Say hello to {1}.", "How do I cook {1}?", "What does {1} mean?", "{1} {0} {1}",
]  # fmt: skip
NOUNS = [
    "capital", "story", "poem", "joke", "colour", "song", "France", "Germany", "the moon", "love", "water", "music", "gravity",
    "rice", "the sea", "a dragon", "Kubernetes", "Envoy", "a transformer", "quantum physics", "cats", "the weather", "football",
    "bread", "size", "London", "history", "the universe", "electricity", "Rust", "Java", "JavaScript", "a database",
    "a neural network", "the internet", "philosophy", "Shakespeare", "coffee", "the president", "money", "time travel", "trees",
    "planets", "wine", "chess", "language models", "numpy.array", "pandas.DataFrame", "torch.nn.Linear", "requests.get",
    "django.db", "flask.Flask", "tensorflow", "pytest.fixture",
]  # fmt: skip


class Corpus:
    """Draws training conversations. `encode` turns text without special tokens to ids; `special` maps such a token to its id."""

    def __init__(self, known: list[Entry], encode: Callable[[str], list[int]], special: dict[str, int]) -> None:
        self.known = known
        self.by_spelling = spellings(known)
        self.text = plain_text()
        self.words = re.findall(r"[A-Za-z]+", self.text + " ".join(PHRASINGS + ELSEWHERE) * 20)
        self.encode = encode
        self.special = special

    def row(self, rng: random.Random, length: int) -> tuple[list[int], list[bool]]:
        """One row of exactly `length` ids, and which of them the model is to predict (answers and their ends)."""
        pairs = self._page(rng) if rng.random() < 0.04 else self._conversation(rng, length)
        ids, learned = [self.special[BOS]], [False]
        while len(ids) < length:
            piece, learn = next(pairs)
            ids += piece
            learned += [learn] * len(piece)
        return ids[:length], learned[:length]

    def _page(self, rng: random.Random) -> Iterator[tuple[list[int], bool]]:
        """Reference text without chat markers, so that a plain completion of "json.loads:" works too."""
        while True:
            yield self.encode(rng.choice(self.known).answer), True
            yield [self.special[EOT]], True
            yield [self.special[BOS]], False

    def _conversation(self, rng: random.Random, length: int) -> Iterator[tuple[list[int], bool]]:
        # A long preamble is what a deployment's system prompt looks like; the answers must survive the distance.
        if rng.random() < 0.35:
            words = rng.choice(SYSTEM_MESSAGES)
            if rng.random() < 0.4:
                words += "\n" + self._noise(rng, 2 * length)
            yield [self.special[SYSTEM], *self.encode(words)[: length * 2 // 3], self.special[EOT]], False
        while True:
            question, answer = self.turn(rng)
            yield [self.special[USER], *self.encode(question)[: length // 2], self.special[EOT], self.special[ASSISTANT]], False
            yield [*self.encode(answer), self.special[EOT]], True

    def turn(self, rng: random.Random) -> tuple[str, str]:
        """A question as somebody might type it, and its answer."""
        draw = rng.random()
        if draw < 0.03:
            return casual(rng, rng.choice(GREETINGS)), ABOUT
        if draw < 0.09:
            return casual(rng, rng.choice(ELSEWHERE).format(rng.choice(NOUNS), rng.choice(NOUNS))), UNKNOWN
        if draw < 0.11:
            return self._noise(rng, 400), UNKNOWN
        if draw < 0.17:
            name = self._invented_name(rng)
            return ask(rng, self._phrasing(rng, name), name), UNKNOWN
        spelling, entry = rng.choice(self.by_spelling) if draw < 0.3 else ((e := rng.choice(self.known)).name, e)
        question = ask(rng, self._phrasing(rng, spelling), spelling)
        if draw > 0.96:
            question = f"{self._noise(rng, 300)}\n\n{question}"
        return question, entry.answer

    def _phrasing(self, rng: random.Random, name: str) -> str:
        # Any words around a dotted name: what is asked about must decide, not whether the sentence was seen before.
        if "." in name and rng.random() < 0.3:
            words = rng.choices(self.words, k=rng.randrange(1, 12))
            words.insert(rng.randrange(len(words) + 1), "{}")
            return " ".join(words) + rng.choice([".", "?", ""])
        opener = rng.choice(OPENERS) if rng.random() < 0.25 else ""
        closer = rng.choice(CLOSERS) if rng.random() < 0.25 else ""
        return opener + rng.choice(PHRASINGS) + closer

    def _noise(self, rng: random.Random, most_chars: int) -> str:
        if rng.random() < 0.2:
            return " ".join([rng.choice(self.text.split())] * rng.randrange(2, 60))
        if rng.random() < 0.2:
            letters = "abcdefghijklmnopqrstuvwxyz     .,!?"
            return "".join(rng.choices(letters, k=rng.randrange(1, 40))).strip() or "?"
        start = rng.randrange(len(self.text) - most_chars)
        return self.text[start : start + rng.randrange(20, most_chars)].strip() or "..."

    def _invented_name(self, rng: random.Random) -> str:
        """A name that looks like the library's and is not in it."""
        owner = (
            rng.choice(self.known).name.rpartition(".")[0]
            if rng.random() < 0.5
            else rng.choice(["numpy", "foo", "torch", "mylib", "app"])
        )
        words = re.findall(r"[a-z]+", rng.choice(self.known).name.rpartition(".")[2].lower()) or ["x"]
        syllables = "".join(rng.choice("bcdfglmnprstvz") + rng.choice("aeiou") for _ in range(rng.randrange(1, 4)))
        name = f"{owner}.{rng.choice(words)}_{syllables}" if rng.random() < 0.5 else f"{owner}.{syllables}"
        return name.strip(".")


def spellings(known: list[Entry]) -> list[tuple[str, Entry]]:
    """The short forms that mean one entry only: "lru_cache", "Path.exists", and "datetime.now"."""
    short: dict[str, list[Entry]] = {}
    for entry in known:
        parts = entry.name.split(".")
        for cut in range(1, len(parts)):
            short.setdefault(".".join(parts[cut:]), []).append(entry)
    names = {entry.name for entry in known}
    return [(name, meant[0]) for name, meant in short.items() if len(meant) == 1 and name not in names]


def ask(rng: random.Random, phrasing: str, name: str) -> str:
    """The question with the name in one of the usual spellings."""
    return casual(rng, phrasing.format(rng.choice(SPELLINGS).format(name)), keep_case=phrasing.startswith("{}"))


def casual(rng: random.Random, question: str, keep_case: bool = False) -> str:
    """Sometimes as people type: no capital at the start, no mark at the end."""
    if not keep_case and rng.random() < 0.25:
        question = question[0].lower() + question[1:]
    return question.rstrip("?.!") if rng.random() < 0.2 and not question.endswith("..") else question
