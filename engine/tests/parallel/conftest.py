"""Groups of ranks, each in a process of its own."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from forked_ranks import Ranks

from penstock.engine.parallel.shared_comm import SharedComm
from penstock.engine.parallel.shared_memory import SharedMemory
from penstock.kernels.collective.native import NativeCollectives
from penstock.kernels.ops import native_collectives

PATIENCE_S = 60.0


@pytest.fixture(scope="session")
def collectives() -> NativeCollectives:
    """The compiled functions."""
    return native_collectives()


@pytest.fixture
def together(collectives: NativeCollectives) -> Callable[..., list[Any]]:
    """`together(world, function, slot_bytes, timeout)`: what `function(comm)` gives on every rank."""

    def run(
        world: int, function: Callable[[SharedComm], Any], slot_bytes: int = 1 << 12, timeout: float = PATIENCE_S
    ) -> list[Any]:
        memory = SharedMemory.create(world, slot_bytes)
        try:
            return Ranks(world, lambda rank: function(SharedComm(memory, rank, collectives, timeout))).results()
        finally:
            memory.close()

    return run


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits for a condition; fails where it never comes."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "it never came"
            time.sleep(0.005)

    return wait
