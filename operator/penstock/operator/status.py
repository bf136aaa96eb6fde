"""From what is observed to `status`: pure, so that "Ready is never true with nothing serving" is a property that a test can
search for counterexamples.

Conditions follow the Kubernetes API conventions: all types from the first sight, each with `observedGeneration`, and times that
move only when a status flips.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.api import labels
from penstock.operator.pods import Trouble, is_live, is_ready, revision, trouble

Object = dict[str, Any]

TYPES: Final = (
    "Ready", "Accepted", "ModelAvailable", "PodsReady", "Serving", "Routed", "ScalingActive", "Progressing", "Degraded",
)  # fmt: skip
MAX_MESSAGE: Final = 2048


@dataclass(frozen=True)
class Refusal:
    """Why the spec is not acted on."""

    reason: str
    """`InvalidSpec`, `UnsupportedField`, `ForbiddenTemplate`, `NotOwned`, `ApplyRefused`."""
    message: str


@dataclass(frozen=True)
class ScalingStatus:
    """What the autoscaler last said of a pool."""

    current: int
    desired: int
    constraint: str
    """What bound the decision, such as `Max`, `DownWindow` or `NoData`."""
    reason: str
    active: bool
    """False: it has no data, or may not act."""
    decisions: tuple[str, ...] = ()
    """The last changes, newest first."""


@dataclass(frozen=True)
class PoolObserved:
    """One pool as the cluster has it."""

    name: str
    revision: str
    """The wanted one."""
    wanted: int
    """Replicas wanted, as the live workload says where there is one."""
    workload: Object | None
    """The Deployment."""
    pods: Sequence[Object]
    scaled: bool = False
    """The autoscaler sizes it."""
    scaling: ScalingStatus | None = None

    @property
    def ready(self) -> list[Object]:
        """Pods that serve, of whatever revision."""
        return [pod for pod in self.pods if is_ready(pod)]

    @property
    def ready_current(self) -> int:
        """How many pods of the wanted revision serve."""
        return sum(revision(pod) == self.revision for pod in self.ready)

    @property
    def old(self) -> list[Object]:
        """Live pods of other revisions."""
        return [pod for pod in self.pods if is_live(pod) and revision(pod) != self.revision]

    @property
    def troubles(self) -> list[Trouble]:
        """What is wrong with pods of the wanted revision; those of older ones are on their way out."""
        found = [it for pod in self.pods if revision(pod) == self.revision and (it := trouble(pod))]
        return sorted(found, key=lambda it: it.pod)

    def workload_condition(self, kind: str) -> Object:
        """A condition of the Deployment; `{}` where it has none, or none about its present spec."""
        workload = self.workload or {}
        status: Object = workload.get("status", {})
        if status.get("observedGeneration") != workload.get("metadata", {}).get("generation"):
            return {}
        conditions: list[Object] = status.get("conditions", [])
        found = [it for it in conditions if it["type"] == kind]
        return found[0] if found else {}


@dataclass(frozen=True)
class Observed:
    """One model as the cluster has it."""

    name: str
    generation: int
    pools: Sequence[PoolObserved]
    refusal: Refusal | None = None
    conflict: str = ""
    """Which of its names an older model claims, in a sentence."""
    served_name: str = ""
    paused: bool = False
    url: str = ""

    @property
    def wanted(self) -> int:
        """Replicas wanted, over all pools."""
        return sum(pool.wanted for pool in self.pools)

    @property
    def ready(self) -> int:
        """Replicas that serve, over all pools."""
        return sum(len(pool.ready) for pool in self.pools)

    @property
    def troubles(self) -> list[Trouble]:
        """What is wrong, over all pools."""
        return [it for pool in self.pools for it in pool.troubles]

    @property
    def rolling(self) -> bool:
        """Replicas of an older revision are still there."""
        return any(pool.old for pool in self.pools)

    @property
    def stuck(self) -> str:
        """The Deployment's word that the rollout gave up, else empty."""
        for pool in self.pools:
            progressing, failed = pool.workload_condition("Progressing"), pool.workload_condition("ReplicaFailure")
            if failed.get("status") == "True":
                return str(failed.get("message", "pods cannot be created"))
            if progressing.get("reason") == "ProgressDeadlineExceeded":
                return f"pool {pool.name} made no progress for spec.rollout.progressDeadline"
        return ""

    @property
    def zero(self) -> bool:
        """Nothing is meant to run."""
        return bool(self.pools) and self.wanted == 0


