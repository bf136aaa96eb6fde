"""Revisions: what the replicas of a model run, kept as ControllerRevisions.

A revision holds the part of the spec that decides what a replica runs, and the pod templates that came of it, as they were
rendered then: with the image that the operator took, and by the templates of its version. Where the spec asks for what a
revision has, the revision's own template is used. So a newer operator, or one with another default image, restarts nothing: its
templates are for the next change of the spec, or the next restart.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.api import labels
from penstock.api.resources import InferenceModel, Pool
from penstock.operator.desired.names import owner_reference
from penstock.operator.objects import Object

Render = Callable[[InferenceModel, Pool], Object]
"""Makes a pod template."""

HISTORY: Final = 5
"""Revisions that are kept beside those that pods still run: each is as large as its templates."""
NEVER: Final = "1970-01-01T00:00:00Z"
"""The value of `restartedAt` for replicas from before any restart."""
# What decides how many replicas there are, who reaches them and when they change, but not what one of them runs.
_OUTSIDE: Final = {
    "canary": True,
    "replicas": True,
    "routing": True,
    "rollout": {"paused", "allow_downtime", "max_surge", "max_unavailable", "restarted_at", "surge_before_evict"},
    "scaling": True,
}
_OUTSIDE_POOL: Final = {"scaling", "cost", "metadata"}


@dataclass(frozen=True)
class Resolution:
    """What is to run."""

    current: Object
    """The ControllerRevision that says so."""
    templates: dict[str, Object]
    """Pod templates by pool."""
    kept: frozenset[str]
    """Names of the older revisions that stay."""


def shape(model: InferenceModel) -> Object:
    """The part of the spec that decides what a replica runs, without what is as by default: a newer version of the resource adds
    fields and their defaults, and changes nothing by that."""
    pools: Object = {"__all__": _OUTSIDE_POOL}
    kept = model.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={**_OUTSIDE, "pools": pools})
    return {name: value for name, value in kept.items() if value != {}}  # what is left of a part whose every field is outside


def resolve(
    model: InferenceModel, revisions: Sequence[Object], running: frozenset[str], render: Render, version: int
) -> Resolution:
    """What the model's replicas are to run.

    Args:
        revisions: The model's ControllerRevisions, in any order.
        running: Revision labels of its pods.
        render: Makes the template of a pool that no revision has.
        version: Of the templates that `render` makes.
    """
    known = sorted(revisions, key=lambda it: it["revision"], reverse=True)
    wanted = shape(model)
    pools: dict[str, Object] = {}
    for pool in model.spec.pools:
        kept = _kept(known, wanted, pool.name, model.spec.rollout.restarted_at)
        pools[pool.name] = kept or _rendered(render(model, pool), version, model.spec.rollout.restarted_at)
    data = {"spec": wanted, "pools": pools}
    name = f"{model.metadata.name}-{_digest(data)}"
    return Resolution(
        current=_controller_revision(model, name, data, _number(known, name)),
        templates={pool: entry["template"] for pool, entry in pools.items()},
        kept=_history([it for it in known if it["metadata"]["name"] != name], running),
    )


def pool_shape(spec: Object, pool: str) -> Object | None:
    """What of a `shape` decides what one pool's replicas run; None where it has no such pool."""
    found = [it for it in spec["pools"] if it["name"] == pool]
    return {**spec, "pools": found} if found else None


def pod_revisions(revision: Object) -> dict[str, str]:
    """The revision label of the pods that a ControllerRevision stands for, by pool."""
    return {pool: entry["template"]["metadata"]["labels"][labels.REVISION] for pool, entry in revision["data"]["pools"].items()}


def sound(revision: Object) -> bool:
    """Return whether it has all fields of our revisions. Any client with write access may have created it."""
    try:
        pools, spec = revision["data"]["pools"], revision["data"]["spec"]
        named = all(pool_shape(spec, name) is not None for name in pools)
        versions = all(isinstance(entry["templateVersion"], int) for entry in pools.values())
        return named and versions and isinstance(revision["revision"], int) and len(pod_revisions(revision)) == len(spec["pools"])
    except (KeyError, TypeError, AttributeError):
        return False


def _kept(known: Sequence[Object], wanted: Object, pool: str, restarted_at: str | None) -> Object | None:
    """The pool's entry in the newest revision that was made for the same; of several, that of the restart that is named. None
    where a restart was asked for since."""
    asked = pool_shape(wanted, pool)
    same = [it["data"]["pools"][pool] for it in known if pool_shape(it["data"]["spec"], pool) == asked]
    named = [entry for entry in same if entry.get("restartedAt", NEVER) == restarted_at]
    later = [entry for entry in same if entry.get("restartedAt", NEVER) >= (restarted_at or NEVER)]
    return next(iter(named or later), None)


def _rendered(template: Object, version: int, restarted_at: str | None) -> Object:
    asked = {"restartedAt": restarted_at} if restarted_at else {}
    return {"templateVersion": version, **asked, "template": template}


def _number(known: Sequence[Object], name: str) -> int:
    """The present revision always has the highest number, also where it is an old one again."""
    if not known:
        return 1
    newest = known[0]
    return newest["revision"] if newest["metadata"]["name"] == name else newest["revision"] + 1


def _history(older: Sequence[Object], running: frozenset[str]) -> frozenset[str]:
    """The names of the newest revisions, and of those that pods still run."""
    held = [it for it in older if running.intersection(pod_revisions(it).values())]
    return frozenset(it["metadata"]["name"] for it in (*older[:HISTORY], *held))


def _controller_revision(model: InferenceModel, name: str, data: Mapping[str, Any], number: int) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": name,
            "namespace": model.metadata.namespace,
            "labels": {labels.MODEL: model.metadata.name, "app.kubernetes.io/managed-by": "penstock"},
            "ownerReferences": [owner_reference(model)],
        },
        "revision": number,
        "data": data,
    }


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:10]
