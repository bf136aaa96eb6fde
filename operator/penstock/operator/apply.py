"""Makes a model's children what they should be: applies what differs, prunes what is too much, touches nothing of others."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence, Set
from typing import Final

from penstock.api import labels
from penstock.operator.api import CHILDREN, RESOURCES, WORKLOADS, Api
from penstock.operator.desired import Size
from penstock.operator.objects import AnyObject, Object
from penstock.operator.overlay import covers
from penstock.operator.store import Children, Key

log = logging.getLogger(__name__)

Name = tuple[str, str]
"""Kind and name of a child."""

MANAGER: Final = "penstock"
SCALE_MANAGER: Final = "penstock-scale"
APPLIED: Final = "penstock.dev/applied"
"""Annotation on a child: hash of what was last applied, so that a field which is no longer wanted is noticed."""


class NotOwned(Exception):
    """An object of the child's name exists and is someone else's; the message names it and says what to do."""


class OwnerGone(Exception):
    """The model is deleted, or another one has its name by now: what it owned must not come back."""


class Applier:
    """Applies children through `api`, comparing with what `children` knows."""

    def __init__(self, api: Api, children: Children, absent: Callable[[str], bool] = lambda kind: False) -> None:
        """
        Args:
            absent: Whether the API server does not know a kind: its objects are left out.
        """
        self._api = api
        self._children = children
        self.absent = absent
        self._sent: dict[tuple[str, str, str], tuple[str, int]] = {}
        """What was last applied (digest), and the object's generation then: the API server may write a value otherwise than we
        do (`500m` for `0.5`), which is no reason to apply it again and again."""

    async def apply(
        self, key: Key, uid: str, wanted: Sequence[Object], sizes: dict[str, Size], kept: Set[Name] = frozenset()
    ) -> None:
        """Makes the model's children exactly `wanted`, and leaves those alone that are `kept`.

        Args:
            uid: The model's; children are those that it controls.
            sizes: By name of the workload.
            kept: Kind and name.

        Raises:
            NotOwned: a name is taken; objects before it have been applied.
            OwnerGone: the model itself is no more.
            ApiException: the server refused one.
        """
        owner_checked = False
        for item in wanted:
            if self.absent(item["kind"]):
                continue
            live = self._children.of(key, item["kind"]).get(item["metadata"]["name"])
            if live is None:
                # The garbage collector may be at work, and the watch of the models late to say why.
                if not owner_checked and not await self._owner_lives(key, uid):
                    raise OwnerGone(str(key))
                owner_checked = True
                live = await self._api.get(item["kind"], key.namespace, item["metadata"]["name"])
            if live is not None and not owned(live, uid):
                raise _not_owned(key, item, live)
            if item["kind"] in WORKLOADS:
                await self._workload(item, live, sizes[item["metadata"]["name"]])
            else:
                await self._send(item, live)
        await self._prune(key, uid, {(item["kind"], item["metadata"]["name"]) for item in wanted} | kept)

    async def ensure(self, key: Key, uid: str, item: Object) -> Object | None:
        """Create the child if there is none and return None; otherwise return the live object unchanged.

        Raises:
            NotOwned, OwnerGone, ApiException: see `apply`.
        """
        name = item["metadata"]["name"]
        live = self._children.of(key, item["kind"]).get(name) or await self._api.get(item["kind"], key.namespace, name)
        if live is None:
            if not await self._owner_lives(key, uid):
                raise OwnerGone(str(key))
            await self._send(item, None)
        elif not owned(live, uid):
            raise _not_owned(key, item, live)
        return live

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
        log.info("applying %s: %s", described(item), _why(digest, live))
        applied = await self._api.apply(marked, MANAGER)
        self._sent[name] = (digest, applied["metadata"].get("generation", 0))

    async def _workload(self, item: Object, live: Object | None, size: Size) -> None:
        """Apply a workload. Where another controller decides its size, hand over the field `replicas` in three steps: create with
        it, let
        `penstock-scale` own it too, then stop sending it. An owner that merely stops sending the field would reset it to 1."""
        if size.owner == "spec":
            await self._send(item, live)
            return
        place = (item["metadata"]["namespace"], item["metadata"]["name"])
        if live is None:
            # Not stamped: the next look applies it once more, without `replicas`.
            log.info("applying %s: there is none", described(item))
            await self._api.apply(item, MANAGER)
            await self.scale(*place, size.initial, item["kind"])
            return
        if not handed_over(live):
            await self.scale(*place, live["spec"].get("replicas", 1), item["kind"])
        spec = {name: value for name, value in item["spec"].items() if name != "replicas"}
        await self._send({**item, "spec": spec}, live)

    async def scale(self, namespace: str, name: str, replicas: int, kind: str = "Deployment") -> None:
        """Sets a workload's replicas, and nothing else of it."""
        log.info("setting the replicas of %s %s/%s to %d", kind, namespace, name, replicas)
        resource = RESOURCES[kind]
        body = {
            "apiVersion": f"{resource.group}/{resource.version}",
            "kind": kind,
            "metadata": {"namespace": namespace, "name": name},
            "spec": {"replicas": replicas},
        }
        await self._api.apply(body, SCALE_MANAGER)

    async def _prune(self, key: Key, uid: str, wanted: Set[Name]) -> None:
        for kind in CHILDREN:
            for name, live in self._children.of(key, kind).items():
                if (kind, name) in wanted or not owned(live, uid) or "deletionTimestamp" in live["metadata"]:
                    continue
                if kind != "NetworkPolicy" or not self._guards(key, live):
                    log.info("deleting %s: it is no longer wanted", described({"kind": kind, **live}))
                    await self._api.delete({"kind": kind, **live})

    def _guards(self, key: Key, policy: Object) -> bool:
        """Whether a NetworkPolicy's pods are still there, such as those that drain; the end of each is a reason to look again."""
        selector = policy["spec"]["podSelector"]["matchLabels"].items()
        return any(selector <= pod["metadata"]["labels"].items() for pod in self._children.pods(key))


