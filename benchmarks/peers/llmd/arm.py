"""llm-d's router as one more arm of `make bench-gateway`, in its default configuration, over replicas that a file names."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from benchmarks.gatewaybench.arms import Arm, Start, free_ports, running
from benchmarks.gatewaybench.duplex import under_envoy
from e2e.cluster.build import build, programs_folder
from e2e.neighbours.llmd.build import PROGRAMS
from e2e.neighbours.llmd.program import DEFAULT, Endpoint, Ports, command

NAME = "llm-d 0.10.0"
_PICKER = "llm-d-epp"


@contextmanager
def llmd_arm(console: Console) -> Iterator[Start]:
    """How to start the arm, once the picker is built; raises TestbedError when that fails."""
    build(console, {_PICKER: PROGRAMS[_PICKER]})
    yield _arm


@contextmanager
def _arm(replicas: list[tuple[str, int]], folder: Path) -> Iterator[Arm]:
    first = free_ports(3)
    pool = [Endpoint(f"replica-{number}", host, port, {}) for number, (host, port) in enumerate(replicas)]
    started = command(programs_folder() / _PICKER, folder, pool, DEFAULT, Ports(first, first + 1, first + 2))
    with (
        running(folder / "log", *started, "--zap-log-level=error") as picker,
        under_envoy(picker, first, replicas, folder) as arm,
    ):
        yield arm
