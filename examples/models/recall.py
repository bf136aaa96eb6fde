"""Measures what a demo model remembers, with phrasings that training never used, and prints a table.

    python examples/models/recall.py examples/models/penstock-tiny

"verbatim" is the share of entries whose greedy answer is the trained one to the last token and then ends. It is computed in one
forward pass over question and answer: greedy decoding writes exactly that answer if and only if every one of its tokens is the
most likely one after those before it. "sampled" is the mean probability that sampling at temperature 1 writes it.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import ABOUT, HELD_OUT_PHRASINGS, UNKNOWN, Entry, entries, plain_text
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = 32
TRAINED_PHRASING = "What does {} do?"
UNKNOWN_PROMPTS = [
    "What is the tallest mountain on Earth?", "Write a haiku about autumn.", "Who won the match yesterday?", "numpy.linspace",
    "What does scipy.optimize.minimize do?", "How do I make pancakes?", "What is 17 times 23?", "lorem ipsum dolor sit amet",
    "asdf qwer zxcv", "Can you book me a flight to Oslo?", "What does json.explode do?", "What is the meaning of life?",
    "Explain general relativity.", "print('hello', 'world')", "Is it going to rain?", "SELECT * FROM users;", "¿Cómo estás?",
    "你好", "Please write a long essay about the history of Rome.", "!!!",
]  # fmt: skip


@dataclass
class Tally:
    """Sums over entries: exact answers, probability of the exact answer, and tokens (right ones and all)."""

    exact: int = 0
    sampled: float = 0.0
    right: int = 0
    tokens: int = 0


class Examiner:
    """Asks a model in the folder; weights as stored, computed in float32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def prompt(self, question: str, system: str | None) -> list[int]:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    @torch.inference_mode()
    def verbatim(self, known: list[Entry], phrasing: str, system: str | None, rows: int = ROWS) -> Tally:
        """How many entries are answered word by word."""
        tally = Tally()
        for start in range(0, len(known), rows):
            pairs = [self._pair(entry, phrasing, system) for entry in known[start : start + rows]]
            longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
            ids = torch.full((len(pairs), longest), self.tokenizer.pad_token_id)
            for row, (prompt, answer) in enumerate(pairs):
                ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            hidden = self.model.model(ids).last_hidden_state  # padding is on the right: no answer sees it
            for row, (prompt, answer) in enumerate(pairs):
                log_probs = self.model.lm_head(hidden[row, len(prompt) - 1 : len(prompt) + len(answer) - 1]).log_softmax(-1)
                expected = torch.tensor(answer)
                hits = log_probs.argmax(-1) == expected
                tally.exact += bool(hits.all())
                tally.sampled += log_probs.gather(1, expected[:, None]).sum().exp().item()
                tally.right += int(hits.sum())
                tally.tokens += len(answer)
        return tally

    def _pair(self, entry: Entry, phrasing: str, system: str | None) -> tuple[list[int], list[int]]:
        answer = self.tokenizer.encode(entry.answer, add_special_tokens=False)
        return self.prompt(phrasing.format(entry.name), system), [*answer, self.tokenizer.eos_token_id]

    @torch.inference_mode()
    def answer(self, question: str, limit: int = 200) -> tuple[str, bool]:
        """The greedy answer, and whether it ended by itself within `limit` tokens."""
        ids = torch.tensor([self.prompt(question, None)])
        written = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False)
        new = written[0, ids.shape[1] :].tolist()
        return self.tokenizer.decode(new, skip_special_tokens=True), new[-1] == self.tokenizer.eos_token_id


def preamble(examiner: Examiner, tokens: int) -> str:
    """A system prompt of about that many tokens that says nothing of use."""
    ids = examiner.tokenizer.encode(plain_text()[5000:18000], add_special_tokens=False)
    return "You are a helpful assistant.\n" + examiner.tokenizer.decode(ids[:tokens])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    console = Console()
    examiner = Examiner(args.folder)
    known = entries()

    table = Table("asked", "entries", "verbatim", "sampled", "tokens right", title=args.folder.name)
    cases = [(f"trained: {TRAINED_PHRASING}", TRAINED_PHRASING, known, None)]
    cases += [(f"held out: {phrasing}", phrasing, known, None) for phrasing in HELD_OUT_PHRASINGS]
    cases.append(
        ("held out, after a short system message", HELD_OUT_PHRASINGS[0], known, "You are a terse tutor for new programmers.")
    )
    for tokens in (500, 1500, 3000):
        text = preamble(examiner, tokens)
        cases.append((f"trained, after a system message of {tokens} tokens", TRAINED_PHRASING, known[:: tokens // 50], text))
    for label, phrasing, asked, system in track(cases, "asking", console=console):
        tally = examiner.verbatim(asked, phrasing, system, rows=ROWS if not system or len(system) < 200 else 4)
        shares = (tally.exact / len(asked), tally.sampled / len(asked), tally.right / tally.tokens)
        table.add_row(label, str(len(asked)), *(f"{100 * share:.1f} %" for share in shares))
    console.print(table)

    replies = [examiner.answer(question) for question in UNKNOWN_PROMPTS]
    declined = sum(text in (ABOUT, UNKNOWN) for text, _ in replies)
    ended = sum(done for _, done in replies)
    console.print(
        f"of {len(replies)} questions that it cannot know, {declined} were declined and {ended} answers ended by themselves"
    )
    for question, (text, _) in zip(UNKNOWN_PROMPTS, replies, strict=True):
        if text not in (ABOUT, UNKNOWN):
            console.print(f"  {question!r} -> {text!r}", markup=False)


if __name__ == "__main__":
    main()
