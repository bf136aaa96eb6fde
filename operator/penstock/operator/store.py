"""What the operator knows: the resources as kopf reports them, their children as the caches hold them."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pydantic import ValidationError

from penstock.api import labels
from penstock.api.resources import InferenceModel
from penstock.kube.cache import Cache, Change, trimmed

Object = dict[str, Any]


class Key(NamedTuple):
    """One resource of a user."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def key_of(resource: Object) -> Key:
    """The key of a resource."""
    return Key(resource["kind"], resource["metadata"]["namespace"], resource["metadata"]["name"])


@dataclass(frozen=True)
class Claim:
    """A model's claim on the names that clients use; the oldest claim on a name wins, as in the gateway."""

    created: str
    id: str
    """`namespace/name`."""
    names: tuple[str, ...]


class Resources:
    """The users' resources, newest version first."""

    def __init__(self) -> None:
        self._objects: dict[Key, Object] = {}
        self._claims: dict[Key, Claim] = {}

    def get(self, key: Key) -> Object | None:
        """The resource, or None once it is deleted."""
        return self._objects.get(key)

    def known(self) -> list[Key]:
        """Everything known."""
        return list(self._objects)

    def put(self, resource: Object) -> None:
        """Keeps a version, unless a newer one of the same object is known: our own writes answer before the watch does."""
        key = key_of(resource)
        known = self._objects.get(key)
        if known is not None and known["metadata"]["uid"] == resource["metadata"]["uid"] and _version(resource) < _version(known):
            return
        self._objects[key] = trimmed(resource)
        if key.kind == "InferenceModel":
            claim = _claim(resource)
            if claim is None:
                self._claims.pop(key, None)
            else:
                self._claims[key] = claim

    def drop(self, key: Key) -> None:
        """Forgets a resource."""
        self._objects.pop(key, None)
        self._claims.pop(key, None)

    def rivals(self, key: Key) -> list[Key]:
        """Other models that claim one of this one's names."""
        mine = self._claims.get(key)
        if mine is None:
            return []
        return [other for other, claim in self._claims.items() if other != key and set(claim.names) & set(mine.names)]

    def conflict(self, key: Key) -> str:
        """A sentence that says which names an older model has; empty where there is none."""
        mine = self._claims.get(key)
        lost: list[str] = []
        for other in self.rivals(key):
            claim = self._claims[other]
            if mine is not None and (claim.created, claim.id) < (mine.created, mine.id):
                lost += [f"{name!r} is served by {claim.id}, which is older" for name in mine.names if name in claim.names]
        return f"{'; '.join(sorted(lost))}: choose another name" if lost else ""


def _version(resource: Object) -> int:
    return int(resource["metadata"]["resourceVersion"])


def _claim(resource: Object) -> Claim | None:
    """The claim, or None where the spec cannot be read (which is reported when it is reconciled)."""
    try:
        model = InferenceModel.parse(resource)
    except (ValidationError, ValueError):
        return None
    meta = resource["metadata"]
    created = meta.get("creationTimestamp") or datetime.now(UTC).isoformat()
    return Claim(created, f"{meta['namespace']}/{meta['name']}", tuple(model.served_names))


def trimmed_workload(workload: Object) -> Object:
    """A Deployment without `managedFields` but for who owns its `replicas`."""
    owners = [
        {"manager": entry.get("manager", "")}
        for entry in workload["metadata"].get("managedFields", [])
        if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
    ]
    kept = trimmed(workload)
    return {**kept, "metadata": {**kept["metadata"], "managedFields": owners}}


class Children:
    """The objects that carry the label `penstock.dev/model`, by the model that they name."""

    def __init__(self, changed: Callable[[Key], None]) -> None:
        """
        Args:
            changed: Told the model of each child that appears, changes or goes.
        """
        self._changed = changed
        self._by_model: dict[tuple[str, str], dict[tuple[str, str], Object]] = defaultdict(dict)

    def follow(self, cache: Cache, kind: str) -> None:
        """Keeps up with a cache of one kind. Call it before the cache runs."""
        cache.subscribe(lambda change: self.observe(kind, change))

    def observe(self, kind: str, change: Change) -> None:
        """Takes a change in."""
        namespace, name = change.key
        if change.old is not None:
            siblings = self._by_model[namespace, _model(change.old)]
            siblings.pop((kind, name), None)
            if not siblings:
                del self._by_model[namespace, _model(change.old)]
        if change.new is not None:
            self._by_model[namespace, _model(change.new)][kind, name] = change.new
        for model in {_model(it) for it in (change.old, change.new) if it is not None}:
            self._changed(Key("InferenceModel", namespace, model))

    def of(self, key: Key, kind: str) -> dict[str, Object]:
        """A model's children of one kind by name. Read-only: they are shared with the caches."""
        return {
            name: it for (its_kind, name), it in self._by_model.get((key.namespace, key.name), {}).items() if its_kind == kind
        }


def _model(child: Object) -> str:
    return str(child["metadata"].get("labels", {}).get(labels.MODEL, ""))
