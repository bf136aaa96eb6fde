"""The fleet that Kubernetes objects describe. Pure: objects in, a fleet out.

Resources are read with tolerance, not parsed: a gateway must go on serving under a CRD that is newer than itself.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from typing import Any, TypeVar, get_args

import msgspec

from penstock.api import labels
from penstock.api.fleet import Adapter, Canary, Fleet, Model, Pool, Replica, Role, Weights, pool_id, ranks_of
from penstock.api.resources import seconds
from penstock.gateway.discovery.inference_pools import Selected, select
from penstock.kube.cache import Key
from penstock.kube.client import Object

log = logging.getLogger(__name__)

ROLES = get_args(Role)
PORTS = (labels.HTTP_PORT, labels.EVENTS_PORT, labels.REPLAY_PORT)

Read = TypeVar("Read")


def fleet_of(
    models: Iterable[Object],
    pods: Iterable[Object],
    adapters: Iterable[Object] = (),
    inference_pools: Mapping[Key, tuple[Object, Sequence[Object]]] | None = None,
) -> Fleet:
    """The fleet that these objects describe, in a stable order. What cannot be read is logged and left out.

    Args:
        models: InferenceModels.
        pods: Those that carry the label of a model.
        adapters: LoraAdapters.
        inference_pools: InferencePools with the pods that each selects, labelled or not.
    """
    known: list[Model] = []
    pools: list[Pool] = []
    scaling: dict[str, str] = {}
    for model, its_pools, said in _readable("InferenceModel", models, _model):
        known.append(model)
        pools.extend(its_pools)
        scaling.update(said)
    pods = list(pods)
    pools.extend(_leaving(pods, {model.id for model in known}, {pool.id for pool in pools}))
    names = {pool.id for pool in pools}
    replicas: dict[str, list[Replica]] = {}
    for replica in (it for pod in pods for it in _replicas(pod) if it.pool in names):
        replicas.setdefault(replica.process, []).append(replica)
    selected = Selected(models={model.id: model for model in known}, pools={pool.id: pool for pool in pools}, replicas=replicas)
    given = sorted((inference_pools or {}).values(), key=lambda it: (it[0]["metadata"]["creationTimestamp"], id_of(it[0])))
    for item, its_pods in given:
        for _ in _readable("InferencePool", [item], lambda item, its_pods=its_pods: select(item, its_pods, selected)):
            pass
    return Fleet(
        models=sorted(selected.models.values(), key=lambda it: it.id),
        pools=sorted(selected.pools.values(), key=lambda it: it.id),
        replicas=sorted((it for its in selected.replicas.values() for it in its), key=lambda it: (it.pool, it.name)),
        scaling=scaling,
        adapters=sorted(_readable("LoraAdapter", adapters, _adapter), key=lambda it: it.id),
        inference_pools=sorted(selected.inference_pools, key=lambda it: it.id),
    )


def id_of(item: Object) -> str:
    """`namespace/name`."""
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"


def created(item: Object) -> float:
    """When the object was made, Unix time."""
    return datetime.fromisoformat(item["metadata"]["creationTimestamp"]).timestamp()


def trimmed_pod(pod: Object) -> Object:
    """What discovery reads of a pod; a cluster's pods would be a hundred times as much."""
    metadata, status = pod["metadata"], pod.get("status", {})
    kept = ("name", "namespace", "uid", "resourceVersion", "labels", "annotations", "deletionTimestamp")
    return {
        "metadata": {name: metadata[name] for name in kept if name in metadata},
        "spec": {"containers": [{"ports": container.get("ports", [])} for container in pod["spec"]["containers"]]},
        "status": {name: status[name] for name in ("phase", "podIP", "conditions") if name in status},
    }


def _readable(kind: str, items: Iterable[Object], read: Callable[[Object], Read]) -> Iterator[Read]:
    for item in items:
        try:
            yield read(item)
        except (KeyError, TypeError, ValueError) as error:
            log.error("%s %s is left out: %r", kind, id_of(item), error)


