"""What each transport of KV pages copies a second between two processes of this machine, beside a plain copy in one.

256 pages of 64 KiB lie scattered on both sides. A pull is timed as the engine makes it: the lease is looked up, the pages are
summed on both sides, and the lease is checked again.
"""

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from penstock.engine.cache.layout import KVGroup, KVLayout
from penstock.engine.cache.pages import PageGeometry
from penstock.engine.config import TransferConfig, TransportName
from penstock.engine.connectors.shared_slots import SharedSlots
from penstock.engine.connectors.transfer import nixl
from penstock.engine.connectors.transfer.agent import inlets, outlets
from penstock.engine.connectors.transfer.lender import Lender
from penstock.engine.connectors.transfer.reader import Reader
from penstock.engine.connectors.transfer.words import Errand, Page, Part, Peer

SLOTS, PULLED, PAGE_BYTES = 1024, 256, 64 << 10
SECRET = b"a secret of a benchmark"
FINGERPRINT = "pages"
GEOMETRY = PageGeometry(layers=(), layout=KVLayout((KVGroup((0,), 16, None),), PAGE_BYTES))


def measure(pulls: int) -> dict[str, Any]:
    """Bytes a second of a plain copy and of each transport; None for one that is not installed."""
    there, here = np.random.default_rng(0).permuted(np.tile(np.arange(SLOTS), (2, 1)), axis=1)[:, :PULLED]
    results: dict[str, Any] = {"pages": PULLED, "page_bytes": PAGE_BYTES, "pulls": pulls, "memcpy": _memcpy(there, here, pulls)}
    names: list[TransportName] = ["shm", "nixl", "tcp"]
    for name in names:
        results[name] = None if name == "nixl" and nixl.installed() is None else _pulled(name, there, here, pulls)
    return results


def _memcpy(there: Any, here: Any, pulls: int) -> int:
    source = np.random.default_rng(1).integers(0, 256, (SLOTS, PAGE_BYTES), np.uint8)
    target, times = np.zeros_like(source), list[float]()
    for _ in range(pulls + 1):
        begin = time.perf_counter()
        for one, other in zip(there.tolist(), here.tolist(), strict=True):
            target[other] = source[one]
        times.append(time.perf_counter() - begin)
    return _rate(times)


def _pulled(name: TransportName, there: Any, here: Any, pulls: int) -> int:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with TemporaryDirectory() as folder:
        config = TransferConfig(role="kv_both", engine_id=f"bench-{time.time_ns()}", secret=Path(folder), transports=(name,))
        lender = context.Process(target=_lend, args=(theirs, config, there.tolist()))
        lender.start()
        try:
            port = ours.recv()
            slots = np.zeros((SLOTS, PAGE_BYTES), np.uint8)
            part = Part(0, 1, 0, 1, FINGERPRINT, "127.0.0.1", True)
            reader = Reader(SECRET, part, GEOMETRY, slots, inlets(config, SECRET, 0))
            pages = [Page(0, at.to_bytes(4, "big"), slot) for at, slot in enumerate(here.tolist())]
            times: list[float] = []
            for number in range(pulls + 1):  # the first one opens the connection
                begin = time.perf_counter()
                reader.pull(Errand("pull", "lease", number, pages, Peer("bench", ("127.0.0.1",), port)))
                while not (told := reader.take()):
                    time.sleep(1e-4)
                times.append(time.perf_counter() - begin)
                if told[number].error is not None:
                    raise RuntimeError(f"{name}: {told[number].error}")
            ours.send(None)
            expected = ours.recv_bytes()
            if slots[here].tobytes() != expected:
                raise RuntimeError(f"{name}: other bytes came than were lent")
            reader.close()
        finally:
            lender.join(10)
            if lender.is_alive():
                lender.kill()
    return _rate(times)


def _lend(pipe: Connection, config: TransferConfig, there: list[int]) -> None:
    slots = SharedSlots(SLOTS, PAGE_BYTES)
    slots.array[:] = np.random.default_rng(1).integers(0, 256, slots.array.shape, np.uint8)
    ways = outlets(config, slots, SECRET, 0)
    lender = Lender(("127.0.0.1", 0), SECRET, "bench", FINGERPRINT, slots.array, ways, GEOMETRY)
    lender.grant("lease", [Page(0, at.to_bytes(4, "big"), slot) for at, slot in enumerate(there)])
    pipe.send(lender.port)
    pipe.recv()
    pipe.send_bytes(slots.array[there].tobytes())
    lender.close()


def _rate(times: list[float]) -> int:
    return round(PULLED * PAGE_BYTES / statistics.median(times[1:]))
