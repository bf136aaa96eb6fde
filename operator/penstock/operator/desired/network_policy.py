"""The pool's NetworkPolicy."""

from collections.abc import Iterator
from typing import Final

from penstock.api import labels
from penstock.api.resources import InferenceModel, Pool
from penstock.operator.desired.arguments import ADMIN, event_ports
from penstock.operator.desired.devices import nodes
from penstock.operator.desired.names import child_name, metadata, selector
from penstock.operator.objects import Object

Port = tuple[int, str]
"""Number and protocol."""

PICKERS: Final = ["penstock-gateway", "penstock-picker"]
OPERATOR: Final = "penstock-operator"
_APP: Final = "app.kubernetes.io/name"
_NAMESPACE: Final = "kubernetes.io/metadata.name"
"""A label that the API server itself gives each namespace."""
_ADMIN: Final = (ADMIN, "TCP")
_MOST: Final = 65_535


def network_policy(model: InferenceModel, pool: Pool, template: Object, system_namespace: str) -> Object:
    """Return the NetworkPolicy of a pool's replicas.

    The ports that answer requests are open to all, since any gateway may call them. Pickers in the operator's and the model's
    namespaces reach the ports of cache events, which do not authenticate clients. Only the operator reaches the administrative
    port. The model's own pods reach every other port.

    Args:
        template: The pod template.
        system_namespace: The operator's namespace.
    """
    ports, told = _declared(template["spec"]), [(number, "TCP") for _, number in event_ports(pool)]
    picker = {"podSelector": {"matchExpressions": [{"key": _APP, "operator": "In", "values": PICKERS}]}}
    system = {"namespaceSelector": {"matchLabels": {_NAMESPACE: system_namespace}}}
    operator = {**system, "podSelector": {"matchLabels": {_APP: OPERATOR}}}
    ingress = [
        *_rule([port for port in ports if port not in told and port != _ADMIN], []),
        *_rule([port for port in ports if port in told], [picker, {**system, **picker}]),
        *_rule([port for port in ports if port == _ADMIN], [operator]),
        {"ports": _all_but_admin(), "from": _own_pods(model, pool)},
    ]
    return _policy(metadata(model, pool), selector(model, pool), ingress)


def worker_network_policy(model: InferenceModel, pool: Pool) -> Object:
    """Return the NetworkPolicy of the workers of a pool whose replicas span nodes: only the model's own pods reach them, those of
    the other role to read KV pages."""
    named = metadata(model, pool)
    chosen = {labels.WORKER_OF: named["name"]}
    return _policy({**named, "name": f"{named['name']}-workers"}, chosen, [{"from": _own_pods(model, pool)}])


def _policy(named: Object, chosen: dict[str, str], ingress: list[Object]) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": named,
        "spec": {"podSelector": {"matchLabels": chosen}, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _own_pods(model: InferenceModel, pool: Pool) -> list[Object]:
    """The model's replicas, the workers of this pool, and those of pools whose replicas read its KV pages."""
    others = [it for it in model.spec.pools if it.role != pool.role and nodes(it) > 1]
    workers = ({labels.WORKER_OF: child_name(model.metadata.name, it.name)} for it in (pool, *others))
    return [{"podSelector": {"matchLabels": it}} for it in ({labels.MODEL: model.metadata.name}, *workers)]


def _declared(spec: Object) -> list[Port]:
    """The ports of all containers that run beside each other, by number: names are the template's to change."""
    sidecars = [it for it in spec.get("initContainers", []) if it.get("restartPolicy") == "Always"]
    declared = [port for container in (*spec["containers"], *sidecars) for port in container.get("ports", [])]
    return list(dict.fromkeys((port["containerPort"], port.get("protocol") or "TCP") for port in declared))


def _rule(ports: list[Port], peers: list[Object]) -> Iterator[Object]:
    """None where there is no port: a rule without ports would open all of them."""
    if ports:
        told = [{"port": number, "protocol": protocol} for number, protocol in ports]
        yield {"ports": told, **({"from": peers} if peers else {})}


def _all_but_admin() -> list[Object]:
    ranges = ((1, ADMIN - 1, "TCP"), (ADMIN + 1, _MOST, "TCP"), (1, _MOST, "UDP"))
    return [{"port": first, "endPort": last, "protocol": protocol} for first, last, protocol in ranges]
