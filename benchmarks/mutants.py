"""How many small faults do the tests of the pure cores notice? Mutation testing with Cosmic Ray, on a random sample.

    make mutants
    make mutants ARGS="--only hashing --minutes 5"

Each mutant is one fault, such as `<` in place of `<=`, in a copy of the working tree. The tests of its core run on it: a mutant
that fails one is killed, one that passes all survives. The score is killed mutants / tried mutants. A mutant that no test can
tell from the original is listed with the reason in `equivalent_mutants.toml`, and does not count.

The sample is the same for the same seed and the same sources. The cores take turns, so that a run that ends early has tried about
as many mutants of each.
"""

import argparse
import os
import random
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec, WorkerOutcome
from report import write_results
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).parent / "equivalent_mutants.toml"
NO_FAULTS = ("core/RemoveDecorator", "core/ReplaceBinaryOperator_BitOr_")
"""Beginnings of operators that are not used: the first stops every import of a dataclass, the second writes `int & None` into
type hints."""
SAME_COMPARISONS = frozenset(
    f"core/ReplaceComparisonOperator_{name}" for name in ("Is_Eq", "IsNot_NotEq", "Eq_Is", "NotEq_IsNot")
)
"""Operators that are not used either: `x == None` and `x is "a"` compute the same here, and the linter refuses them."""
MEMORY_BYTES = 8 << 30
"""A mutant may loop and allocate for ever."""


@dataclass(frozen=True)
class Core:
    """Sources, and the tests that should notice each fault in them: both as glob patterns, from the repository's root."""

    name: str
    sources: Sequence[str]
    tests: Sequence[str]


_SCHEDULING = "engine/penstock/engine/core/scheduling"
CORES = (
    Core("scheduler", [f"{_SCHEDULING}/**/*.py"], ["engine/tests/core/test_scheduler*.py", "engine/tests/core/test_step*.py"]),
    Core(
        "cache",
        ["engine/penstock/engine/cache/*.py"],
        [f"engine/tests/core/test_{name}.py" for name in ("block_pool", "kv_*", "pins", "event_publisher", "scheduler_fuzz")],
    ),
    Core("hashing", ["common/penstock/prompt/hashing.py"], ["common/tests/test_hashing.py"]),
    Core(
        "sampler",
        [f"kernels/penstock/kernels/sampling/{name}.py" for name in ("reference", "cpu", "philox")],
        ["kernels/tests/test_sampling_plain.py", "engine/tests/runner/test_sampler.py"],
    ),
    Core(
        "picker",
        ["gateway/penstock/gateway/picker/*.py"],
        [
            f"gateway/tests/picker/test_{name}.py"
            for name in (
                "bookings",
                "choice",
                "coming",
                "correction",
                "decisions",
                "disaggregation",
                "lora_affinity",
                "outliers",
                "residency",
                "state",
            )
        ],
    ),
    Core(
        "flow",
        ["gateway/penstock/gateway/flow/*.py"],
        ["gateway/tests/flow/*.py", "gateway/tests/picker/test_flow_gate.py", "gateway/tests/picker/test_loaded_adapters.py"],
    ),
    Core(
        "desired state",
        ["operator/penstock/operator/desired/*.py"],
        [
            f"operator/tests/test_{name}.py"
            for name in (
                "desired",
                "desired_details",
                "every_field",
                "older_versions",
                "overlay",
                "templates_at_random",
                "fetching",
            )
        ],
    ),
    Core("policy", ["operator/penstock/operator/autoscale/*.py"], ["operator/tests/autoscale/test_*.py"]),
)


@dataclass
class Score:
    """What became of the mutants of one core."""

    core: Core
    mutants: int
    seconds: float = 0.0
    """What its tests take without a fault."""
    killed: int = 0
    survivors: list[dict[str, object]] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """Mutants whose tests ran."""
        return self.killed + len(self.survivors)

    def row(self) -> dict[str, object]:
        """The score as the results hold it."""
        share = round(self.killed / self.tried, 3) if self.tried else None
        figures = {"mutants": self.mutants, "tried": self.tried, "killed": self.killed, "score": share}
        return {"core": self.core.name, **figures, "survivors": self.survivors}


