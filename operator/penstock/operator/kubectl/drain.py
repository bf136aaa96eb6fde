"""`penstock drain`: a replica gets no new requests, finishes those that it has, and is evicted; then the next one.

Cordoning is what the autoscaler does too before it shrinks a pool: an annotation that every gateway reads. Eviction honours the
pool's PodDisruptionBudget, so of a pool with several replicas the next goes only when the last one's successor serves.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Final

from kubernetes.aio.client import ApiException

from penstock.api import labels
from penstock.operator.api import PODS, said
from penstock.operator.command_line import CommandFailed
from penstock.operator.kubectl.cluster import MANAGER, Cluster, Gateways
from penstock.operator.kubectl.top import merged
from penstock.operator.objects import Pod, as_pods
from penstock.operator.pods import is_live, is_ready

POLL_S: Final = 0.5
NOTICE_S: Final = 2.0
"""Seconds after cordoning in which a gateway may still choose the replica, so that "no request in flight" means nothing yet."""
TOO_MANY_REQUESTS: Final = 429
"""The budget allows no eviction now."""


async def run(cluster: Cluster, options: argparse.Namespace) -> None:
    """Drains a pod, or all replicas on a node, one by one."""
    if options.node:
        await cluster.api.cordon(options.node, not options.undo)
        query = {"labelSelector": labels.MODEL, "fieldSelector": f"spec.nodeName={options.node}"}
        pods = [it for it in as_pods(await cluster.listed_in(None, PODS, query)) if is_live(it)]
    else:
        pod = await cluster.api.get("Pod", cluster.namespace, options.pod)
        if pod is None or not pod["metadata"].get("labels", {}).get(labels.MODEL):
            raise CommandFailed(f"there is no replica {cluster.namespace}/{options.pod}")
        pods = as_pods([pod])
    if options.undo:
        for pod in pods:
            left = is_cordoned(await mark(cluster, pod, cordoned=False))
            sys.stdout.write(f"{_name(pod)} " + ("stays cordoned: somebody else did it\n" if left else "has requests again\n"))
        return
    if not options.force:
        await _expect_others(cluster, pods)
    for pod in pods:
        await Drain(cluster, options, pod).run()


async def _expect_others(cluster: Cluster, pods: Sequence[Pod]) -> None:
    """Raises CommandFailed where a pod is the only ready replica of its pool: its requests would be held, or turned away."""
    for pod in pods:
        if is_ready(pod) and not await others(cluster, pod):
            raise CommandFailed(
                f"{_name(pod)} is the only ready replica of its pool: until there is another, requests would be held. "
                "Scale the pool up first, or say --force"
            )


async def others(cluster: Cluster, pod: Pod) -> list[Pod]:
    """Ready replicas of the same pool that may have requests."""
    meta = pod["metadata"]
    selector = ",".join(f"{it}={meta['labels'][it]}" for it in (labels.MODEL, labels.POOL))
    siblings = as_pods(await cluster.listed_in(meta["namespace"], PODS, {"labelSelector": selector}))
    return [it for it in siblings if it["metadata"]["uid"] != meta["uid"] and is_ready(it) and not is_cordoned(it)]


def is_cordoned(pod: Pod) -> bool:
    """Whether gateways leave it out."""
    return pod["metadata"].get("annotations", {}).get(labels.CORDONED) == "true"


async def mark(cluster: Cluster, pod: Pod, *, cordoned: bool) -> Pod:
    """Set the annotation, or remove what these commands set. Return the resulting pod."""
    meta = pod["metadata"]
    annotations = {labels.CORDONED: "true"} if cordoned else {}
    head = {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"], "annotations": annotations}
    (marked,) = as_pods([await cluster.api.apply({"apiVersion": "v1", "kind": "Pod", "metadata": head}, MANAGER)])
    return marked


def requests_at(gateways: Gateways, uid: str) -> int:
    """Requests that the gateways have sent to a pod and that have not ended."""
    pools = merged(gateways.views).values()
    return sum(row.in_flight for pool in pools for (its_uid, _), row in pool.rows.items() if its_uid == uid)


class Drain:
    """One replica's."""

    def __init__(self, cluster: Cluster, options: argparse.Namespace, pod: Pod) -> None:
        self._cluster = cluster
        self._options = options
        self._pod = pod
        self._deadline = time.monotonic() + options.timeout

    async def run(self) -> None:
        """Raises CommandFailed where it takes too long; the replica stays cordoned then."""
        while is_ready(self._pod) and not self._options.force and not await others(self._cluster, self._pod):
            await self._wait("another replica of its pool is ready")
        await mark(self._cluster, self._pod, cordoned=True)
        self._say("gets no new requests")
        await asyncio.sleep(NOTICE_S)
        await self._empty()
        if self._options.keep:
            return
        while not await self._evict():
            await self._wait("its pool's budget lets one more go")
        while await self._there():
            await self._wait("it is gone")
        self._say("is gone")

    async def _empty(self) -> None:
        told = -1
        while True:
            gateways = await self._cluster.gateways(self._options)
            if len(gateways.views) < gateways.asked or not gateways.asked:
                # The engine finishes what it runs when it is told to stop, so nothing is lost by not knowing.
                self._say(f"{len(gateways.views)} of {gateways.asked} gateways answer: nobody knows how many requests it has")
                return
            left = requests_at(gateways, self._pod["metadata"]["uid"])
            if left != told:
                self._say(f"{left} requests in flight")
                told = left
            if not left:
                return
            await self._wait("its requests have ended")

    async def _evict(self) -> bool:
        """False: the budget allows none now."""
        meta = self._pod["metadata"]
        try:
            await self._cluster.api.evict(meta["namespace"], meta["name"], meta["uid"])
        except ApiException as error:
            if error.status == TOO_MANY_REQUESTS:
                return False
            if error.status not in (404, 409):  # gone, or another pod by now
                raise CommandFailed(f"{_name(self._pod)}: {said(error)}") from error
        return True

    async def _there(self) -> bool:
        meta = self._pod["metadata"]
        found = await self._cluster.api.get("Pod", meta["namespace"], meta["name"])
        return found is not None and found["metadata"]["uid"] == meta["uid"]

    async def _wait(self, until: str) -> None:
        if time.monotonic() > self._deadline:
            raise CommandFailed(f"{_name(self._pod)}: it takes longer than {self._options.timeout:g} s until {until}")
        await asyncio.sleep(POLL_S)

    def _say(self, what: str) -> None:
        sys.stdout.write(f"{_name(self._pod)}: {what}\n")
        sys.stdout.flush()


def _name(pod: Pod) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
