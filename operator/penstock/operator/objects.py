"""Kubernetes objects as the operator reads them: views that name the fields it looks at. At run time each is the plain dict that
the API server sent."""

from collections.abc import Iterable, Mapping
from typing import Any, NotRequired, TypedDict, cast

Object = dict[str, Any]
"""An object, or a part of one, whose fields are passed on rather than read."""


AnyObject = Mapping[str, Any]
"""An object of any kind, view or not, that is only read."""


class Metadata(TypedDict):
    """The `metadata` of an object that the API server has."""

    name: str
    namespace: str
    uid: str
    creationTimestamp: str
    resourceVersion: NotRequired[str]
    generation: NotRequired[int]
    labels: dict[str, str]
    annotations: NotRequired[dict[str, str]]
    deletionTimestamp: NotRequired[str]
    ownerReferences: NotRequired[list[Object]]
    managedFields: NotRequired[list[Object]]


class Condition(TypedDict):
    """One observation about an object, by the Kubernetes API conventions."""

    type: str
    status: str
    reason: str
    message: str
    lastTransitionTime: NotRequired[str]


class ContainerStatus(TypedDict):
    """How a container of a pod is doing."""

    name: str
    ready: NotRequired[bool]
    state: NotRequired[Object]
    lastState: NotRequired[Object]
    restartCount: NotRequired[int]


class PodStatus(TypedDict):
    """The `status` of a pod, as far as `store.trimmed_pod` keeps it."""

    phase: NotRequired[str]
    reason: NotRequired[str]
    message: NotRequired[str]
    podIP: NotRequired[str]
    conditions: NotRequired[list[Condition]]
    initContainerStatuses: NotRequired[list[ContainerStatus]]
    containerStatuses: NotRequired[list[ContainerStatus]]


class PodSpec(TypedDict):
    """The `spec` of a pod, likewise."""

    containers: list[Object]
    nodeName: NotRequired[str]


class Pod(TypedDict):
    """A replica, or the leader of one that spans nodes; or the pod of a Job."""

    metadata: Metadata
    spec: NotRequired[PodSpec]
    status: NotRequired[PodStatus]


class WorkloadStatus(TypedDict):
    """The `status` of a Deployment or a LeaderWorkerSet."""

    observedGeneration: NotRequired[int]
    replicas: NotRequired[int]
    conditions: NotRequired[list[Condition]]


class Workload(TypedDict):
    """A pool's Deployment or LeaderWorkerSet."""

    kind: str
    metadata: Metadata
    spec: Object
    status: NotRequired[WorkloadStatus]


def as_pods(objects: Iterable[Object]) -> list[Pod]:
    """Cast objects that are known to be pods."""
    return cast(list[Pod], list(objects))
