"""What Linux tells of a process in /proc."""

import os
from contextlib import suppress
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_times(pid: int) -> list[float]:
    """CPU seconds, in ticks of the kernel's clock alone: user and system time of the process without its children, then the same
    of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [int(field) / TICKS for field in fields[11:15]]


def cpu_s(pid: int) -> float:
    """User and system time of the process without its children, in seconds."""
    return sum(cpu_times(pid)[:2])


def memory_bytes(pid: int, what: str = "VmRSS") -> int:
    """What is resident, or the most that ever was: `VmHWM`."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (it for it in status.splitlines() if it.startswith(f"{what}:"))
    return int(line.split()[1]) * 1024


def children(pid: int) -> list[int]:
    """Processes that any of its threads has started, and that have not ended."""
    found: list[int] = []
    for one in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile: its children are another's now
            found += map(int, one.read_text().split())
    return found
