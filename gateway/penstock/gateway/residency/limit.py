"""How many blocks the residency index may know: what a share of the container's memory holds."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from penstock.gateway.residency.index import MAX_BLOCKS

BYTES_PER_BLOCK = 196
"""Bytes of one entry, a block that one replica caches, where it takes most: in Python's form, when its tables have just grown.
The compiled form takes up to 187. Both by the resident memory of the process."""
SHARE = 0.25
"""Share of the container's memory. The rest is for requests, tokenizers and the process itself."""
LEAST = 65_536
CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def blocks_that_fit(cgroups: Path = CGROUPS, own: Path = OWN) -> int:
    """`MAX_BLOCKS`, or fewer where the container has a smaller limit; never below `LEAST`.

    Args:
        cgroups: Where control groups are mounted.
        own: Which groups the process is in.
    """
    limit = min(_limits(cgroups, own), default=None)
    if limit is None:
        return MAX_BLOCKS
    return min(MAX_BLOCKS, max(LEAST, int(limit * SHARE / BYTES_PER_BLOCK)))


def _limits(cgroups: Path, own: Path) -> Iterator[int]:
    """The limits of the process's groups in bytes, those around them included: the smallest one holds."""
    try:
        lines = own.read_text().splitlines()
    except FileNotFoundError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            folder, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        # A container may see its own group as the root, by whatever path the host knows it.
        for place in (group, *group.parents) if ".." not in group.parts else (PurePosixPath(),):
            limit = _limit(folder / place / name)
            if limit is not None:
                yield limit


def _limit(file: Path) -> int | None:
    try:
        limit = file.read_text().strip()
    except FileNotFoundError:  # the root of the machine has none
        return None
    return None if limit == "max" else int(limit)
