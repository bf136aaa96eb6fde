"""The index's bound follows the container's memory limit."""

from pathlib import Path

import pytest

from penstock.api.events import MEDIA
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.state import FleetState
from penstock.gateway.residency.index import MAX_BLOCKS, ResidencyIndex
from penstock.gateway.residency.limit import LEAST, blocks_that_fit

pytestmark = pytest.mark.usefixtures("in_python_and_compiled")

MB_512, MB_512_BLOCKS = str(512 * 2**20), 684_784
V1 = "12:cpu,cpuacct:/\n4:memory:/pods/one\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "blocks"),
    [
        ("0::/\n", {"memory.max": "max"}, MAX_BLOCKS),
        ("0::/\n", {"memory.max": str(2**40)}, MAX_BLOCKS),
        ("0::/\n", {"memory.max": MB_512}, MB_512_BLOCKS),
        ("0::/\n", {"memory.max": str(2**20)}, LEAST),
        ("0::/\n", {}, MAX_BLOCKS),
        ("0::/pods/one\n", {"pods/one/memory.max": MB_512}, MB_512_BLOCKS),
        ("0::/pods/one\n", {"pods/one/memory.max": "max", "pods/memory.max": MB_512}, MB_512_BLOCKS),
        ("0::/pods/one\n", {"pods/other/memory.max": MB_512}, MAX_BLOCKS),
        ("0::/../elsewhere\n", {"memory.max": MB_512}, MB_512_BLOCKS),
        (V1, {"memory/pods/one/memory.limit_in_bytes": MB_512}, MB_512_BLOCKS),
        (V1, {"memory/memory.limit_in_bytes": MB_512}, MB_512_BLOCKS),
        (V1, {"memory/pods/one/memory.limit_in_bytes": str(2**63 - 4096)}, MAX_BLOCKS),
        (None, {"memory.max": MB_512}, MAX_BLOCKS),
    ],
)
def test_the_bound_is_a_quarter_of_the_containers_memory(
    tmp_path: Path, own: str | None, files: dict[str, str], blocks: int
) -> None:
    if own is not None:
        (tmp_path / "own").write_text(own)
    for name, limit in files.items():
        file = tmp_path / "mounted" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    assert blocks_that_fit(tmp_path / "mounted", tmp_path / "own") == blocks


def test_the_index_keeps_to_it() -> None:
    state = FleetState(residency_blocks=1000)
    state.residency.store(ReplicaKey("a", 8000), blocks(2000))
    assert 900 <= state.residency.entries <= 1000


def blocks(count: int, first: int = 0) -> list[bytes]:
    return [n.to_bytes(32, "big") for n in range(first, first + count)]


def test_caches_and_tiers_keep_to_it_together() -> None:
    """Whatever is in which index, and in the lists of what each tier holds."""
    key, total = ReplicaKey("a", 8000), 1000
    state = FleetState(residency_blocks=total)
    cached, tiers = state.residency, state.tiers
    most: list[int] = []
    for at, medium in enumerate((None, *MEDIA)):
        for batch in range(20):
            hashes = blocks(100, 10_000 * at + 100 * batch)
            if medium is None:
                cached.store(key, hashes)
            tiers.stored(key, hashes, medium)
        listed = sum(len(held) for held in tiers._held.get(key, {}).values())
        most.append(cached.entries + sum(index.entries for _, index in tiers.indexes()) + listed)
    assert most[0] >= 0.9 * total  # nothing is kept free for tiers that nobody has
    assert max(most) <= total
    assert all(index.entries for _, index in tiers.indexes())
    tiers.drop(key)
    cached.store(key, blocks(800))
    assert cached.entries >= 800


def test_a_smaller_total_drops_what_was_used_least_recently() -> None:
    index = ResidencyIndex(total=100)
    index.store(ReplicaKey("a", 8000), blocks(60))
    index.set_total(10)
    assert index.entries == 10 and index.dropped == 50
    assert index.holds(ReplicaKey("a", 8000), blocks(60)[-1])
