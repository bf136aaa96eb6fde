"""Do ranks leave anything behind? A thousand groups of ranks are started and end in every way in which they can.

    make bench-starts                        1,000 starts
    make bench-starts ARGS="--starts 40"     a smoke test

In turn: tensor-parallel ranks that are closed, pipeline stages of which one is killed, ranks whose core is killed, and ranks on
two nodes. The ranks compute nothing, but all that a start makes is real: processes, sockets, shared memory, folders and ports.
After each group its processes must be gone. At the end no process, open file, segment of memory, folder or port may be left, and
the memory of the process that has started them must not have risen. The verdict is the exit status.
"""

import argparse
import logging
import os
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from peers.ports import free_ports
from procfs import children, memory_bytes
from report import write_results
from rich.console import Console
from rich.progress import Progress

from penstock.engine.args import EngineArgs
from penstock.engine.config import EngineConfig
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.headless import serve
from penstock.engine.parallel.process_executor import ProcessExecutor

MODEL: Final = Path(__file__).parent.parent / "examples/models/penstock-tiny"
RUNNER: Final = "idle_rank:IdleRank"
HOST: Final = "127.0.0.1"
END_S: Final = 10.0
"""Seconds in which all processes of a group must be gone."""
MOST_RISE: Final = 0.03
"""Of this process's memory, from the first tenth of the starts to the end."""


class Left(NamedTuple):
    """What is there that could be left behind."""

    open_files: int
    segments: int
    in_tmp: int
    processes: int


def config_of(**flags: Any) -> EngineConfig:
    """An engine's whose ranks share pages: each kind of memory is made."""
    return EngineArgs(model=str(MODEL), device="cpu", kv_offload_memory_bytes=2**20, **flags).config()


def closed(number: int) -> list[int]:
    """Two ranks that divide all layers are asked something and end with their core."""
    executor = ProcessExecutor(config_of(tensor_parallel_size=2), RUNNER)
    executor.call("kernels")
    executor.close()
    return executor.pids


def rank_killed(number: int) -> list[int]:
    """One of two stages is killed."""
    executor = ProcessExecutor(config_of(pipeline_parallel_size=2), RUNNER)
    os.kill(executor.pids[number % 2], signal.SIGKILL)
    with suppress(GroupFailed):
        executor.call("kernels")
    executor.close()
    return executor.pids


def core_killed(number: int) -> list[int]:
    """The process that has started two ranks is killed: nobody tells them to end."""
    reading, writing = os.pipe()

    def core() -> None:
        executor = ProcessExecutor(config_of(tensor_parallel_size=2), RUNNER)
        os.write(writing, " ".join(map(str, executor.pids)).encode())
        signal.pause()

    pid = _forked(core)
    os.close(writing)
    with os.fdopen(reading, "rb", 0) as told:
        pids = [int(word) for word in told.read(100).split()]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return [pid, *pids]


def two_nodes(number: int) -> list[int]:
    """A rank on each of two nodes, which find each other on a port: the same one each time."""
    place = {"nnodes": 2, "master_addr": HOST, "master_port": PORT, "tensor_parallel_size": 2}
    other = _forked(lambda: serve(config_of(node_rank=1, **place), RUNNER))
    executor = ProcessExecutor(config_of(node_rank=0, **place), RUNNER)
    executor.call("kernels")
    executor.close()
    if os.waitpid(other, 0)[1] != 0:
        raise RuntimeError("the other node has not ended in good order")
    return [other, *executor.pids]


[PORT] = free_ports(1)
WAYS: Final[tuple[Callable[[int], list[int]], ...]] = (closed, rank_killed, core_killed, two_nodes)


def _forked(life: Callable[[], object]) -> int:
    """A process that does this and nothing else."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            life()
            status = 0
        finally:
            os._exit(status)
    return pid


def gone(pid: int) -> bool:
    """Whether a process has ended. One that nobody has waited for is not ours: its parent was killed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def left(folder: Path) -> Left:
    """What is there now."""
    segments = [path for path in Path("/dev/shm").iterdir() if "penstock" in path.name]
    files, in_tmp = (len(list(path.iterdir())) for path in (Path("/proc/self/fd"), folder))
    return Left(files, len(segments), in_tmp, len(children(os.getpid())))


def is_listened_on(port: int) -> bool:
    """Whether somebody does."""
    with socket.socket() as asking:
        return asking.connect_ex((HOST, port)) == 0


def run(starts: int, folder: Path, console: Console) -> dict[str, Any]:
    """Starts and ends so many groups; what was left of them."""
    seconds, slow, ranks, rss = Counter[str](), list[str](), 0, list[int]()
    before = left(folder)
    with Progress(console=console, auto_refresh=False) as progress:  # a thread would be lost in forked processes
        bar = progress.add_task("starts", total=starts)
        for number in range(starts):
            way, began = WAYS[number % len(WAYS)], time.perf_counter()
            pids = way(number)
            deadline = time.monotonic() + END_S
            while not all(map(gone, pids)) and time.monotonic() < deadline:
                time.sleep(0.002)
            slow += [f"{way.__name__} {number}: process {pid}" for pid in pids if not gone(pid)]
            seconds[way.__name__] += time.perf_counter() - began
            ranks += len(pids)
            rss.append(memory_bytes(os.getpid()))
            progress.update(bar, advance=1)
            if number % 10 == 0:
                progress.refresh()
    after, first = left(folder), rss[len(rss) // 10]
    return {
        "starts": starts,
        "processes": ranks,
        "seconds_a_start": {way.__name__: round(seconds[way.__name__] * len(WAYS) / starts, 3) for way in WAYS},
        "processes_left": slow,
        "before": before._asdict(),
        "after": after._asdict(),
        "port_is_listened_on": is_listened_on(PORT),
        "memory_rise": round(rss[-1] / first - 1, 5),
    }


def faults(found: dict[str, Any]) -> list[str]:
    """What is left behind."""
    bad = [f"{what} has not ended" for what in found["processes_left"]]
    for name, count in found["after"].items():
        if count > found["before"][name]:
            bad.append(f"{name}: {count}, {found['before'][name]} before")
    if found["port_is_listened_on"]:
        bad.append(f"port {PORT} is listened on")
    if found["memory_rise"] > MOST_RISE:
        bad.append(f"the memory of the process that starts them rose by {found['memory_rise']:.1%}")
    return bad


def main() -> int:
    """Runs and writes the benchmark; 1 where something is left."""
    parser = argparse.ArgumentParser(description="Do ranks leave anything behind?")
    parser.add_argument("--starts", type=int, default=1000, help="how many groups of ranks (default: 1,000)")
    starts, console = max(len(WAYS), parser.parse_args().starts), Console()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    logging.disable()  # of each group it says how it has ended
    with tempfile.TemporaryDirectory(prefix="starts-") as folder:
        tempfile.tempdir = folder  # what the groups make there is told from what others do
        found = run(starts, Path(folder), console)
    found["faults"] = faults(found)
    console.print_json(data=found)
    console.print("\n".join(["[red]FAULTS[/red]", *found["faults"]]) if found["faults"] else "[green]nothing is left[/green]")
    console.print(f"written to {write_results('starts', found)}")
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