def _model(item: Object) -> tuple[Model, list[Pool], dict[str, str]]:
    spec: dict[str, Any] = item["spec"]
    served, routing = spec["served"], spec.get("routing", {})
    model = Model(
        id=id_of(item),
        served_names=[served["name"], *served.get("aliases", [])],
        created=created(item),
        policy=routing.get("policy", "Cost"),
        weights=msgspec.convert(routing.get("weights") or {}, Weights),
        priority=routing.get("priority", 0),
        hold_timeout_s=seconds(routing.get("holdTimeout", "5m")),
        canary=_canary(spec["canary"], item.get("status", {}).get("canary", {})) if "canary" in spec else None,
    )
    place = item["metadata"]["namespace"], item["metadata"]["name"]
    pools = [Pool(id=pool_id(*place, pool["name"]), model=model.id, role=pool.get("role", "Both")) for pool in spec["pools"]]
    return model, pools, _scaling(place, item.get("status", {}).get("scaling") or [])


def _scaling(place: tuple[str, str], said: Iterable[Object]) -> dict[str, str]:
    """What the autoscaler says of a model's pools in its status, by pool id."""
    return {pool_id(*place, it["pool"]): f"{it.get('constraint', 'Unknown')}: {it.get('reason', '')}" for it in said}


def _leaving(pods: Iterable[Object], models: Set[str], known: Set[str]) -> list[Pool]:
    """Pools that their models name no longer, and whose pods are still there: the operator lets them serve until others do."""
    found: dict[str, Pool] = {}
    for pod in pods:
        marks = pod["metadata"].get("labels", {})
        model = f"{pod['metadata']['namespace']}/{marks.get(labels.MODEL)}"
        if model in models and labels.POOL in marks and marks.get(labels.ROLE) in ROLES:
            name = pool_id(pod["metadata"]["namespace"], marks[labels.MODEL], marks[labels.POOL])
            found[name] = Pool(id=name, model=model, role=marks[labels.ROLE])
    return [pool for name, pool in found.items() if name not in known]


def _canary(spec: Mapping[str, Any], judged: Mapping[str, Any]) -> Canary:
    """Return the canary. If it is judged, its weight is the operator's present one, and never more than the user allows."""
    weight = spec["weight"]
    if "judge" in spec:
        first = spec["judge"].get("steps") or [weight]
        weight = min(weight, judged.get("weight", first[0]))
    return Canary(of=spec["of"], weight=weight)


def _adapter(item: Object) -> Adapter:
    spec, served = item["spec"], item["spec"]["served"]
    return Adapter(
        id=id_of(item),
        model=f"{item['metadata']['namespace']}/{spec['modelRef']['name']}",
        served_names=[served["name"], *served.get("aliases", [])],
        created=created(item),
    )


def _replicas(pod: Object) -> list[Replica]:
    """The pod as a replica for each of its data-parallel ranks; none while it has no address or no named ports, and once it has
    ended."""
    metadata, status = pod["metadata"], pod["status"]
    marks = metadata.get("labels", {})
    ports = {port.get("name"): port["containerPort"] for container in pod["spec"]["containers"] for port in container["ports"]}
    if status.get("phase") in ("Succeeded", "Failed") or not status.get("podIP") or labels.POOL not in marks:
        return []
    if missing := [name for name in PORTS if name not in ports]:
        log.error("pod %s/%s is left out: no container port named %s", metadata["namespace"], metadata["name"], missing)
        return []
    conditions = {condition["type"]: condition["status"] for condition in status.get("conditions", [])}
    whole = Replica(
        uid=metadata["uid"],
        name=metadata["name"],
        pool=pool_id(metadata["namespace"], marks[labels.MODEL], marks[labels.POOL]),
        host=status["podIP"],
        port=ports[labels.HTTP_PORT],
        events_port=ports[labels.EVENTS_PORT],
        replay_port=ports[labels.REPLAY_PORT],
        ready=conditions.get("Ready") == "True",
        terminating="deletionTimestamp" in metadata,
        kv_layout=metadata.get("annotations", {}).get(labels.KV_LAYOUT, ""),
        cordoned=metadata.get("annotations", {}).get(labels.CORDONED) == "true",
    )
    return ranks_of(whole, ports)
