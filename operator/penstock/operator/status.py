"""From what is observed to `status`: pure, so that "Ready is never true with nothing serving" is a property that a test can
search for counterexamples.

Conditions follow the Kubernetes API conventions: all types from the first sight, each with `observedGeneration`, and times that
move only when a status flips.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.api import labels
from penstock.api.resources import MAX_POOLS
from penstock.operator.autoscale.learned import Learned
from penstock.operator.canary.course import Standing
from penstock.operator.observed import Observed, ScalingStatus
from penstock.operator.pods import is_live

Object = dict[str, Any]

TYPES: Final = (
    "Ready", "Accepted", "ModelAvailable", "PodsReady", "Serving", "Routed", "ScalingActive", "Progressing", "Degraded",
)  # fmt: skip
MAX_MESSAGE: Final = 2048
MAX_REASON: Final = 128
"""As the CRDs have it, and Events: kubelets and downloads give reasons of their own."""


@dataclass(frozen=True)
class Verdict:
    """A condition without its times."""

    status: bool | None
    """None: Unknown."""
    reason: str
    message: str


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
    revision = observed.revision
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
            }
            for pool in observed.pools[:MAX_POOLS]  # those that leave come last
        ],
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


def _learned(learned: Learned) -> Object:
    """As the CRD has it: whole numbers."""
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
    """Of a resource that is deleted and still there: nothing is changed any more, and what runs is told until the end."""
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


def verdicts(observed: Observed) -> dict[str, Verdict]:
    """All conditions, in the order of `TYPES`; then `CanaryPassed` of a canary that is judged."""
    canary = {} if observed.canary is None else {"CanaryPassed": _canary_passed(observed.canary)}
    return {
        "Ready": _ready(observed),
        "Accepted": _accepted(observed),
        "ModelAvailable": _model_available(observed),
        "PodsReady": _pods_ready(observed),
        "Serving": _serving(observed),
        "Routed": _routed(observed),
        "ScalingActive": _scaling_active(observed),
        "Progressing": _progressing(observed),
        "Degraded": _degraded(observed),
        **canary,
    }


def _plural(count: int) -> str:
    return f"{count} replica{'' if count == 1 else 's'}"


def _ready(observed: Observed) -> Verdict:
    """Whether the present generation serves. Replicas of an older one may serve all the while: that is `Serving`."""
    still = f"; {_plural(observed.ready)} of the last good revision still serve" if observed.ready else ""
    if observed.refusal is not None:
        return Verdict(False, observed.refusal.reason, observed.refusal.message + still)
    if observed.conflict:
        return Verdict(False, "NameConflict", observed.conflict)
    if observed.fetching is not None:
        return Verdict(False, observed.fetching.reason, observed.fetching.message + still)
    if observed.zero:
        return Verdict(True, "ScaledToZero", "no replica is wanted, and none serves")
    waiting = [pool for pool in observed.pools if pool.wanted > 0 and pool.ready_current == 0]
    if observed.rolling and observed.ready:
        reason, cause = _cause(observed)
        if observed.blocked:
            return Verdict(False, reason, cause + still)
        if cause:
            return Verdict(False, "NewRevisionFails", f"{cause} ({reason}); {_plural(observed.ready)} still serve")
        return Verdict(None, "Paused" if observed.paused else "RollingOut", f"an older revision is being replaced{still}")
    if waiting or not observed.pools:
        reason, cause = _cause(observed)
        return Verdict(False, reason or "Starting", cause or "no replica is ready yet")
    routed = _routed(observed)
    if routed.status is False:  # where nobody can say, clients may reach it all the same
        return Verdict(False, routed.reason, routed.message)
    return Verdict(True, "Serving", f"{observed.ready} of {observed.wanted} replicas ready")


def _cause(observed: Observed) -> tuple[str, str]:
    """Reason and message of what is wrong, empty where nothing is."""
    if observed.fetching is not None and observed.fetching.failed:
        return observed.fetching.reason, observed.fetching.message
    if observed.blocked:
        return "RolloutBlocked", observed.blocked
    if observed.troubles:
        return observed.troubles[0].reason, observed.troubles[0].message
    if observed.stuck:
        return "ProgressDeadlineExceeded", observed.stuck
    return "", ""


def _accepted(observed: Observed) -> Verdict:
    if observed.refusal is not None:
        return Verdict(False, observed.refusal.reason, observed.refusal.message)
    return Verdict(True, "Accepted", "every field of the spec is honoured")


def _model_available(observed: Observed) -> Verdict:
    if observed.fetching is not None:
        return Verdict(False if observed.fetching.failed else None, observed.fetching.reason, observed.fetching.message)
    if any(pool.ready_current for pool in observed.pools):
        return Verdict(True, "Loaded", "the engine has loaded the model")
    died = [it for it in observed.troubles if it.exited]
    if died:
        return Verdict(False, "EngineExited", died[0].message)
    return Verdict(None, "NotLoadedYet", "no replica of this revision has loaded the model yet")


def _pods_ready(observed: Observed) -> Verdict:
    short = [pool for pool in observed.pools if pool.ready_current < pool.wanted]
    if observed.troubles:
        return Verdict(False, observed.troubles[0].reason, "; ".join(it.message for it in observed.troubles[:4]))
    if observed.stuck:
        return Verdict(False, "ProgressDeadlineExceeded", observed.stuck)
    if short:
        counts = ", ".join(f"pool {pool.name}: {pool.ready_current} of {pool.wanted} are ready" for pool in short)
        return Verdict(False, "Starting", counts)
    if not observed.pools:
        return Verdict(False, "NothingStarted", "no replica was started")
    return Verdict(True, "AllReady", f"{observed.wanted} of {observed.wanted} replicas ready")


def _serving(observed: Observed) -> Verdict:
    if observed.ready:
        return Verdict(True, "ReplicasReady", f"{_plural(observed.ready)} take requests")
    if observed.zero and observed.refusal is None:
        return Verdict(False, "ScaledToZero", "no replica is wanted")
    return Verdict(False, "NoReadyReplica", "no replica takes requests")


def _routed(observed: Observed) -> Verdict:
    if observed.conflict:
        return Verdict(False, "NameConflict", observed.conflict)
    if not observed.served_name:
        return Verdict(None, "NotRead", "the spec could not be read")
    return Verdict(*observed.routing.verdict(observed.served_name))


def _scaling_active(observed: Observed) -> Verdict:
    others = [it for it in (observed.other, *(pool.other for pool in observed.pools)) if it is not None]
    if any(it.remedy for it in others):
        words = "; ".join(f"{it.says}, but {it.remedy}" for it in others if it.remedy)
        return Verdict(False, "AutoscalerConflict", words)
    scaled = [pool for pool in observed.pools if pool.scaled]
    if not scaled and others:
        return Verdict(False, "OtherAutoscaler", "; ".join(it.says for it in others))
    if not scaled:
        return Verdict(False, "NotConfigured", "no pool has scaling")
    silent = [pool.name for pool in scaled if pool.scaling is None]
    if silent:
        return Verdict(None, "NoReport", f"the autoscaler has not reported yet on pool {', '.join(silent)}")
    reports = [(pool.name, pool.scaling) for pool in scaled if pool.scaling is not None]
    idle = [(name, report) for name, report in reports if report.idle]
    if idle:
        return Verdict(False, idle[0][1].idle, "; ".join(f"pool {name}: {report.reason}" for name, report in idle))
    ignored = [(name, report) for name, report in reports if report.out_of_reach]
    if ignored:
        return Verdict(True, "GoalOutOfReach", "; ".join(f"pool {name}: {report.out_of_reach}" for name, report in ignored))
    return Verdict(
        True, "Scaling", "; ".join(f"pool {name}: {report.desired} wanted ({report.constraint})" for name, report in reports)
    )


def _progressing(observed: Observed) -> Verdict:
    if observed.refusal is not None:
        return Verdict(False, observed.refusal.reason, "nothing is changed until the spec is accepted")
    if observed.fetching is not None:
        return Verdict(not observed.fetching.failed, observed.fetching.reason, "replicas start when the model is there")
    if observed.blocked:
        return Verdict(False, "RolloutBlocked", observed.blocked)
    if observed.stuck:
        return Verdict(False, "ProgressDeadlineExceeded", observed.stuck)
    if observed.rolling:
        if observed.paused:
            return Verdict(False, "Paused", "spec.rollout.paused is true")
        return Verdict(True, "RollingOut", "replicas of an older revision are being replaced")
    if any(pool.workload is None or pool.ready_current < pool.wanted for pool in observed.pools):
        return Verdict(True, "Starting", "replicas are starting")
    return Verdict(False, "Complete", "all replicas run this generation")


def _canary_passed(canary: Standing) -> Verdict:
    if canary.verdict == "Judging":
        return Verdict(None, "Judging", canary.reason)
    return Verdict(canary.verdict == "Passed", f"Canary{canary.verdict}", canary.reason)


def _degraded(observed: Observed) -> Verdict:
    reason, cause = _cause(observed)
    return Verdict(True, reason, cause) if cause else Verdict(False, "AsExpected", "nothing is wrong with the replicas")
