"""What the operator knows: the resources, and their children as the caches hold them."""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeVar, cast

from pydantic import ValidationError

from penstock.api import labels
from penstock.api.resources import InferenceModel, LoraAdapter
from penstock.kube.cache import Change, trimmed
from penstock.kube.caches import Caches
from penstock.operator.objects import Object, Pod
from penstock.operator.pods import of_pool

T = TypeVar("T")

_POD_METADATA: Final = ("name", "namespace", "uid", "resourceVersion", "labels", "creationTimestamp", "deletionTimestamp")
_POD_STATUS: Final = ("phase", "reason", "message", "podIP")
_CONDITION: Final = ("type", "status", "reason", "message", "lastTransitionTime")
_CONTAINER_STATUS: Final = ("name", "ready", "state", "lastState")

_once: Final[Callable[[str], str]] = str if sys.version_info[:2] == (3, 12) else sys.intern
"""The same string, once in memory; 3.12 would keep it for ever."""


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
    """A claim of a model, or of an adapter on one, to names that clients use; the oldest claim to a name wins, as in the
    gateway."""

    created: str
    who: str
    """Kind, namespace and name."""
    names: tuple[str, ...]
    model: Key
    """Itself, or the model that the adapter is for: one without its model claims nothing."""


class Resources:
    """The users' resources, newest version first."""

    def __init__(self) -> None:
        self._objects: dict[Key, Object] = {}
        self._claims: dict[Key, Claim] = {}
        # Who claims a name, and whose claims are for a model: a look at one model must not be a look at all.
        self._by_name: defaultdict[str, set[Key]] = defaultdict(set)
        self._by_model: defaultdict[Key, set[Key]] = defaultdict(set)

    def get(self, key: Key) -> Object | None:
        """The resource, or None once it is deleted."""
        return self._objects.get(key)

    def known(self) -> list[Key]:
        """Return the keys of all known objects."""
        return list(self._objects)

    def put(self, resource: Object) -> None:
        """Keeps a version, unless a newer one is known, of this object or of another of its name: our own writes answer before
        the watch does, and kopf tells of two objects in any order."""
        key = key_of(resource)
        known = self._objects.get(key)
        if known is not None and version_of(resource) < version_of(known):
            return
        self._objects[key] = _shared(trimmed(resource))
        self._claim(key, _claim(key, resource))

    def drop(self, key: Key) -> None:
        """Forgets a resource."""
        self._objects.pop(key, None)
        self._claim(key, None)

    def _claim(self, key: Key, claim: Claim | None) -> None:
        """Replaces what a resource claims."""
        old = self._claims.pop(key, None)
        if old is not None:
            _forget(self._by_model, old.model, key)
            for name in old.names:
                _forget(self._by_name, name, key)
        if claim is not None:
            self._claims[key] = claim
            self._by_model[claim.model].add(key)
            for name in claim.names:
                self._by_name[name].add(key)

    def model_of(self, key: Key) -> Key | None:
        """The model that a resource is, or is for; None where its spec cannot be read."""
        claim = self._claims.get(key)
        return None if claim is None else claim.model

    def adapters_of(self, model: Key) -> list[Key]:
        """The LoraAdapters that are for a model, whether or not there is one."""
        return sorted(self._by_model.get(model, set()) - {model})

    def adapter_names(self, model: Key) -> list[str]:
        """The names by which clients ask for a model's adapters, without those that an older resource claims."""
        mine = [self._claims[key] for key in self.adapters_of(model)]
        return sorted({name for claim in mine for name in claim.names if self._oldest(name) is claim})

    def _oldest(self, name: str) -> Claim:
        return min((self._claims[key] for key in self._by_name[name]), key=lambda claim: (claim.created, claim.who))

    def rivals(self, key: Key) -> list[Key]:
        """Other models and adapters that claim a name of this one, or one of an adapter that is for it."""
        claimants = {key, *self._by_model.get(key, ())}.intersection(self._claims)
        names = {name for claimant in claimants for name in self._claims[claimant].names}
        return sorted({other for name in names for other in self._by_name[name]} - {key})

    def conflict(self, key: Key) -> str:
        """A sentence that says which names an older model or adapter has; empty where there is none."""
        mine = self._claims.get(key)
        lost: list[str] = []
        for other in self.rivals(key):
            claim = self._claims[other]
            if mine is not None and claim.model in self._claims and (claim.created, claim.who) < (mine.created, mine.who):
                lost += [f"{name!r} is served by {claim.who}, which is older" for name in mine.names if name in claim.names]
        return f"{'; '.join(sorted(lost))}: choose another name" if lost else ""