def owned(live: AnyObject, uid: str) -> bool:
    """Whether the model with this UID controls the object."""
    return any(owner.get("uid") == uid and owner.get("controller") for owner in live["metadata"].get("ownerReferences", []))


def _not_owned(key: Key, item: Object, live: Object) -> NotOwned:
    name = f"{item['kind']} {item['metadata']['name']}"
    owners: list[Object] = live["metadata"].get("ownerReferences", [])
    if any((owner["kind"], owner["name"], owner.get("controller")) == (key.kind, key.name, True) for owner in owners):
        return NotOwned(f"{name} is of a deleted model of this name: it is made anew when the garbage collector has taken it")
    return NotOwned(f"{name} exists and is not this model's: delete it, or rename the model or the pool")


def handed_over(workload: AnyObject) -> bool:
    """Return whether a manager other than `penstock` owns the workload's `replicas` (see `store.trimmed_workload`)."""
    return any(entry["manager"] != MANAGER for entry in workload["metadata"].get("managedFields", []))


def described(item: Object) -> str:
    """Describe an object for the log: kind, namespace, name, and its revision if it has one."""
    meta: Object = item["metadata"]
    template: Object = item.get("spec", {}).get("template", {}).get("metadata", {})
    revision = (meta.get("labels", {}) | template.get("labels", {})).get(labels.REVISION)
    return f"{item['kind']} {meta['namespace']}/{meta['name']}" + (f" of revision {revision}" if revision else "")


def _why(digest: str, live: Object | None) -> str:
    if live is None:
        return "there is none"
    if live["metadata"].get("annotations", {}).get(APPLIED) != digest:
        return "what is wanted has changed"
    return "another client has changed it"


def stamped(item: Object) -> Object:
    """The object with the hash of itself as annotation."""
    digest = hashlib.sha256(json.dumps(item, sort_keys=True).encode()).hexdigest()[:16]
    metadata = item["metadata"]
    return {**item, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), APPLIED: digest}}}
