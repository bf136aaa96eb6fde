"""The model for others: an InferencePool, an HTTPRoute to it, and what Prometheus is to scrape."""

import re
from collections.abc import Sequence

from penstock.api import labels
from penstock.api.resources import InferenceModel
from penstock.operator.desired.arguments import HTTP
from penstock.operator.desired.names import model_metadata
from penstock.operator.objects import Object

MOST_NAMES, NAMES_IN_RULE = 128, 64
"""What the Gateway API allows of an HTTPRoute, and of one of its rules."""
SCRAPED_EVERY = "5s"
"""Scrape interval, as in manifests/monitoring. Faults of a replica often last less than a minute."""


def pod_monitor(model: InferenceModel, more_labels: dict[str, str]) -> Object:
    """Return the PodMonitor of the replicas' metrics for Prometheus operators, labelled with model, pool and role."""
    metadata = model_metadata(model)
    endpoint = {"port": labels.HTTP_PORT, "path": "/metrics", "interval": SCRAPED_EVERY, "relabelings": _relabelings()}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {**metadata, "labels": {**more_labels, **metadata["labels"]}},
        "spec": {
            "selector": {"matchLabels": {labels.MODEL: model.metadata.name}},
            "podMetricsEndpoints": [endpoint],
        },
    }


def _relabelings() -> list[Object]:
    """Series of a replica say whose it is as the autoscaler's do: `model`, `pool`, and `role`."""
    named = {"model": labels.MODEL, "pool": labels.POOL, "role": labels.ROLE}
    return [
        {"sourceLabels": ["__meta_kubernetes_pod_label_" + re.sub(r"[^a-zA-Z0-9]", "_", label)], "targetLabel": name}
        for name, label in named.items()
    ]


def inference_pool(model: InferenceModel, adapter_names: Sequence[str] = ()) -> list[Object]:
    """The InferencePool where `spec.routing.inferencePool` asks for one, and the HTTPRoute where that names a Gateway.

    Args:
        adapter_names: By which clients ask for the model's LoRA adapters.
    """
    asked = model.spec.routing.inference_pool
    if asked is None:
        return []
    pool = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": model_metadata(model),
        "spec": {
            "selector": {"matchLabels": {labels.MODEL: model.metadata.name}},
            "targetPorts": [{"number": HTTP}],
            "endpointPickerRef": {"name": asked.picker.name, "port": {"number": asked.picker.port}, "failureMode": "FailOpen"},
        },
    }
    if asked.gateway is None:
        return [pool]
    gateway = {"name": asked.gateway.name, "namespace": asked.gateway.namespace or model.metadata.namespace}
    route = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": model_metadata(model),
        "spec": {"parentRefs": [gateway], "rules": _rules(model, adapter_names)},
    }
    return [pool, route]


def _rules(model: InferenceModel, adapter_names: Sequence[str]) -> list[Object]:
    """Requests for the names of the model and its adapters, by the header that body-based routers write. A route has room for
    128 names, 64 in a rule: the adapters that come last by name are left out beyond that."""
    names = [*model.served_names, *adapter_names][:MOST_NAMES]
    matches = [{"headers": [{"name": "X-Gateway-Model-Name", "value": name}]} for name in names]
    backend = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": model.metadata.name}
    rule = {"backendRefs": [backend], "timeouts": {"request": "0s"}}  # answers may take minutes
    return [{"matches": matches[at : at + NAMES_IN_RULE], **rule} for at in range(0, len(matches), NAMES_IN_RULE)]
