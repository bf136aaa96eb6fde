"""Labels, annotations and port names on Kubernetes objects that Penstock makes or reads, named once."""

from typing import Final

GROUP: Final = "penstock.dev"
VERSION: Final = "v1alpha1"

MODEL: Final = "penstock.dev/model"
"""Name of the InferenceModel that a pod, Deployment or Service belongs to."""
POOL: Final = "penstock.dev/pool"
"""Name of the pool within the model."""
ROLE: Final = "penstock.dev/role"
REVISION: Final = "penstock.dev/revision"
"""Hash of everything that decides what a replica runs."""
WORKER_OF: Final = "penstock.dev/worker-of"
"""On a pod that is part of a replica and no replica itself: name of the LeaderWorkerSet that it belongs to."""
FETCH_OF: Final = "penstock.dev/fetch-of"
"""On a pod that brings a model's weights and is no replica: name of the InferenceModel."""
RESTARTED_AT: Final = "penstock.dev/restarted-at"
"""Annotation on a pod: the `spec.rollout.restartedAt` that it was made for."""
CORDONED: Final = "penstock.dev/cordoned"
"""Annotation on a pod, `"true"`: a victim of scale-in that must not be picked any more."""
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Kubernetes' annotation on a pod: of those that are alike the cheapest goes first. Ours on victims alone."""
PICKER: Final = "penstock.dev/picker"
"""On a Service without a selector, `"true"`: the operator lets it lead to the active gateway, on the ports of the InferencePools
that name it as their picker."""
KV_LAYOUT: Final = "penstock.dev/kv-layout"
"""Annotation on a pod of a model with separate prefill: fingerprint of what decides the content and layout of its KV cache."""

# Named container ports of an engine pod.
HTTP_PORT: Final = "http"
EVENTS_PORT: Final = "events"
REPLAY_PORT: Final = "replay"
ADMIN_PORT: Final = "admin"


def rank_port(name: str, rank: int) -> str:
    """Return the name of a data-parallel rank's container port; the first rank has the plain names."""
    return f"{name}-{rank}" if rank else name
