"""Every benchmark that the Makefile names can begin; one of a device's host needs no device, and a gateway can decide nothing."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from benchmarks.bench_gateway import answering, results_name
from benchmarks.bench_overload import IMPORTANT, QUEUE, QUICK, UNIMPORTANT, fleet, measure
from benchmarks.gatewaybench.arms import free_ports, running, undecided
from benchmarks.gatewaybench.order import Disorder, disorder, impatient
from benchmarks.gatewaybench.streams import ANSWERED, Asked

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("command", "folder"),
    [(r"/python benchmarks/(\w+)\.py", ROOT / "benchmarks"), (r"/python -m (benchmarks[.\w]+)", ROOT)],
    ids=["scripts", "modules"],
)
def test_what_is_run_finds_what_it_imports(command: str, folder: Path) -> None:
    """A script has its own folder on the path and not the repository; a module the reverse."""
    names = re.findall(command, MAKEFILE)
    assert names
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import {', '.join(names)}"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_the_host_of_a_device_is_measured_without_one() -> None:
    """Every step is one full graph, or `measure` raises."""
    folder = ROOT / "benchmarks"
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import bench_device_host; print(bench_device_host.measure(2))"
    # As the Makefile runs it: launches of Triton's interpreter ask no driver.
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300, check=False, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert "'batch': 2" in done.stdout


def test_a_gateway_that_decides_nothing_sends_requests_on(tmp_path: Path) -> None:
    """`answering` raises where none is answered with 200."""
    port = free_ports(3)
    backend = (sys.executable, "-m", "benchmarks.bench_gateway", "--first-backend", str(port))
    with running(tmp_path / "backend", *backend), undecided([("127.0.0.1", port), ("127.0.0.2", port)], tmp_path) as arm:
        asyncio.run(answering(arm.port))


def test_a_run_of_some_arms_of_a_gateway_overwrites_no_run_of_all() -> None:
    names = [
        results_name(["3x2kB"], arms) for arms in ([], ["picker, lean"], ["picker, grpc.aio"], ["picker, lean", "no decision"])
    ]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[\w-]+", name) for name in names)


def test_of_an_overload_nothing_is_lost_and_the_order_holds() -> None:
    """A smaller one, by the queue's size alone: no figure of time is looked at."""
    with fleet() as (gateway, engines):
        figures = uvloop.run(measure(gateway, engines, QUICK._replace(seconds=0.5)))
    assert figures["lost"] == 0
    assert figures["answered"] + sum(figures["refused"].values()) == figures["offered"]
    assert set(figures["refused"]) <= {"queue_full", "displaced"}
    order = figures["order"]
    counts = {"over": UNIMPORTANT, "displaced": IMPORTANT, "less_important_refused": UNIMPORTANT, "served_in_turn": QUEUE}
    assert {name: order[name] for name in counts} == counts
    assert figures["disorder"] == order["disorder"] == vars(Disorder()) and order["lost"] == 0


def test_disorder_is_noticed() -> None:
    """By the numbers in the order of settling: answers, refusals, and a displaced one that was not the newest that waited."""

    def settled(*what: tuple[int, int, str]) -> list[Asked]:
        return [Asked(number, priority, 0.0, outcome=outcome) for number, priority, outcome in what]

    assert disorder(settled((0, 0, ANSWERED), (2, 0, ANSWERED), (1, 1, ANSWERED))) == Disorder()
    assert disorder(settled((1, 0, ANSWERED), (0, 0, ANSWERED))) == Disorder(overtaken=1)
    assert disorder(settled((1, 0, "queue_full"), (0, 0, "queue_full"))) == Disorder(refused_early=1)
    assert disorder(settled((2, 0, ANSWERED), (1, 1, "displaced"), (0, 1, "displaced"))) == Disorder()
    assert disorder(settled((2, 0, ANSWERED), (0, 1, "displaced"), (1, 1, ANSWERED))) == Disorder(displaced_wrongly=1)
    assert disorder(settled((2, 0, ANSWERED), (0, 0, "displaced"), (1, 1, ANSWERED))) == Disorder(displaced_wrongly=1)
    in_turn = settled(*[(number, 0, ANSWERED) for number in range(32)], (40, 1, ANSWERED), (41, 0, ANSWERED))
    assert impatient(in_turn) == 0
    assert impatient([in_turn[-2], *in_turn[:32]]) == 1
