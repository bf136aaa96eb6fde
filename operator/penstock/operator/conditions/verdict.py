"""A condition before it is written."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """A condition without its times."""

    status: bool | None
    """None: Unknown."""
    reason: str
    """One CamelCase word."""
    message: str


def plural(count: int) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{count} replica{'' if count == 1 else 's'}"
