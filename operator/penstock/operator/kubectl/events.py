"""`penstock events`: what Kubernetes and the operator said of a model, its adapters and everything that was made for it."""

import argparse
import random
import sys
from collections.abc import Sequence
from typing import Any, Final

from kubernetes.aio.client import ApiException

from penstock.kube.cache import GONE
from penstock.kube.client import list_all, watch
from penstock.operator.api import ADAPTERS, CHILDREN, EVENTS, OPTIONAL, PODS, RESOURCES, WORKLOADS
from penstock.operator.command_line import CommandFailed
from penstock.operator.kubectl.cluster import Cluster, selector_of
from penstock.operator.objects import Object

Named = tuple[str, str]
"""Kind and name."""

_MADE_BY_WORKLOADS: Final = ("Pod", "ReplicaSet", "StatefulSet")
"""Kinds whose names begin with the workload's name. Events of deleted objects are shown too."""
SILENCE_S: Final = 150.0


async def run(cluster: Cluster, options: argparse.Namespace) -> None:
    """Writes them, and with --watch those to come."""
    assert cluster.namespace is not None
    if await cluster.api.get("InferenceModel", cluster.namespace, options.model) is None:
        raise CommandFailed(f"there is no InferenceModel {cluster.namespace}/{options.model}")
    family = await _family(cluster, options.model)
    found, version = await list_all(cluster.client, EVENTS.path(cluster.namespace), {})
    for event in sorted((it for it in found if concerns(it, family)), key=when):
        sys.stdout.write(line(event))
    while options.watch:
        sys.stdout.flush()
        query = {"resourceVersion": version, "timeoutSeconds": str(random.randint(300, 600))}
        try:
            async for kind, event in watch(cluster.client, EVENTS.path(cluster.namespace), query, SILENCE_S):
                version = event["metadata"]["resourceVersion"]
                if kind in ("BOOKMARK", "DELETED"):
                    continue
                if not concerns(event, family):
                    family = await _family(cluster, options.model)  # a new child, maybe
                if concerns(event, family):
                    sys.stdout.write(line(event))
                    sys.stdout.flush()
        except ApiException as error:
            if error.status != GONE:
                raise
            version = (await list_all(cluster.client, EVENTS.path(cluster.namespace), {}))[1]


async def _family(cluster: Cluster, model: str) -> set[Named]:
    """The model, its adapters, and what carries its label."""
    found: set[Named] = {("InferenceModel", model)}
    adapters = await cluster.listed(ADAPTERS)
    found |= {("LoraAdapter", it["metadata"]["name"]) for it in adapters if it["spec"]["modelRef"]["name"] == model}
    for kind in (*CHILDREN, "Pod"):
        resource = PODS if kind == "Pod" else RESOURCES[kind]
        items = await cluster.listed(resource, selector_of(model), optional=kind in OPTIONAL)
        found |= {(kind, it["metadata"]["name"]) for it in items}
    return found


def concerns(event: Object, family: set[Named]) -> bool:
    """Whether it is about one of these, or about something that one of these workloads made."""
    about = event["involvedObject"]
    kind, name = about.get("kind", ""), about.get("name", "")
    if (kind, name) in family:
        return True
    workloads = [its_name for its_kind, its_name in family if its_kind in WORKLOADS]
    return kind in _MADE_BY_WORKLOADS and any(name.startswith(f"{workload}-") for workload in workloads)


def when(event: Object) -> str:
    """Return the last time of an event, RFC 3339."""
    series: Sequence[Any] = (
        event.get("series", {}).get("lastObservedTime") if event.get("series") else None,
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event["metadata"]["creationTimestamp"],
    )
    return str(next(it for it in series if it))


def line(event: Object) -> str:
    """One line of the list."""
    about, count = event["involvedObject"], event.get("count") or 1
    times = f"  (x{count})" if count > 1 else ""
    message = " ".join(event.get("message", "").split())
    words = [f"{when(event)[:19]}Z", f"{event.get('type', ''):<7}", f"{event['reason']:<20}", f"{about['kind']}/{about['name']}"]
    return "  ".join([*words, message]) + times + "\n"