def _forget(index: dict[T, set[Key]], value: T, key: Key) -> None:
    """Takes a key out of an index, and an entry without keys too."""
    index[value].discard(key)
    if not index[value]:
        del index[value]


def version_of(resource: Object) -> int:
    """Return the version as a number, so that versions can be compared."""
    return int(resource["metadata"]["resourceVersion"])


def _claim(key: Key, resource: Object) -> Claim | None:
    """The claim, or None where the spec cannot be read (which is reported when it is reconciled)."""
    try:
        if key.kind == "InferenceModel":
            served, model = InferenceModel.parse(resource).spec.served, key
        else:
            spec = LoraAdapter.parse(resource).spec
            served, model = spec.served, Key("InferenceModel", key.namespace, spec.model_ref.name)
    except (ValidationError, ValueError):
        return None
    created = resource["metadata"].get("creationTimestamp") or datetime.now(UTC).isoformat()
    return Claim(created, str(key), (served.name, *served.aliases), model)


def trimmed_child(child: Object) -> Object:
    """A child without `managedFields`."""
    return _shared(trimmed(child))


def trimmed_workload(workload: Object) -> Object:
    """A workload without `managedFields` but for who owns its `replicas`."""
    owners = [
        {"manager": entry.get("manager", "")}
        for entry in workload["metadata"].get("managedFields", [])
        if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
    ]
    kept = trimmed_child(workload)
    return {**kept, "metadata": {**kept["metadata"], "managedFields": owners}}


def trimmed_pod(pod: Object) -> Object:
    """Keep only what is read here of a pod: its identity, its containers' arguments and its status. A node and its plugins write
    much more
    about each pod, and pods outnumber all other objects."""
    meta, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    told: Object = meta.get("annotations", {})
    ours = {name: value for name, value in told.items() if name.startswith(f"{labels.GROUP}/") or name == labels.DELETION_COST}
    arguments = [_only(it, ("name", "args")) for it in spec.get("containers", []) if it.get("args")]
    lists = {"conditions": _CONDITION, "initContainerStatuses": _CONTAINER_STATUS, "containerStatuses": _CONTAINER_STATUS}
    states = {name: [_only(it, fields) for it in status[name]] for name, fields in lists.items() if status.get(name)}
    return {
        "metadata": {**_only(meta, _POD_METADATA), **({"annotations": ours} if ours else {})},
        "spec": {"containers": arguments, **_only(spec, ("nodeName",))},
        "status": {**_only(status, _POD_STATUS), **states},
    }


def _only(part: Object, fields: Sequence[str]) -> Object:
    """Return those of the fields that are present and not None."""
    return {name: _shared(part[name]) for name in fields if part.get(name) is not None}


def _shared(value: Any) -> Any:
    """The same with each string once in memory: those of a pool's pods are nearly all alike, and so are those of models."""
    if isinstance(value, str):
        return _once(value)
    if isinstance(value, list):
        return [_shared(it) for it in cast(list[Any], value)]
    if isinstance(value, dict):
        return {_once(name): _shared(it) for name, it in cast(Object, value).items()}
    return value


class Children:
    """The objects that carry the label `penstock.dev/model`, by the model that they name."""

    def __init__(self, changed: Callable[[Key], None]) -> None:
        """
        Args:
            changed: Told the model of each child that appears, changes or goes.
        """
        self._changed = changed
        self._by_model: dict[tuple[str, str], dict[tuple[str, str], Object]] = defaultdict(dict)

    def follow(self, cache: Caches, kind: str) -> None:
        """Keeps up with the caches of one kind. Call it before they run."""
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

    def pods(self, key: Key, pool: str | None = None) -> list[Pod]:
        """The pods of a model's replicas, or those of one pool. Read-only as well."""
        pods = [cast(Pod, pod) for pod in self.of(key, "Pod").values()]
        return pods if pool is None else of_pool(pods, pool)

    def on_node(self, node: str) -> set[Key]:
        """The models with a pod on a node."""
        return {
            Key("InferenceModel", namespace, model)
            for (namespace, model), children in self._by_model.items()
            if any(kind == "Pod" and pod["spec"].get("nodeName") == node for (kind, _), pod in children.items())
        }


def _model(child: Object) -> str:
    its = child["metadata"].get("labels", {})
    return str(its.get(labels.MODEL) or its.get(labels.FETCH_OF, ""))
