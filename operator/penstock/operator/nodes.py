"""Nodes that are about to be removed: cordoned, or marked by a node autoscaler."""

from collections.abc import Callable
from typing import Final

from penstock.kube.cache import Cache, Change
from penstock.operator.objects import Object

GOING: Final = frozenset({"ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption"})
"""Taints of cluster-autoscaler and Karpenter on nodes that they drain."""


def trimmed_node(node: Object) -> Object:
    """A node with nothing but its name and what says that it is about to go: nodes list their images and report every minute."""
    meta, spec = node["metadata"], node.get("spec", {})
    taints = [{"key": it["key"]} for it in spec.get("taints", []) if it["key"] in GOING]
    kept = {"unschedulable": bool(spec.get("unschedulable")), "taints": taints}
    return {"metadata": {name: meta[name] for name in ("name", "uid", "resourceVersion")}, "spec": kept}


def is_going(node: Object) -> bool:
    """Whether a trimmed node is about to go."""
    return bool(node["spec"]["unschedulable"] or node["spec"]["taints"])


class Nodes:
    """The nodes that are about to go.

    Args:
        changed: Called with the name of each node that begins to go, or stays after all.
    """

    def __init__(self, changed: Callable[[str], None]) -> None:
        self._changed = changed
        self._cache: Cache | None = None

    def follow(self, cache: Cache) -> None:
        """Keep up with a cache of nodes. Call it before that runs."""
        self._cache = cache
        cache.subscribe(self._take)

    @property
    def going(self) -> frozenset[str] | None:
        """Return the names of nodes that are about to be removed; None if the operator may not list nodes."""
        if self._cache is None or not self._cache.synced.is_set():
            return None
        return frozenset(name for (_, name), node in self._cache.objects.items() if is_going(node))

    def _take(self, change: Change) -> None:
        was, now = (node is not None and is_going(node) for node in (change.old, change.new))
        if was != now:
            self._changed(change.key[1])
