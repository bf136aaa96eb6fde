"""Says what each phase took, as it ends."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """`with phases("etcd"): …` writes a line such as `   0.8 s  etcd` when the block ends, well or badly."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started, how = time.monotonic(), "FAILED: "
        try:
            yield
            how = ""
        finally:
            self._write(f"{time.monotonic() - started:6.1f} s  {how}{name}")
