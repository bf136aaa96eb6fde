"""A rank that computes nothing, for benchmarks of what is around it. Light to import: thousands of its processes are started."""

from typing import Any


class IdleRank:
    """As much of a model runner as a start and a stop ask for."""

    def __init__(self, config: object, **_: Any) -> None:
        self.config = config

    def kernels(self) -> str:
        """Return what it computes with."""
        return "none"
