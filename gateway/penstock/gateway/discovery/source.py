"""The interface of a source of the fleet."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol

from penstock.api.fleet import Fleet


class Discovery(Protocol):
    """A source of fleets."""

    def watch(self) -> AsyncIterator[Fleet]:
        """Yield the fleet once it is known completely, and again after each change. Never ends.

        An error of the source is logged and yields nothing: the last fleet stays valid.
        """
        ...


def discovery_from(source: str, namespaces: Sequence[str]) -> Discovery:
    """What `--discovery` names: `kubernetes`, or `file:PATH`.

    Args:
        namespaces: Kubernetes only; none named: all.

    Raises:
        ValueError: neither of them.
    """
    if source == "kubernetes":
        from penstock.gateway.discovery.kubernetes import KubernetesDiscovery  # a second of imports that a file does not need

        return KubernetesDiscovery(namespaces)
    if source.startswith("file:") and len(source) > len("file:"):
        from penstock.gateway.discovery.file import FileDiscovery

        return FileDiscovery(Path(source.removeprefix("file:")))
    raise ValueError(f"discovery: {source!r} is neither 'kubernetes' nor 'file:PATH'")
