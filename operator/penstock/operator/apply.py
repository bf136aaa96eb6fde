"""Makes a model's children what they should be: applies what differs, prunes what is too much, touches nothing of others."""

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any, Final

from penstock.operator.api import Api
from penstock.operator.desired import Size
from penstock.operator.overlay import covers
from penstock.operator.store import Children, Key

log = logging.getLogger(__name__)

Object = dict[str, Any]

MANAGER: Final = "penstock"
SCALE_MANAGER: Final = "penstock-scale"
KINDS: Final = ("Service", "PodDisruptionBudget", "Deployment")
APPLIED: Final = "penstock.dev/applied"
"""Annotation on a child: hash of what was last applied, so that a field which is no longer wanted is noticed."""


class NotOwned(Exception):
    """An object of the child's name exists and is someone else's; the message names it and says what to do."""


class OwnerGone(Exception):
    """The model is deleted, or another one has its name by now: what it owned must not come back."""


class Applier:
    """Applies children through `api`, comparing with what `children` knows."""

    def __init__(self, api: Api, children: Children) -> None:
        self._api = api
        self._children = children
        self._sent: dict[tuple[str, str, str], tuple[str, int]] = {}
        """What was last applied (digest), and the object's generation then: the API server may write a value otherwise than we
        do (`500m` for `0.5`), which is no reason to apply it again and again."""

    async def apply(self, key: Key, uid: str, wanted: Sequence[Object], sizes: dict[str, Size]) -> None:
        """Makes the model's children exactly `wanted`.

        Args:
            uid: The model's; children are those that it controls.
            sizes: By name of the Deployment.

        Raises:
            NotOwned: a name is taken; objects before it have been applied.
            OwnerGone: the model itself is no more.
            ApiException: the server refused one.
        """
        owner_checked = False
        for item in wanted:
            live = self._children.of(key, item["kind"]).get(item["metadata"]["name"])
            if live is None:
                # The garbage collector may be at work, and the watch of the models late to say why.
                if not owner_checked and not await self._owner_lives(key, uid):
                    raise OwnerGone(str(key))
                owner_checked = True
                live = await self._api.get(item["kind"], key.namespace, item["metadata"]["name"])
            if live is not None and not owned(live, uid):
                name = f"{item['kind']} {item['metadata']['name']}"
                raise NotOwned(f"{name} exists and is not this model's: delete it, or rename the model or the pool")
            if item["kind"] == "Deployment":
                await self._workload(item, live, sizes[item["metadata"]["name"]])
            else:
                await self._send(item, live)
        await self._prune(key, uid, {(item["kind"], item["metadata"]["name"]) for item in wanted})

    async def _owner_lives(self, key: Key, uid: str) -> bool:
        owner = await self._api.get(key.kind, key.namespace, key.name)
        return owner is not None and owner["metadata"]["uid"] == uid and "deletionTimestamp" not in owner["metadata"]

    async def _send(self, item: Object, live: Object | None) -> None:
        marked = stamped(item)
        name = (item["kind"], item["metadata"]["namespace"], item["metadata"]["name"])
        digest = marked["metadata"]["annotations"][APPLIED]
        if live is not None:
            generation = live["metadata"].get("generation")
            if covers(live, marked) or (generation is not None and self._sent.get(name) == (digest, generation)):
                return
        log.info("applying %s %s/%s", *name)
        applied = await self._api.apply(marked, MANAGER)
        self._sent[name] = (digest, applied["metadata"].get("generation", 0))

    async def _workload(self, item: Object, live: Object | None, size: Size) -> None:
        """Where others decide the size, the field `replicas` is handed to them in three steps: create with it, let
        `penstock-scale` own it too, then stop sending it. An owner that merely stops sending it would reset it to 1."""
        if size.owner == "spec":
            await self._send(item, live)
            return
        if live is None:
            # Not stamped: the next look applies it once more, without `replicas`.
            await self._api.apply(item, MANAGER)
            await self.scale(item["metadata"]["namespace"], item["metadata"]["name"], size.initial)
            return
        if not handed_over(live):
            await self.scale(item["metadata"]["namespace"], item["metadata"]["name"], live["spec"].get("replicas", 1))
        spec = {name: value for name, value in item["spec"].items() if name != "replicas"}
        await self._send({**item, "spec": spec}, live)

    async def scale(self, namespace: str, name: str, replicas: int) -> None:
        """Sets a Deployment's replicas, and nothing else of it."""
        body = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"namespace": namespace, "name": name},
            "spec": {"replicas": replicas},
        }
        await self._api.apply(body, SCALE_MANAGER)

    async def _prune(self, key: Key, uid: str, wanted: set[tuple[str, str]]) -> None:
        for kind in KINDS:
            for name, live in self._children.of(key, kind).items():
                if (kind, name) not in wanted and owned(live, uid) and "deletionTimestamp" not in live["metadata"]:
                    log.info("deleting %s %s/%s, which is no longer wanted", kind, key.namespace, name)
                    await self._api.delete({"kind": kind, **live})


def owned(live: Object, uid: str) -> bool:
    """Whether the model with this UID controls the object."""
    return any(owner.get("uid") == uid and owner.get("controller") for owner in live["metadata"].get("ownerReferences", []))


def handed_over(workload: Object) -> bool:
    """Whether somebody besides `penstock` owns the workload's `replicas` (see `store.trimmed_workload`)."""
    return any(entry["manager"] != MANAGER for entry in workload["metadata"].get("managedFields", []))


def stamped(item: Object) -> Object:
    """The object with the hash of itself as annotation."""
    digest = hashlib.sha256(json.dumps(item, sort_keys=True).encode()).hexdigest()[:16]
    metadata = item["metadata"]
    return {**item, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), APPLIED: digest}}}
