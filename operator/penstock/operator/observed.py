"""What is observed of a model: the types, and what follows from one alone. `observe` fills them, `status` judges them; pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from penstock.api.fleet import Role
from penstock.operator.autoscale.learned import Learned
from penstock.operator.canary.course import Standing
from penstock.operator.objects import Condition, Pod, Workload, WorkloadStatus
from penstock.operator.other_scalers import OtherScaler
from penstock.operator.pods import Trouble, is_live, is_ready, revision, trouble
from penstock.operator.routes import Routing


@dataclass(frozen=True)
class Refusal:
    """Why the spec is not acted on."""

    reason: str
    """`InvalidSpec`, `UnsupportedField`, `ForbiddenTemplate`, `NotOwned`, `ApplyRefused`, `Terminating`."""
    message: str


@dataclass(frozen=True)
class ScalingStatus:
    """What the autoscaler last said of a pool."""

    current: int
    desired: int
    constraint: str
    """What bound the decision, such as `Max`, `DownWindow` or `NoData`."""
    reason: str
    idle: Literal["", "NoData", "DryRun"] = ""
    """Why it does not act; empty: it does. Without data it grows by what is known, and shrinks nothing."""
    decisions: tuple[str, ...] = ()
    """The last changes, newest first."""
    learned: Learned | None = None
    out_of_reach: str = ""
    """The goals that no number of replicas meets, in a sentence."""
    waits: tuple[str, ...] = ()
    """Inputs that name what requests wait for and no replica more would help."""


@dataclass(frozen=True)
class Fetching:
    """How far a model is that must be brought before its replicas start."""

    reason: str
    """`FetchStarting`, `Downloading`, or what went wrong: `SourceUnauthorized`, `SourceNotFound`, `SourceNoSpace`, …"""
    message: str
    failed: bool = False
    """True if the pod has failed."""


class LoadTimes(msgspec.Struct, frozen=True):
    """The part of a replica's `/version` that is about its weights, in seconds."""

    load_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    load_floor_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0


@dataclass(frozen=True)
class PoolObserved:
    """One pool as the cluster has it."""

    name: str
    revision: str
    """The wanted one."""
    wanted: int
    """Replicas wanted, as the live workload says where there is one."""
    workload: Workload | None
    """The live workload. None: not created yet."""
    pods: Sequence[Pod]
    role: Role = "Both"
    cost: int = 0
    """Cost of a replica."""
    scaled: bool = False
    """The autoscaler sizes it."""
    scaling: ScalingStatus | None = None
    other: OtherScaler | None = None
    """The other autoscaler that sizes the pool."""
    blocked: str = ""
    """Why its rollout cannot go on, and what would let it."""
    loaded: LoadTimes | None = None
    """How long a replica of the wanted revision took for its weights; None: not known yet."""
    moving: bool = False
    """Another replica starts because the node of the only one is drained."""
    settling: bool = False
    """A new replica without a node is no trouble yet: room is being made, or may appear."""

    @property
    def ready(self) -> list[Pod]:
        """Pods that serve, of whatever revision."""
        return [pod for pod in self.pods if is_ready(pod)]

    @property
    def ready_current(self) -> int:
        """How many pods of the wanted revision serve."""
        return sum(revision(pod) == self.revision for pod in self.ready)

    @property
    def warming(self) -> int:
        """How many pods are to serve, and do not."""
        return sum(is_live(pod) and not is_ready(pod) for pod in self.pods)

    @property
    def draining(self) -> int:
        """How many pods were told to stop, and have not ended."""
        return sum("deletionTimestamp" in pod["metadata"] for pod in self.pods)

    @property
    def old(self) -> list[Pod]:
        """Live pods of other revisions."""
        return [pod for pod in self.pods if is_live(pod) and revision(pod) != self.revision]

    @property
    def troubles(self) -> list[Trouble]:
        """What is wrong with pods of the wanted revision; those of older ones are on their way out."""
        found = [it for pod in self.pods if revision(pod) == self.revision and (it := trouble(pod))]
        return sorted((it for it in found if not (self.settling and it.reason == "Unschedulable")), key=lambda it: it.pod)

    def workload_condition(self, kind: str) -> Condition | None:
        """A condition of the Deployment; None where it has none, or none about its present spec."""
        if self.workload is None:
            return None
        status: WorkloadStatus = self.workload.get("status", {})
        if status.get("observedGeneration") != self.workload["metadata"].get("generation"):
            return None
        return next((it for it in status.get("conditions", []) if it["type"] == kind), None)


@dataclass(frozen=True)
class RevisionObserved:
    """The revision that is wanted."""

    number: int
    """Number of the revision, as in `penstock rollout history`."""
    template_version: int
    """Version of its newest pod template."""


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
    revision: RevisionObserved | None = None
    routing: Routing = field(default_factory=Routing)
    """What the gateways say."""
    canary: Standing | None = None
    """Standing of a judged canary."""
    other: OtherScaler | None = None
    """The other autoscaler that sizes the model as a whole."""
    fetching: Fetching | None = None
    """What replicas of the present spec wait for; None: nothing."""

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
    def prefill_per_decode(self) -> float | None:
        """The quotient of ready prefill to ready decode replicas; None where there are none of one kind."""
        prefill, decode = (sum(len(pool.ready) for pool in self.pools if pool.role == role) for role in ("Prefill", "Decode"))
        return prefill / decode if prefill and decode else None

    @property
    def blocked(self) -> str:
        """The pools whose rollouts cannot continue, the reason, and what would unblock them."""
        return "; ".join(f"pool {pool.name}: {pool.blocked}" for pool in self.pools if pool.blocked)

    @property
    def stuck(self) -> str:
        """The Deployment's word that the rollout gave up, else empty."""
        for pool in self.pools:
            progressing, failed = pool.workload_condition("Progressing"), pool.workload_condition("ReplicaFailure")
            if failed is not None and failed["status"] == "True":
                return failed.get("message") or "pods cannot be created"
            if progressing is not None and progressing.get("reason") == "ProgressDeadlineExceeded":
                return f"pool {pool.name} made no progress for spec.rollout.progressDeadline"
        return ""

    @property
    def zero(self) -> bool:
        """True if the model is meant to run no replica."""
        return bool(self.pools) and self.wanted == 0
