"""What the EndpointSlices of pickers must be: where a Service in an InferencePool's namespace leads. Pure.

A gateway of somebody else asks a pool's picker at the Service that the pool names, which is in the pool's own namespace.
Penstock's gateways run in another one, and serve each pool on a port of its own. A user makes a Service without a selector there,
with the label `labels.PICKER`; its slice takes it to the gateway process that is active, and to the ports that this process told.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Final

from penstock.operator.objects import Object, Pod
from penstock.operator.pods import is_live, is_ready

MANAGED_BY: Final = "endpointslice.kubernetes.io/managed-by"
MANAGER: Final = "penstock-operator"
SERVICE: Final = "kubernetes.io/service-name"


@dataclass(frozen=True)
class Plan:
    """The slices that there are to be, and what is wrong with Services."""

    slices: list[Object] = field(default_factory=list[Object])
    faults: list[tuple[Object, str, str]] = field(default_factory=list[tuple[Object, str, str]])
    """A Service or an InferencePool, a reason in one word, and a sentence."""


def active(gateways: Iterable[Pod]) -> Pod | None:
    """The process that pickers lead to: the first that is ready, by the numbers that a StatefulSet gives, as Envoy takes them."""
    return min((pod for pod in gateways if is_ready(pod) and pod.get("status", {}).get("podIP")), key=_order, default=None)


def ports_of(gateways: Iterable[Pod], told: Mapping[str, Mapping[str, int]]) -> Mapping[str, int] | None:
    """Where InferencePools are served: as the active process has told, or else another one, since all come to the same ports.
    None: nobody has told yet.

    Args:
        told: Ports by pool, by the name of the process.
    """
    gateways = list(gateways)
    first = active(gateways)
    others = sorted((pod for pod in gateways if is_live(pod)), key=_order)
    names = [pod["metadata"]["name"] for pod in ([first, *others] if first is not None else others)]
    return next((told[name] for name in names if name in told), None)


def _order(pod: Pod) -> tuple[int, str]:
    name = pod["metadata"]["name"]
    number = name.rpartition("-")[2]
    return (int(number) if number.isdigit() else 0, name)


def planned(services: Iterable[Object], pools: Iterable[Object], gateway: Pod | None, ports: Mapping[str, int]) -> Plan:
    """The EndpointSlice of each Service that an InferencePool of its namespace names.

    Args:
        services: Those with the label.
        pools: All InferencePools.
        gateway: The active process. None: there is none, and slices lead nowhere.
        ports: Where it serves each pool, by `namespace/name`.
    """
    plan = Plan()
    naming: dict[tuple[str, str], list[Object]] = {}
    for pool in sorted(pools, key=lambda it: (it["metadata"]["creationTimestamp"], it["metadata"]["name"])):
        if reference := pool["spec"].get("endpointPickerRef"):
            naming.setdefault((pool["metadata"]["namespace"], reference["name"]), []).append(pool)
    for service in sorted(services, key=lambda it: (it["metadata"]["namespace"], it["metadata"]["name"])):
        users = naming.get((service["metadata"]["namespace"], service["metadata"]["name"]), [])
        if not users:
            continue
        if service["spec"].get("selector"):
            plan.faults.append((service, "PickerHasSelector", "it has a selector: Kubernetes itself keeps its endpoints"))
            continue
        if found := _ports(service, users, ports, plan):
            plan.slices.append(_slice(service, gateway, found))
    return plan


def _ports(service: Object, users: list[Object], ports: Mapping[str, int], plan: Plan) -> list[Object]:
    """The slice's ports: for each port of the Service that a pool names, the one on which that pool is served."""
    names = {it["port"]: it.get("name", "") for it in service["spec"].get("ports", [])}
    taken: dict[int, str] = {}
    found: list[Object] = []
    for pool in users:
        meta, number = pool["metadata"], pool["spec"]["endpointPickerRef"].get("port", {}).get("number")
        served = ports.get(f"{meta['namespace']}/{meta['name']}")
        if number not in names:
            has = ", ".join(map(str, names)) or "none"
            words = f"Service {service['metadata']['name']} has no port {number}, which endpointPickerRef names: it has {has}"
            plan.faults.append((pool, "PickerPortMissing", words))
        elif number in taken:
            words = f"port {number} of Service {service['metadata']['name']} is the picker of {taken[number]}, which is older"
            plan.faults.append((pool, "PickerPortTaken", f"{words}: give the Service another port for this pool"))
        else:
            taken[number] = meta["name"]
            if served is not None:  # a gateway that has not seen the pool yet has no port for it
                found.append({"name": names[number], "port": served, "protocol": "TCP"})
    return sorted(found, key=lambda it: it["name"])


def _slice(service: Object, gateway: Pod | None, ports: list[Object]) -> Object:
    meta = service["metadata"]
    address = "" if gateway is None else gateway.get("status", {}).get("podIP", "")
    families: list[str] = service["spec"].get("ipFamilies") or ["IPv4"]
    family = f"IPv{ip_address(address).version}" if address else families[0]
    endpoints: list[dict[str, Any]] = [{"addresses": [address], "conditions": {"ready": True}}] if address else []
    owner = {"apiVersion": "v1", "kind": "Service", "name": meta["name"], "uid": meta["uid"], "controller": True}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{meta['name']}-penstock-{family.lower()}",  # the family of a slice cannot be changed
            "namespace": meta["namespace"],
            "labels": {SERVICE: meta["name"], MANAGED_BY: MANAGER},
            "ownerReferences": [owner],
        },
        "addressType": family,
        "endpoints": endpoints,
        "ports": ports,
    }
