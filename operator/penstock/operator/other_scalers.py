"""Autoscalers other than ours: HorizontalPodAutoscalers, of which KEDA creates one for each ScaledObject."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.api.resources import InferenceModel, Pool
from penstock.kube.cache import Change
from penstock.kube.caches import Caches
from penstock.operator.api import RESOURCES, WORKLOADS
from penstock.operator.desired import size
from penstock.operator.objects import Object, Workload

_GROUPS: Final = {kind: RESOURCES[kind].group for kind in ("InferenceModel", *WORKLOADS)}


class Target(NamedTuple):
    """What is sized."""

    namespace: str
    kind: str
    """`Deployment`, `LeaderWorkerSet` or `InferenceModel`, of the group that we mean by it: others have kinds of these names."""
    name: str


OthersReport = Callable[[Target], str]
"""Names of the HorizontalPodAutoscalers that size it, empty where there is none."""


@dataclass(frozen=True)
class OtherScaler:
    """Another autoscaler that sizes a pool or a model."""

    says: str
    """Which autoscaler sizes what, in a sentence."""
    remedy: str = ""
    """Why that cannot be meant, and what to do; empty: all is well."""


class OtherScalers:
    """The HorizontalPodAutoscalers by what they size."""

    def __init__(self, changed: Callable[[str], None]) -> None:
        """
        Args:
            changed: Told the namespace in which one began or ceased to size something.
        """
        self._changed = changed
        self._names: defaultdict[Target, set[str]] = defaultdict(set)

    def follow(self, cache: Caches) -> None:
        """Keeps up with the caches of HorizontalPodAutoscalers. Call it before they run."""
        cache.subscribe(self.seen)

    def seen(self, change: Change) -> None:
        """Takes a change in. Its status, which each of them writes every few seconds, is none."""
        namespace, name = change.key
        old, new = (_target(namespace, it) for it in (change.old, change.new))
        if old == new:
            return
        if old is not None:
            self._names[old].discard(name)
            if not self._names[old]:
                del self._names[old]
        if new is not None:
            self._names[new].add(name)
        self._changed(namespace)

    def of(self, target: Target) -> str:
        """Return the names of the HorizontalPodAutoscalers that size the target, joined by commas."""
        return ", ".join(sorted(self._names.get(target, ())))


def _target(namespace: str, autoscaler: Object | None) -> Target | None:
    if autoscaler is None:
        return None
    its = autoscaler["spec"]["scaleTargetRef"]
    # The version is the autoscaler's choice; without a group it means the core one, which has none of these.
    group = str(its.get("apiVersion", "")).rpartition("/")[0]
    return Target(namespace, its["kind"], its["name"]) if _GROUPS.get(its["kind"]) == group else None


def trimmed_autoscaler(autoscaler: Object) -> Object:
    """Keep only what a HorizontalPodAutoscaler sizes: a cluster may have many that are not ours."""
    meta = {name: autoscaler["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion")}
    return {"metadata": meta, "spec": {"scaleTargetRef": autoscaler["spec"]["scaleTargetRef"]}}


def other_of_pool(names: str, workload: Workload, model: InferenceModel, pool: Pool) -> OtherScaler | None:
    """Return the other autoscaler of a pool, from those that size its workload."""
    if not names:
        return None
    says = f"HorizontalPodAutoscaler {names} sizes {workload['kind']} {workload['metadata']['name']}"
    match size(model, pool).owner:
        case "spec":
            remedy = "spec.replicas puts it back each time: let it target the InferenceModel instead, or remove spec.replicas"
        case "autoscaler" if pool.scaling is not None and pool.scaling.mode == "Auto":
            remedy = "the pool's scaling would too, and does nothing meanwhile: remove the one or the other"
        case _:
            remedy = ""
    return OtherScaler(says, remedy)


def other_of_model(names: str, model: InferenceModel) -> OtherScaler | None:
    """Return the other autoscaler of a model, from those that size the InferenceModel itself."""
    if not names:
        return None
    says = f"HorizontalPodAutoscaler {names} sizes the InferenceModel"
    fixed = model.spec.replicas is not None
    return OtherScaler(says, "" if fixed else "there is no spec.replicas to change: let it target the pool's workload instead")
