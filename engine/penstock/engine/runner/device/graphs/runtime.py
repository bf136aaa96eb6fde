"""What graphs need of a device beside `DeviceRuntime`: CUDA's is in `cuda.py`; the tests have one that records."""

from typing import Protocol

import torch


class CapturedGraph(Protocol):
    """Launches with their arguments as they were: addresses, sizes and numbers."""

    def replay(self) -> None:
        """Launches all of them; the host waits for none."""
        ...


class GraphRuntime(Protocol):
    """Captures on the main stream, one graph at a time."""

    def new_pool(self) -> object:
        """Memory that graphs share which are never replayed at once. A pool keeps every graph that was begun in it, so that
        they end together."""
        ...

    def begin(self, pool: object) -> None:
        """From here on launches are recorded, not run, and what is allocated comes from `pool`."""
        ...

    def end(self) -> CapturedGraph:
        """What was launched since `begin`."""
        ...

    def abandon(self) -> None:
        """Ends a capture that has failed, if one is under way; the pool keeps what there is of its graph."""
        ...

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without owning it: a tensor of a graph's pool that later captures may take again."""
        ...
