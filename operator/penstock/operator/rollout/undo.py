"""An old revision's spec, written back."""

from penstock.operator.command_line import CommandFailed
from penstock.operator.objects import Object
from penstock.operator.rollout.revisions import NEVER, pod_revisions, pool_shape

_KEPT = ("canary", "replicas", "routing", "scaling")
_KEPT_OF_POOL = ("scaling", "cost", "metadata")


class NoSuchRevision(CommandFailed):
    """The revision does not exist. The message lists those that do."""


def chosen(revisions: list[Object], number: int | None) -> Object:
    """The ControllerRevision to go back to.

    Args:
        revisions: The model's.
        number: None: the one before the present one.

    Raises:
        NoSuchRevision: there is none.
    """
    ordered = sorted(revisions, key=lambda it: it["revision"], reverse=True)
    there = ", ".join(str(it["revision"]) for it in ordered) or "none"
    if number is None:
        # Revisions of equal templates are one to the replicas: to go back to such a one would change nothing.
        others = [it for it in ordered[1:] if pod_revisions(it) != pod_revisions(ordered[0])]
        if not others:
            raise NoSuchRevision(f"there is no revision before the present one (there are: {there})")
        return others[0]
    found = [it for it in ordered if it["revision"] == number]
    if not found:
        raise NoSuchRevision(f"there is no revision {number} (there are: {there})")
    return found[0]


def restored(spec: Object, revision: Object, revisions: list[Object]) -> Object:
    """`spec` with all that decides what replicas run as a revision has it. How many there are, who reaches them and how they are
    replaced stays.

    Args:
        revisions: All of the model's. Where a restart is what is undone, its time is named, as the spec is the same.
    """
    shape: Object = revision["data"]["spec"]
    now = {pool["name"]: pool for pool in spec["pools"]}
    pools = [
        {**pool, **{name: now[pool["name"]][name] for name in _KEPT_OF_POOL if name in now.get(pool["name"], {})}}
        for pool in shape["pools"]
    ]
    kept = {name: spec[name] for name in _KEPT if name in spec}
    pace = {name: value for name, value in spec.get("rollout", {}).items() if name not in ("progressDeadline", "restartedAt")}
    if any(it["revision"] > revision["revision"] and _share_a_pool(it["data"]["spec"], shape) for it in revisions):
        pace["restartedAt"] = min(pool.get("restartedAt", NEVER) for pool in revision["data"]["pools"].values())
    return {**kept, **shape, "rollout": {**pace, **shape.get("rollout", {})}, "pools": pools}


def _share_a_pool(one: Object, other: Object) -> bool:
    """Whether the specs ask for the same in some pool."""
    return any(pool_shape(one, pool["name"]) == pool_shape(other, pool["name"]) for pool in other["pools"])
