"""The pool's Service."""

from penstock.api import labels
from penstock.api.resources import InferenceModel, Pool
from penstock.operator.desired.arguments import EVENTS, HTTP, REPLAY
from penstock.operator.desired.names import metadata, selector
from penstock.operator.objects import Object


def service(model: InferenceModel, pool: Pool) -> Object:
    """A headless Service: names and EndpointSlices for the pool's ready replicas."""
    ports = [
        {"name": name, "port": number, "targetPort": name, "protocol": "TCP"}
        for name, number in ((labels.HTTP_PORT, HTTP), (labels.EVENTS_PORT, EVENTS), (labels.REPLAY_PORT, REPLAY))
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(model, pool),
        "spec": {"clusterIP": "None", "selector": selector(model, pool), "ports": ports},
    }