@dataclass(frozen=True)
class Outcome:
    """One mutant whose tests ran."""

    mutation: MutationSpec
    killed: bool
    was: str
    now: str


def files(patterns: Iterable[str], root: Path = ROOT) -> list[str]:
    """The files that match, from `root` on. Raises `SystemExit` for a pattern that matches none."""
    found: dict[str, None] = {}
    for pattern in patterns:
        paths = sorted(str(path.relative_to(root)) for path in root.glob(pattern))
        if not paths:
            raise SystemExit(f"mutants: no file matches {pattern}")
        found |= dict.fromkeys(paths)
    return list(found)


def mutations(sources: Iterable[str], seed: str) -> list[MutationSpec]:
    """Every mutation of the files, which lie in the current folder, in an order that `seed` draws."""
    with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/session.sqlite") as session:
        init([Path(source) for source in sources], session, {})
        found = [item.mutations[0] for item in session.work_items]
    found = [it for it in found if not it.operator_name.startswith(NO_FAULTS)]
    found = [it for it in found if it.operator_name not in SAME_COMPARISONS and not held_by_types(it)]
    found.sort(key=lambda it: (str(it.module_path), it.operator_name, it.occurrence))
    random.Random(seed).shuffle(found)
    return found


def held_by_types(mutation: MutationSpec) -> bool:
    """Whether only the type checker holds what a mutant changes: that a dataclass is frozen, or the `*` between parameters, which
    Cosmic Ray reads as a product."""
    line, column = mutation.start_pos
    text = Path(mutation.module_path).read_text().splitlines()[line - 1]
    return text[column:].startswith("*,") or text.lstrip().startswith("@dataclass(")


