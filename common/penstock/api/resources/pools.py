"""One pool of an InferenceModel: interchangeable replicas of one shape."""

from typing import Any, Literal

from pydantic import Field

from penstock.api.resources.base import RFC1123, Duration, Part, Rule, seconds


class ExpertParallelism(Part):
    """Spreading a mixture-of-experts model's experts over devices."""

    enabled: bool = False
    """Spread the experts instead of slicing each."""
    redundant: int = Field(default=0, ge=0, le=1024)
    """Copies of busy experts, to even the load."""


class Parallelism(Part):
    """How one replica spans devices. The whole group is the unit of readiness, failure and scaling."""

    tensor: int = Field(default=1, ge=1, le=64)
    """Devices over which each layer is sliced."""
    pipeline: int = Field(default=1, ge=1, le=64)
    """Stages of consecutive layers."""
    data: int = Field(default=1, ge=1, le=64)
    """Engine ranks with a cache of their own, served as one replica."""
    expert: ExpertParallelism = ExpertParallelism()
    """Expert parallelism."""


class Accelerator(Part):
    """The device that a replica runs on; the count follows from `parallelism`."""

    resource: str = Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$", min_length=3, max_length=253)
    """The extended resource's name, such as `nvidia.com/gpu`."""


class Slo(Part):
    """What clients are to see."""

    RULES = (
        Rule("has(self.ttft) || has(self.itl)", "slo: name a goal: ttft, itl or both", lambda slo: bool(slo.ttft or slo.itl)),
    )

    ttft: Duration | None = None
    """Goal for the time to the first token."""
    itl: Duration | None = None
    """Goal for the time between tokens."""
    percentile: int = Field(default=95, ge=50, le=99)
    """Which percentile of requests is to meet the goals."""


class Scaling(Part):
    """How the autoscaler sizes the pool."""

    RULES = (
        Rule("self.min <= self.max", "scaling: min must not be above max", lambda scaling: scaling.min <= scaling.max),
        Rule(
            "!has(self.warm) || self.warm <= self.max",
            "scaling: warm must not be above max",
            lambda scaling: scaling.warm is None or scaling.warm <= scaling.max,
        ),
        Rule(
            "(self.min > 0) == !has(self.scaleToZeroAfter)",
            "scaling: min 0 and scaleToZeroAfter go together; set both or neither",
            lambda scaling: (scaling.min > 0) == (scaling.scale_to_zero_after is None),
        ),
    )

    mode: Literal["Auto", "DryRun"] = "Auto"
    """`Auto` acts; `DryRun` only reports what it would do."""
    min: int = Field(default=1, ge=0, le=1000)
    """Never fewer replicas. 0: none at all after `scaleToZeroAfter` without a request; the next one waits at the gateway."""
    max: int = Field(ge=1, le=1000)
    """Never more replicas."""
    warm: int | None = Field(default=None, ge=0, le=1000)
    """Spare replicas kept ready beyond the demand."""
    down_window: Duration = "5m"
    """A pool shrinks no further than to the most that was recommended in this time."""
    slo: Slo | None = None
    """Goals that the size is derived from."""
    scale_to_zero_after: Duration | None = None
    """With `min: 0`: stop the last replica after so long without a request."""


class Pool(Part):
    """Interchangeable replicas."""

    name: str = Field(pattern=RFC1123, min_length=1, max_length=20)
    """Unique within the model; child objects are named `MODEL-POOL`."""
    role: Literal["Both", "Prefill", "Decode"] = "Both"
    """`Both`, or one half of prefill/decode disaggregation."""
    cost: int | None = Field(default=None, ge=1, le=1_000_000)
    """Price of a replica relative to those of other pools: the cheapest grows first, the dearest shrinks first."""
    parallelism: Parallelism = Parallelism()
    """How one replica spans devices."""
    accelerator: Accelerator | None = None
    """Absent: the CPU."""
    scaling: Scaling | None = None
    """Absent: `spec.replicas`, or whoever writes the Deployment's scale (HPA, KEDA, kubectl)."""
    template: dict[str, Any] = Field(default={}, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})
    """A PodTemplateSpec laid over the generated one; lists merge by the keys of server-side apply (containers by name, …).

    The engine's container is called `engine`. May not ask for host access, privilege or another ServiceAccount.
    """


class RoutingWeights(Part):
    """Weights of the `WeightedScore` policy."""

    prefix: int = Field(default=3, ge=0, le=100)
    """For cached prefix tokens."""
    queue: int = Field(default=2, ge=0, le=100)
    """Against waiting requests."""
    kv: int = Field(default=2, ge=0, le=100)
    """Against KV cache usage."""


class Routing(Part):
    """How the gateway chooses replicas."""

    policy: Literal["Cost", "WeightedScore", "Random", "RoundRobin", "LeastRequest", "PowerOfTwo"] = "Cost"
    """`Cost` estimates seconds to the first token; the others are for comparison."""
    weights: RoutingWeights | None = None
    """For `WeightedScore`."""
    priority: int | None = Field(default=None, ge=-100, le=100)
    """Of this model's requests against other models' where they share a limit."""
    hold_timeout: Duration = "5m"
    """How long a request may wait at the gateway for a replica to become ready."""


class Rollout(Part):
    """How a change reaches the replicas."""

    RULES = (
        Rule(
            "duration(self.progressDeadline) >= duration('10s')",
            "rollout: progressDeadline must be 10s or longer",
            lambda rollout: seconds(rollout.progress_deadline) >= 10,
        ),
    )

    paused: bool = False
    """Leave running replicas as they are until this is false again."""
    allow_downtime: bool = False
    """Where there is no room for one more replica, stop an old one first."""
    progress_deadline: Duration = "30m"
    """After so long without progress a rollout counts as failed; the old replicas go on serving."""
