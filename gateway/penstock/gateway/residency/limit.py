"""How many blocks the residency index may know: what a share of the container's memory holds."""

from pathlib import Path

from penstock.gateway.residency.index import MAX_BLOCKS

BYTES_PER_BLOCK = 161
"""Bytes of one entry: a block that one replica caches (`make bench-residency`)."""
SHARE = 0.25
"""Share of the container's memory. The rest is for requests, tokenizers and the process itself."""
LEAST = 65_536
CGROUP = Path("/sys/fs/cgroup")


def blocks_that_fit(cgroup: Path = CGROUP) -> int:
    """`MAX_BLOCKS`, or fewer where the container has a smaller limit; never below `LEAST`."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
    except FileNotFoundError:  # no control groups of version 2
        return MAX_BLOCKS
    if limit == "max":
        return MAX_BLOCKS
    return min(MAX_BLOCKS, max(LEAST, int(int(limit) * SHARE / BYTES_PER_BLOCK)))
