"""One pool of an InferenceModel: interchangeable replicas of one shape."""

from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.api.resources.base import RFC1123, Duration, Flag, ObjectName, Part, Rule, Share, lasting, unchangeable
from penstock.api.resources.scaling import Scaling

MAX_POOLS = 8
"""Most pools of a model. Its status can also hold pools that are being removed."""


class ExpertBalancing(Part):
    """When busy experts move to other devices."""

    window_size: int = Field(default=1000, ge=1, le=1_000_000)
    """Steps whose loads decide where experts are."""
    step_interval: int = Field(default=3000, ge=1, le=1_000_000_000)
    """Steps from one decision to the next."""


class ExpertParallelism(Part):
    """Spreading a mixture-of-experts model's experts over devices."""

    RULES = (
        Rule(
            "self.redundant == 0 || self.enabled",
            "parallelism.expert: redundant needs enabled: true",
            lambda expert: expert.redundant == 0 or expert.enabled,
        ),
        Rule(
            "!has(self.eplb) || self.enabled",
            "parallelism.expert: eplb needs enabled: true",
            lambda expert: expert.eplb is None or expert.enabled,
        ),
    )

    enabled: bool = False
    """Spread the experts instead of slicing each."""
    redundant: int = Field(default=0, ge=0, le=1024)
    """Copies of busy experts, to even the load; with any, experts move as `eplb` says, or as it says by default."""
    eplb: ExpertBalancing | None = None
    """Moves busy experts to other devices while requests run, also without copies; absent, and with `redundant: 0`: experts stay
    where they are."""

    @property
    def balancing(self) -> ExpertBalancing | None:
        """When experts move; None: they stay where they are."""
        return ExpertBalancing() if self.eplb is None and self.redundant else self.eplb


class Parallelism(Part):
    """How one replica spans devices. The whole group is the unit of readiness, failure and scaling."""

    RULES = (
        Rule(
            "(self.data > 1 ? self.data : self.tensor * self.pipeline) % self.nodes == 0",
            "parallelism: nodes must divide data, the cores of a replica, or tensor * pipeline where there is one core",
            lambda it: (it.data if it.data > 1 else it.tensor * it.pipeline) % it.nodes == 0,
        ),
    )

    tensor: Annotated[int, Flag("--tensor-parallel-size", lambda ranks: None if ranks == 1 else ranks)] = Field(
        default=1, ge=1, le=64
    )
    """Devices over which each layer is sliced; without an accelerator, processes."""
    pipeline: Annotated[int, Flag("--pipeline-parallel-size", lambda stages: None if stages == 1 else stages)] = Field(
        default=1, ge=1, le=64
    )
    """Stages of consecutive layers, each on `tensor` devices; without an accelerator, processes."""
    data: Annotated[int, Flag("--data-parallel-size", lambda ranks: None if ranks == 1 else ranks)] = Field(
        default=1, ge=1, le=64
    )
    """Engine cores behind one server, each with the model and a cache of its own, on `tensor` times `pipeline` devices."""
    nodes: int = Field(default=1, ge=1, le=64)
    """Without an accelerator: pods of a replica, as a LeaderWorkerSet. Its cores are distributed among them, or the processes of
    its only core; must divide `data`, or `tensor` times `pipeline` where `data` is 1. With one, `accelerator.perNode` decides."""
    expert: ExpertParallelism = ExpertParallelism()
    """Spreading a mixture-of-experts model's experts over devices."""

    @property
    def cores_a_node(self) -> int:
        """Engine cores in a pod, where no core spans pods."""
        return max(1, self.data // self.nodes)

    @property
    def devices(self) -> int:
        """Devices that one replica takes."""
        return self.tensor * self.pipeline * self.data


class Accelerator(Part):
    """The device that a replica runs on; the count follows from `parallelism`."""

    resource: str = Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$", min_length=3, max_length=253)
    """The extended resource's name, such as `nvidia.com/gpu`."""
    per_node: int | None = Field(default=None, ge=1, le=1024)
    """Devices of one node: a replica of more spans several nodes, as a LeaderWorkerSet; absent: a replica fits a node."""


class ResourceClaim(Part):
    """Devices by dynamic resource allocation (DRA)."""

    RULES = (
        Rule(
            "has(self.template) != has(self.claim)",
            "resourceClaims: name either a template, for a claim of each replica's own, or a claim that all replicas share",
            lambda it: (it.template is None) != (it.claim is None),
        ),
    )

    name: str = Field(pattern=RFC1123, min_length=1, max_length=63)
    """Unique within the pool."""
    template: ObjectName | None = None
    """The name of a ResourceClaimTemplate in the model's namespace."""
    claim: ObjectName | None = None
    """The name of a ResourceClaim in the model's namespace."""


Texts = Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=64)]


class WorkloadMetadata(Part):
    """Labels and annotations of a pool's workload; those of its pods are in the template."""

    labels: Texts = Field(default={})
    """Labels by name, such as `kueue.x-k8s.io/queue-name`."""
    annotations: Texts = Field(default={})
    """Annotations by name, such as `leaderworkerset.sigs.k8s.io/exclusive-topology`."""


