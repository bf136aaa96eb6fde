"""The API server, and what the operator knows of it."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.operator.api import Api
from penstock.operator.store import Children, Resources


@dataclass(frozen=True)
class Cluster:
    """One API server as the operator sees it."""

    api: Api
    resources: Resources
    """The users' InferenceModels and LoraAdapters."""
    children: Children
    """The objects that the operator made for them."""
    going: Callable[[], frozenset[str] | None] = lambda: None
    """Returns the names of the nodes that are about to be removed, or None if they are not known."""
    absent: Callable[[str], bool] = lambda kind: False
    """Whether the API server does not know a kind, such as `LeaderWorkerSet`."""
