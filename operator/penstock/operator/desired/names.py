"""Names, labels and owner of a pool's child objects."""

from typing import Final

from penstock.api import labels
from penstock.api.resources import InferenceModel, Pool
from penstock.operator.objects import Object
from penstock.operator.overlay import merge

GROUPS_OF: Final = "leaderworkerset.sigs.k8s.io/name"
"""The label by which LWS marks every pod of a LeaderWorkerSet, leaders and workers, with its name."""


def child_name(model: str, pool: str) -> str:
    """The name of all of a pool's child objects."""
    return f"{model}-{pool}"


def selector(model: InferenceModel, pool: Pool) -> dict[str, str]:
    """The labels by which a pool's pods are found."""
    return {labels.MODEL: model.metadata.name, labels.POOL: pool.name}


def metadata(model: InferenceModel, pool: Pool) -> Object:
    """Return the metadata of a child of a pool: its name, labels and owner."""
    return {
        "name": child_name(model.metadata.name, pool.name),
        "namespace": model.metadata.namespace,
        "labels": common_labels(model, pool),
        "ownerReferences": [owner_reference(model)],
    }


def workload_metadata(model: InferenceModel, pool: Pool) -> Object:
    """Return the metadata of the pool's workload, with the labels and annotations of the spec."""
    return merge(metadata(model, pool), pool.metadata.model_dump(exclude_defaults=True))


def model_metadata(model: InferenceModel) -> Object:
    """Return the metadata of a child that a model has once for all pools."""
    common = {"app.kubernetes.io/part-of": "penstock", "app.kubernetes.io/managed-by": "penstock"}
    return {
        "name": model.metadata.name,
        "namespace": model.metadata.namespace,
        "labels": {**common, labels.MODEL: model.metadata.name},
        "ownerReferences": [owner_reference(model)],
    }


def owner_reference(model: InferenceModel) -> Object:
    """The model as an object's controller: what it owns goes with it."""
    return {
        "apiVersion": f"{labels.GROUP}/{labels.VERSION}",
        "kind": "InferenceModel",
        "name": model.metadata.name,
        "uid": model.metadata.uid,
        "controller": True,
    }


def common_labels(model: InferenceModel, pool: Pool) -> dict[str, str]:
    """What every child carries: Kubernetes' recommended labels, and those by which Penstock finds its own."""
    return {
        "app.kubernetes.io/name": "penstock-engine",
        "app.kubernetes.io/instance": model.metadata.name,
        "app.kubernetes.io/component": "engine",
        "app.kubernetes.io/part-of": "penstock",
        "app.kubernetes.io/managed-by": "penstock",
        **selector(model, pool),
        labels.ROLE: pool.role,
    }