@dataclass(frozen=True)
class Verdict:
    """A condition without its times."""

    status: bool | None
    """None: Unknown."""
    reason: str
    message: str


def status_of(observed: Observed, previous: Sequence[Object], now: str) -> Object:
    """The whole `status`.

    Args:
        previous: The conditions that the resource has now; where a status stays the same, so does its time.
        now: RFC 3339.
    """
    judged = verdicts(observed)
    scaling = [
        {
            "pool": pool.name,
            "current": pool.scaling.current,
            "desired": pool.scaling.desired,
            "constraint": pool.scaling.constraint,
            "reason": pool.scaling.reason[:1024],
            "decisions": list(pool.scaling.decisions),
        }
        for pool in observed.pools
        if pool.scaling is not None
    ]
    return {
        "observedGeneration": observed.generation,
        "ready": f"{observed.ready}/{observed.wanted}",
        "replicas": sum(is_live(pod) for pool in observed.pools for pod in pool.pods),
        "desired": observed.wanted,
        "selector": f"{labels.MODEL}={observed.name}",
        "url": observed.url,
        "scaling": scaling,
        "conditions": conditions(judged, observed.generation, previous, now),
    }


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
                "reason": verdict.reason,
                "message": verdict.message[:MAX_MESSAGE],
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if old.get("status") == status else now,
            }
        )
    return made


def verdicts(observed: Observed) -> dict[str, Verdict]:
    """All conditions, in the order of `TYPES`."""
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
    if observed.zero:
        return Verdict(True, "ScaledToZero", "no replica is wanted, and none serves")
    waiting = [pool for pool in observed.pools if pool.wanted > 0 and pool.ready_current == 0]
    if observed.rolling and observed.ready:
        reason, cause = _cause(observed)
        if cause:
            return Verdict(False, "NewRevisionFails", f"{cause} ({reason}); {_plural(observed.ready)} still serve")
        return Verdict(None, "Paused" if observed.paused else "RollingOut", f"an older revision is being replaced{still}")
    if waiting or not observed.pools:
        reason, cause = _cause(observed)
        return Verdict(False, reason or "Starting", cause or "no replica is ready yet")
    return Verdict(True, "Serving", f"{observed.ready} of {observed.wanted} replicas ready")


def _cause(observed: Observed) -> tuple[str, str]:
    """Reason and message of what is wrong, empty where nothing is."""
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
    return Verdict(True, "NameClaimed", f"gateways send requests for {observed.served_name!r} here")


def _scaling_active(observed: Observed) -> Verdict:
    scaled = [pool for pool in observed.pools if pool.scaled]
    if not scaled:
        return Verdict(False, "NotConfigured", "no pool has scaling")
    silent = [pool.name for pool in scaled if pool.scaling is None]
    if silent:
        return Verdict(None, "NoReport", f"the autoscaler has not reported yet on pool {', '.join(silent)}")
    reports = [(pool.name, pool.scaling) for pool in scaled if pool.scaling is not None]
    idle = [(name, report) for name, report in reports if not report.active]
    if idle:
        return Verdict(False, idle[0][1].constraint, "; ".join(f"pool {name}: {report.reason}" for name, report in idle))
    return Verdict(
        True, "Scaling", "; ".join(f"pool {name}: {report.desired} wanted ({report.constraint})" for name, report in reports)
    )


def _progressing(observed: Observed) -> Verdict:
    if observed.refusal is not None:
        return Verdict(False, observed.refusal.reason, "nothing is changed until the spec is accepted")
    if observed.stuck:
        return Verdict(False, "ProgressDeadlineExceeded", observed.stuck)
    if observed.rolling:
        if observed.paused:
            return Verdict(False, "Paused", "spec.rollout.paused is true")
        return Verdict(True, "RollingOut", "replicas of an older revision are being replaced")
    if any(pool.workload is None or pool.ready_current < pool.wanted for pool in observed.pools):
        return Verdict(True, "Starting", "replicas are starting")
    return Verdict(False, "Complete", "all replicas run this generation")


def _degraded(observed: Observed) -> Verdict:
    reason, cause = _cause(observed)
    return Verdict(True, reason, cause) if cause else Verdict(False, "AsExpected", "nothing is wrong with the replicas")