def copy_tree(target: Path) -> None:
    """Copies the working tree without what git ignores, and with the generated packages."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout.split("\0")
    generated = [str(path.relative_to(ROOT)) for path in ROOT.glob("*/penstock/*/_pb/**/*.py")]
    for name in (*listed, *generated):
        if name and (ROOT / name).is_file():  # not one that was deleted
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def enter(folder: str) -> None:
    """Gives this process a copy of the tree, in which it stays and from which its tests import."""
    tree = Path(tempfile.mkdtemp(dir=folder))
    copy_tree(tree)
    os.chdir(tree)
    packages = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["dev-mode-dirs"]
    os.environ["PYTHONPATH"] = os.pathsep.join(str(tree / name) for name in packages)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    where = [sys.executable, "-c", "import penstock.api.errors as it; print(it.__file__)"]
    imported = subprocess.run(where, stdout=subprocess.PIPE, check=True, text=True).stdout
    if not imported.startswith(str(tree)):
        raise RuntimeError(f"tests would import {imported.strip()}, not the copy in {tree}")


def command(tests: Sequence[str]) -> list[str]:
    """The command that runs the tests up to the first failure."""
    return [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]


def baseline(tests: Sequence[str]) -> float:
    """The seconds that the tests take. Raises `RuntimeError` where they fail without a fault."""
    began = time.monotonic()
    done = subprocess.run(command(tests), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the tests fail without a mutant:\n{done.stdout[-3000:]}")
    return time.monotonic() - began


def attempt(mutation: MutationSpec, tests: Sequence[str], limit_s: float) -> Outcome:
    """Makes the mutant in the current folder and runs the tests on it; a mutant that exceeds the time is killed."""
    result = mutate_and_test([mutation], shlex.join(command(tests)), limit_s)
    if result.worker_outcome is not WorkerOutcome.NORMAL:
        raise RuntimeError(f"{mutation}: {result.worker_outcome}\n{result.output}")
    changed = [line for line in (result.diff or "").splitlines() if line.startswith(("-", "+")) and line[1:2] not in "-+"]
    was, now = (" ".join(" ".join(line[1:] for line in changed if line[0] == sign).split()) for sign in "-+")
    return Outcome(mutation, result.is_killed, was, now)


def equivalent() -> dict[tuple[str, str], str]:
    """Why a mutant changes nothing that a test could see, by file and mutated text. Raises `SystemExit` for a stale entry."""
    known: dict[tuple[str, str], str] = {}
    for entry in tomllib.loads(EQUIVALENT.read_text()).get("mutant", []):
        if entry["was"] not in " ".join((ROOT / entry["file"]).read_text().split()):
            raise SystemExit(f"mutants: {EQUIVALENT.name}: {entry['file']} has no longer: {entry['was']}")
        known[entry["file"], entry["now"]] = entry["why"]
    return known


def turns(queues: Iterable[tuple[Score, Sequence[MutationSpec]]]) -> Iterator[tuple[Score, MutationSpec]]:
    """One mutant of each core after the other."""
    pairs = [[(score, mutation) for mutation in queue] for score, queue in queues]
    return (pair for pair in chain.from_iterable(zip_longest(*pairs)) if pair is not None)


def run(cores: Sequence[Core], seed: int, seconds: float, jobs: int, most: int | None) -> list[Score]:
    """Tries mutants for `seconds`, at most `most` of each core."""
    until, known = time.monotonic() + seconds, equivalent()
    os.chdir(ROOT)
    queues: list[tuple[Score, Sequence[MutationSpec]]] = []
    for core in cores:
        found = mutations(files(core.sources), f"{seed} {core.name}")
        queues.append((Score(core, len(found)), found[:most]))
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(jobs, initializer=enter, initargs=(folder,)) as pool:
        tests = {score.core.name: files(score.core.tests) for score, _ in queues}
        for (score, _), took in zip(queues, pool.map(baseline, tests.values()), strict=True):
            score.seconds = took
        running: dict[Future[Outcome], Score] = {}

        def collect() -> None:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                count(running.pop(future), future.result(), known)

        for score, mutation in turns(queues):
            if time.monotonic() > until:
                break
            if len(running) == jobs:
                collect()
            limit_s = 20 + 3 * score.seconds
            running[pool.submit(attempt, mutation, tests[score.core.name], limit_s)] = score
        while running:
            collect()
    return [score for score, _ in queues]


def count(score: Score, outcome: Outcome, known: dict[tuple[str, str], str]) -> None:
    """Counts one outcome; an equivalent mutant that survives does not count."""
    file, line = str(outcome.mutation.module_path), outcome.mutation.start_pos[0]
    if outcome.killed:
        score.killed += 1
    elif (file, outcome.now) not in known:
        score.survivors.append({"file": file, "line": line, "was": outcome.was, "now": outcome.now})


def main() -> int:
    """Prints the table, writes the JSON; 1 where a core's score is below `--at-least`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=[core.name for core in CORES], help="this core; repeat for more")
    parser.add_argument("--minutes", type=float, default=28, help="start no mutant after this time (default: %(default)s)")
    parser.add_argument("--most", type=int, help="try at most this many mutants of each core")
    parser.add_argument("--seed", type=int, default=1, help="draws the sample (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time (default: one for each core)")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="SHARE", help="fail below this score, such as 0.85")
    arguments = parser.parse_args()
    chosen = [core for core in CORES if not arguments.only or core.name in arguments.only]
    scores = run(chosen, arguments.seed, 60 * arguments.minutes, arguments.jobs, arguments.most)
    console, table = Console(), Table("core", "mutants", "tried", "killed", "score", title="Mutants of the pure cores")
    for score in scores:
        table.add_row(*[str(value) for value in list(score.row().values())[:5]])
        for it in score.survivors:
            text = f"{it['file']}:{it['line']}\n  - {it['was']}\n  + {it['now']}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    name = "-".join(("mutants", *(core.name.replace(" ", "-") for core in chosen if arguments.only)))
    path = write_results(name, {"seed": arguments.seed, "scores": [score.row() for score in scores]})
    console.print(f"written to {path}")
    return int(any(score.tried and score.killed < arguments.at_least * score.tried for score in scores))


if __name__ == "__main__":
    raise SystemExit(main())
