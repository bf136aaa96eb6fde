"""The fleet from the API server: InferenceModels give models and pools, labelled pods give replicas."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import datetime
from typing import Any

from kubernetes.aio.client import ApiClient

from penstock.api import labels
from penstock.api.fleet import Fleet, Model, Pool, Replica, pool_id
from penstock.api.resources import seconds
from penstock.gateway.discovery.claims import oldest_claims
from penstock.kube.cache import Cache, Change
from penstock.kube.client import PODS, Object, Resource, connect

log = logging.getLogger(__name__)

MODELS = Resource(labels.GROUP, labels.VERSION, "inferencemodels")
PORTS = (labels.HTTP_PORT, labels.EVENTS_PORT, labels.REPLAY_PORT)


class KubernetesDiscovery:
    """Watches InferenceModels and their pods, in one namespace or in all."""

    def __init__(self, namespace: str | None, connect: Callable[[], Awaitable[ApiClient]] = connect) -> None:
        self._namespace = namespace
        self._connect = connect

    async def watch(self) -> AsyncIterator[Fleet]:
        """See `Discovery.watch`."""
        async with await self._connect() as api:
            models = Cache(api, MODELS, namespace=self._namespace)
            pods = Cache(api, PODS, namespace=self._namespace, label_selector=labels.MODEL, trim=trimmed_pod)
            changed = asyncio.Event()
            tasks = [asyncio.create_task(cache.run()) for cache in (models, pods)]

            def wake(_: Change | asyncio.Task[None]) -> None:
                changed.set()

            for cache in (models, pods):
                cache.subscribe(wake)
            for task in tasks:
                task.add_done_callback(wake)  # a cache ends only by a bug, which must end this too
            try:
                async for fleet in _fleets(models, pods, changed, tasks):
                    yield fleet
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


async def _fleets(models: Cache, pods: Cache, changed: asyncio.Event, tasks: list[asyncio.Task[None]]) -> AsyncIterator[Fleet]:
    await models.synced.wait()
    await pods.synced.wait()
    last = None
    while True:
        changed.clear()
        for task in tasks:
            if task.done():
                task.result()
        fleet = fleet_of(models.objects.values(), pods.objects.values())
        if fleet != last:  # most of a pod's changes are none for us
            last = fleet
            yield fleet
        await changed.wait()


def fleet_of(models: Iterable[Object], pods: Iterable[Object]) -> Fleet:
    """The fleet that these objects describe, in a stable order. An InferenceModel that cannot be read is logged and left out."""
    known: list[Model] = []
    pools: list[Pool] = []
    for item in models:
        try:
            model, its_pools = _model(item)
        except (KeyError, TypeError, ValueError) as error:
            log.error("InferenceModel %s is left out: %r", _id(item), error)
            continue
        known.append(model)
        pools.extend(its_pools)
    pools.sort(key=lambda pool: pool.id)
    names = {pool.id for pool in pools}
    replicas = [replica for pod in pods if (replica := _replica(pod)) is not None and replica.pool in names]
    return Fleet(models=oldest_claims(known), pools=pools, replicas=sorted(replicas, key=lambda it: (it.pool, it.name)))


def trimmed_pod(pod: Object) -> Object:
    """What discovery reads of a pod; a cluster's pods would be a hundred times as much."""
    metadata, status = pod["metadata"], pod.get("status", {})
    kept = ("name", "namespace", "uid", "resourceVersion", "labels", "annotations", "deletionTimestamp")
    return {
        "metadata": {name: metadata[name] for name in kept if name in metadata},
        "spec": {"containers": [{"ports": container.get("ports", [])} for container in pod["spec"]["containers"]]},
        "status": {name: status[name] for name in ("phase", "podIP", "conditions") if name in status},
    }


def _id(item: Object) -> str:
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"


def _model(item: Object) -> tuple[Model, list[Pool]]:
    # Not `InferenceModel.parse`, which refuses fields that it does not know: a gateway must go on serving under a newer CRD.
    spec: dict[str, Any] = item["spec"]
    served, routing = spec["served"], spec.get("routing", {})
    model = Model(
        id=_id(item),
        served_names=[served["name"], *served.get("aliases", [])],
        created=datetime.fromisoformat(item["metadata"]["creationTimestamp"]).timestamp(),
        policy=routing.get("policy", "Cost"),
        hold_timeout_s=seconds(routing.get("holdTimeout", "5m")),
    )
    place = item["metadata"]["namespace"], item["metadata"]["name"]
    pools = [Pool(id=pool_id(*place, pool["name"]), model=model.id, role=pool.get("role", "Both")) for pool in spec["pools"]]
    return model, pools


def _replica(pod: Object) -> Replica | None:
    """The pod as a replica, or None while it has no address or no named ports, and once it has ended."""
    metadata, status = pod["metadata"], pod["status"]
    marks = metadata.get("labels", {})
    ports = {port.get("name"): port["containerPort"] for container in pod["spec"]["containers"] for port in container["ports"]}
    if status.get("phase") in ("Succeeded", "Failed") or not status.get("podIP") or labels.POOL not in marks:
        return None
    if missing := [name for name in PORTS if name not in ports]:
        log.error("pod %s/%s is left out: no container port named %s", metadata["namespace"], metadata["name"], missing)
        return None
    conditions = {condition["type"]: condition["status"] for condition in status.get("conditions", [])}
    return Replica(
        uid=metadata["uid"],
        name=metadata["name"],
        pool=pool_id(metadata["namespace"], marks[labels.MODEL], marks[labels.POOL]),
        host=status["podIP"],
        port=ports[labels.HTTP_PORT],
        events_port=ports[labels.EVENTS_PORT],
        replay_port=ports[labels.REPLAY_PORT],
        ready=conditions.get("Ready") == "True",
        terminating="deletionTimestamp" in metadata,
        cordoned=metadata.get("annotations", {}).get(labels.CORDONED) == "true",
    )
