"""From what is observed to `status`: pure, so that "Ready is never true with nothing serving" is a property that a test can
search for counterexamples.

Conditions follow the Kubernetes API conventions: all types from the first sight, each with `observedGeneration`, and times that
move only when a status flips.
"""

from collections.abc import Sequence
from typing import Final

from penstock.api import labels
from penstock.api.resources import MAX_POOLS
from penstock.operator.autoscale.learned import Learned
from penstock.operator.conditions import verdicts
from penstock.operator.conditions.verdict import Verdict
from penstock.operator.objects import Object
from penstock.operator.observed import Observed, PoolObserved, ScalingStatus
from penstock.operator.pods import is_live

MAX_MESSAGE: Final = 2048
MAX_REASON: Final = 128
"""Longest reason that the CRDs and Events take. Kubelets and downloads give reasons of their own."""


def status_of(observed: Observed, previous: Sequence[Object], now: str, sized: Sequence[Object] = ()) -> Object:
    """The whole `status`.

    Args:
        previous: The conditions that the resource has now; where a status stays the same, so does its time.
        now: RFC 3339.
        sized: The `scaling` that the resource has now. It stays until the autoscaler has reported: one that has just begun reads
            there what an earlier one learned. Of a spec that is refused it stays too, since replicas run on.
    """
    judged = verdicts(observed)
    before = {pool["pool"]: pool for pool in sized}
    told = {
        pool.name: before.get(pool.name) if pool.scaling is None else pool_scaling(pool.name, pool.scaling)
        for pool in observed.pools
        if pool.scaled
    }
    kept = [] if observed.refusal is None else [it for name, it in before.items() if name not in told]
    revision, ratio = observed.revision, observed.prefill_per_decode
    return {
        "observedGeneration": observed.generation,
        "ready": f"{observed.ready}/{observed.wanted}",
        "replicas": sum(is_live(pod) for pool in observed.pools for pod in pool.pods),
        "desired": observed.wanted,
        "selector": f"{labels.MODEL}={observed.name}",
        "url": observed.url,
        **({} if revision is None else {"revision": revision.number, "templateVersion": revision.template_version}),
        "pools": [
            {
                "name": pool.name,
                "ready": f"{len(pool.ready)}/{pool.wanted}",
                "updated": pool.ready_current,
                "warming": pool.warming,
                "draining": pool.draining,
                **_load_times(pool),
                "cost": pool.cost * (len(pool.ready) + pool.warming + pool.draining),
            }
            for pool in observed.pools[:MAX_POOLS]  # those that leave come last
        ],
        **({} if ratio is None else {"prefillPerDecodePercent": round(ratio * 100)}),
        "scaling": [*(pool for pool in told.values() if pool is not None), *kept],
        **({} if observed.canary is None else {"canary": observed.canary.to_status()}),
        "conditions": conditions(judged, observed.generation, previous, now),
    }


def pool_scaling(pool: str, scaling: ScalingStatus) -> Object:
    """A pool's entry in `status.scaling`."""
    return {
        "pool": pool,
        "current": scaling.current,
        "desired": scaling.desired,
        "constraint": scaling.constraint,
        "reason": scaling.reason[:1024],
        **({"learned": _learned(scaling.learned)} if scaling.learned is not None else {}),
        "decisions": list(scaling.decisions),
    }


def _load_times(pool: PoolObserved) -> Object:
    """Absent until a replica has said it: an engine of others never does."""
    if pool.loaded is None or not pool.loaded.load_seconds:
        return {}
    times = pool.loaded
    return {
        "loadMilliseconds": round(1e3 * times.load_seconds),
        "loadFloorMilliseconds": round(1e3 * times.load_floor_seconds),
    }


def _learned(learned: Learned) -> Object:
    """Return the learned figures in the CRD's units, as whole numbers."""
    return {
        "prefillTokensPerSecond": round(learned.prefill_tokens_per_s),
        "stepBaseMicroseconds": round(learned.step_base_s * 1e6),
        "stepRowNanoseconds": round(learned.step_row_s * 1e9),
        "maxNumSeqs": round(learned.max_num_seqs),
        "sequencesInKv": round(learned.rows_in_kv),
        "coldStartSeconds": round(learned.cold_start_s),
        "sloPercent": round(learned.slo_factor * 100),
    }


def ending(metadata: Object) -> Verdict:
    """Return the verdict of a resource that is being deleted. Nothing changes any more, and its status is written until the
    end."""
    stays = ", ".join(metadata.get("finalizers", [])) or "none"
    return Verdict(False, "Terminating", f"it is being deleted, which its finalizers put off ({stays})")


def conditions(judged: dict[str, Verdict], generation: int, previous: Sequence[Object], now: str) -> list[Object]:
    """Verdicts as conditions with their times."""
    before = {condition["type"]: condition for condition in previous}
    made: list[Object] = []
    for kind, verdict in judged.items():
        status = {True: "True", False: "False", None: "Unknown"}[verdict.status]
        old = before.get(kind, {})
        made.append(
            {
                "type": kind,
                "status": status,
                "reason": verdict.reason[:MAX_REASON],
                "message": verdict.message[:MAX_MESSAGE],
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if old.get("status") == status else now,
            }
        )
    return made