class Pool(Part):
    """Interchangeable replicas."""

    RULES = (
        unchangeable(
            "role",
            "role cannot change, as replicas of both roles would be in one pool meanwhile: add a pool with another name, and "
            "remove this one",
        ),
        Rule(
            "!has(self.parallelism) || self.parallelism.nodes == 1 || "
            "(!has(self.accelerator) && (!has(self.resourceClaims) || self.resourceClaims.size() == 0))",
            "parallelism.nodes is for pools without devices: accelerator.perNode says how many nodes a replica spans",
            lambda it: it.parallelism.nodes == 1 or not it.has_devices,
        ),
    )

    name: str = Field(pattern=RFC1123, min_length=1, max_length=20)
    """Unique within the model; child objects are named `MODEL-POOL`."""
    role: Literal["Both", "Prefill", "Decode"] = "Both"
    """`Both`, or one half of prefill/decode disaggregation."""
    cost: int = Field(default=1, ge=1, le=1_000_000)
    """Price of a replica relative to those of other pools: the cheapest grows first, the dearest shrinks first."""
    parallelism: Parallelism = Parallelism()
    """How one replica spans devices."""
    accelerator: Accelerator | None = None
    """The device that a replica runs on; how many follows from `parallelism`. Absent: the CPU."""
    resource_claims: list[ResourceClaim] = Field(
        default=[], max_length=8, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
    )
    """Claims of the pod that the engine's container uses, for devices that a DRA driver hands out."""
    scaling: Scaling | None = None
    """How the autoscaler sizes the pool. Absent: `spec.replicas` does, or another program that writes the Deployment's scale
    (HPA, KEDA, kubectl)."""
    metadata: WorkloadMetadata = WorkloadMetadata()
    """Labels and annotations of the Deployment or LeaderWorkerSet, for controllers of others."""
    template: dict[str, Any] = Field(default={}, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})
    """A PodTemplateSpec laid over the generated one; lists merge by the keys of server-side apply (containers by name, …).

    The engine's container is called `engine`. May not ask for host access, privilege or another ServiceAccount.
    """

    @property
    def has_devices(self) -> bool:
        """Whether a replica asks for devices; else it runs on CPUs."""
        return self.accelerator is not None or bool(self.resource_claims)


class RoutingWeights(Part):
    """Weights of the `WeightedScore` policy."""

    prefix: int = Field(default=3, ge=0, le=100)
    """For cached prefix tokens."""
    queue: int = Field(default=2, ge=0, le=100)
    """Against waiting requests."""
    kv: int = Field(default=2, ge=0, le=100)
    """Against KV cache usage."""


class PickerReference(Part):
    """A Service that leads to a Penstock picker."""

    name: ObjectName
    """The Service's name, in the model's namespace."""
    port: int = Field(default=9002, ge=1, le=65_535)
    """The Service's port that leads to the picker's port for this pool."""


class GatewayReference(Part):
    """A Gateway of the Gateway API."""

    name: ObjectName
    """The Gateway's name."""
    namespace: str | None = Field(default=None, pattern=RFC1123, min_length=1, max_length=63)
    """The Gateway's namespace; absent: the model's."""


class Exposure(Part):
    """How another gateway reaches the model."""

    picker: PickerReference
    """Who chooses replicas: becomes `endpointPickerRef` of an InferencePool called as the model."""
    gateway: GatewayReference | None = None
    """Makes an HTTPRoute to the InferencePool on this Gateway, for requests whose header `X-Gateway-Model-Name` has one of the
    served names or a name of a LoRA adapter; absent: none."""


class Routing(Part):
    """How the gateway chooses replicas."""

    RULES = (lasting("routing", "holdTimeout", "0s", "1h"),)

    policy: Literal["Cost", "WeightedScore", "Random", "RoundRobin", "LeastRequest", "PowerOfTwo"] = "Cost"
    """`Cost` estimates seconds to the first token; the others are for comparison."""
    weights: RoutingWeights | None = None
    """What counts how much for the policy `WeightedScore`; the others take no notice of it."""
    priority: int = Field(default=0, ge=-100, le=100)
    """Added to that of each request where models share the gateway's room for waiting: when it runs out, requests of models with
    smaller numbers displace those of others."""
    inference_pool: Exposure | None = None
    """Makes an InferencePool, for gateways of the Gateway API Inference Extension; absent: none."""
    hold_timeout: Duration = "5m"
    """How long a request may wait at the gateway for a replica to become ready."""


class Rollout(Part):
    """How a change reaches the replicas."""

    RULES = (
        lasting("rollout", "progressDeadline", "10s", "24h"),
        Rule(
            "self.maxSurge != 0 || self.maxUnavailable != 0",
            "rollout: maxSurge and maxUnavailable must not both be 0, as nothing could be replaced",
            lambda rollout: rollout.max_surge != 0 or rollout.max_unavailable != 0,
        ),
    )

    paused: bool = False
    """Leave running replicas as they are until this is false again."""
    restarted_at: str | None = Field(default=None, pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z$", max_length=32)
    """Replace every replica that was made before, as `penstock rollout restart` asks: a time in UTC such as
    `2026-01-31T12:00:00Z`. Taking it away restarts nothing."""
    max_surge: Share = 1
    """Replicas of a pool that may be there beyond its size meanwhile, such as `2` or `25%`."""
    max_unavailable: Share = 0
    """Replicas of a pool that may be away meanwhile, such as `1` or `10%`. With `1` a pool of one replica has a gap."""
    allow_downtime: bool = False
    """Where there is no room for one more replica, stop an old one first."""
    surge_before_evict: bool = False
    """For `replicas: 1`: when its node is drained, start another replica first, and let the old one be evicted when that one is
    ready. Without room for one more, the drain waits."""
    progress_deadline: Duration = "30m"
    """After so long without progress a rollout counts as failed; the old replicas go on serving."""
