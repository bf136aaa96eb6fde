"""The status of an InferenceModel: what the operator and the autoscaler write there."""

from typing import Annotated

from pydantic import Field

from penstock.api.resources.base import Conditions, Part
from penstock.api.resources.canary import CanaryStatus
from penstock.api.resources.pools import MAX_POOLS

Sentence = Annotated[str, Field(max_length=1024)]


class Learned(Part):
    """What a replica of a pool was seen to carry; 0 where nothing was seen. An autoscaler that is restarted begins with it."""

    prefill_tokens_per_second: int = Field(default=0, ge=0)
    """While it does nothing but prefill."""
    step_base_microseconds: int = Field(default=0, ge=0)
    """Time of a decode step before its sequences count."""
    step_row_nanoseconds: int = Field(default=0, ge=0)
    """What each sequence adds to a decode step."""
    max_num_seqs: int = Field(default=0, ge=0)
    """Sequences at once."""
    sequences_in_kv: int = Field(default=0, ge=0)
    """Sequences of the usual length that the KV cache holds."""
    cold_start_seconds: int = Field(default=0, ge=0)
    """From a replica's creation until it is ready."""
    slo_percent: int = Field(default=100, ge=1)
    """By what demand is multiplied, so that clients get what they are promised."""


class PoolScalingStatus(Part):
    """What the autoscaler last decided for a pool, and why."""

    pool: str = Field(max_length=20)
    """The pool's name."""
    current: int = Field(ge=0)
    """Replicas it saw."""
    desired: int = Field(ge=0)
    """Replicas it wants."""
    constraint: str = Field(max_length=64)
    """What bound the decision: `Demand`, `Min`, `Max`, `DownWindow`, `UpRate`, `Pending`, `NoData` …."""
    reason: str = Field(max_length=1024)
    """The decision in a sentence."""
    learned: Learned | None = None
    """What the autoscaler has learned of the pool's replicas; written when it changes by a tenth."""
    decisions: list[Sentence] = Field(default=[], max_length=10, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    """The last changes, newest first."""


class PoolStatus(Part):
    """One pool's replicas."""

    name: str = Field(max_length=20)
    """The pool's name."""
    ready: str = Field(max_length=16)
    """Ready replicas and wanted ones, `x/y`."""
    updated: int = Field(ge=0)
    """Ready replicas of the present revision."""
    warming: int = Field(default=0, ge=0)
    """Replicas that are there and not ready yet, or not any more."""
    draining: int = Field(default=0, ge=0)
    """Replicas that finish their requests, and then go."""
    load_milliseconds: int = Field(default=0, ge=0)
    """How long a replica of the present revision took for its weights; 0: not known yet."""
    load_floor_milliseconds: int = Field(default=0, ge=0)
    """How long the weights take at least, at the measured bandwidth of their storage; 0: not known."""
    cost: int = Field(default=0, ge=0)
    """What the replicas that exist cost, each at the pool's `cost`."""


class InferenceModelStatus(Part):
    """What was observed."""

    observed_generation: int = Field(default=0, ge=0)
    """The generation of the spec that this status is about."""
    ready: str = Field(default="0/0", max_length=16)
    """Ready replicas and wanted ones, `x/y`."""
    replicas: int = Field(default=0, ge=0)
    """Replicas that exist, ready or not."""
    desired: int = Field(default=0, ge=0)
    """Replicas that are wanted."""
    selector: str = Field(default="", max_length=512)
    """Label selector of the replicas, for HPA and `kubectl scale`."""
    url: str = Field(default="", max_length=1024)
    """Where clients reach it (OpenAI base URL), if the operator was told."""
    revision: int = Field(default=0, ge=0)
    """Number of the present revision, as `penstock rollout history` counts."""
    template_version: int = Field(default=0, ge=0)
    """Version of the operator's templates that the present revision was rendered by."""
    pools: list[PoolStatus] = Field(
        default=[],
        max_length=MAX_POOLS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Replicas by pool."""
    prefill_per_decode_percent: int | None = Field(default=None, ge=0)
    """Ready prefill replicas for each hundred ready decode replicas; absent where there are none of one kind."""
    scaling: list[PoolScalingStatus] = Field(
        default=[],
        max_length=MAX_POOLS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["pool"]},
    )
    """The autoscaler's last decision for each pool that it sizes."""
    canary: CanaryStatus | None = None
    """What was judged of it, where `spec.canary.judge` asks for that. Gateways go by its `weight`."""
    conditions: Conditions = Field(default=[])
    """`Ready` sums up the others."""
