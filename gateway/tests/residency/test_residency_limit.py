"""The index's bound follows the container's memory limit."""

from pathlib import Path

import pytest

from penstock.gateway.picker.state import FleetState
from penstock.gateway.residency.index import MAX_BLOCKS
from penstock.gateway.residency.limit import LEAST, blocks_that_fit


@pytest.mark.parametrize(
    ("limit", "blocks"),
    [("max", MAX_BLOCKS), (str(2**40), MAX_BLOCKS), (str(512 * 2**20), 833_650), (str(2**20), LEAST), (None, MAX_BLOCKS)],
)
def test_the_bound_is_a_quarter_of_the_containers_memory(tmp_path: Path, limit: str | None, blocks: int) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    assert blocks_that_fit(tmp_path) == blocks


def test_the_index_keeps_to_it() -> None:
    assert FleetState(residency_blocks=1000).residency._total == 1000
