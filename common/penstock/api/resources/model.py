"""InferenceModel: a model, how its replicas run, and how many of them."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.api.resources.base import (
    Conditions,
    Duration,
    LocalReference,
    Part,
    ResourceMeta,
    Rule,
    Served,
    ServedName,
    Uri,
    Word,
    body,
    seconds,
)
from penstock.api.resources.pools import Pool, Rollout, Routing

Argument = Annotated[str, Field(max_length=512)]
Sentence = Annotated[str, Field(max_length=1024)]

# Child objects are called NAME-POOL, and a Service's name has 63 characters and begins with a letter.
NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_RULE = Rule(
    f"self.metadata.name.size() <= 40 && self.metadata.name.matches('{NAME}')",
    "metadata.name must have at most 40 characters, begin with a letter and hold only a-z, 0-9 and '-'",
    lambda model: len(model.metadata.name) <= 40 and re.match(NAME, model.metadata.name) is not None,
)
URI_SCHEMES = r"^((hf|file|pvc|s3)://.|/.)"
# Set by Penstock from other fields: a second value would break probes, discovery or drain.
OWNED_FLAGS = r"^--(host|port|events-port|replay-port|served-model-name|shutdown-timeout)(=.*)?$"


class Cache(Part):
    """Where downloaded weights are kept between replicas."""

    type: Literal["PVC"] = "PVC"
    """A PersistentVolumeClaim."""
    claim_name: str = Field(min_length=1, max_length=253)
    """The claim's name."""


class Source(Part):
    """Where the weights are."""

    RULES = (
        Rule(
            f"self.uri.matches('{URI_SCHEMES}')",
            "source: uri must be an absolute path or begin with hf://, file://, pvc:// or s3://",
            lambda source: re.match(URI_SCHEMES, source.uri) is not None,
        ),
        Rule(
            "!has(self.secretRef) || self.uri.matches('^(hf|s3)://')",
            "source: secretRef is for hf:// and s3://; remove it",
            lambda source: source.secret_ref is None or re.match("^(hf|s3)://", source.uri) is not None,
        ),
    )

    uri: Uri
    """`hf://ORG/NAME`, `file://PATH` or an absolute path, `pvc://CLAIM/PATH`, `s3://BUCKET/PATH`. Paths are those that the engine
    sees, relative ones from its working directory."""
    revision: str | None = Field(default=None, min_length=1, max_length=128)
    """Branch, tag or commit; resolved once to a commit."""
    load_format: Literal["auto", "safetensors"] = "auto"
    """Format of the weights; `auto` looks."""
    secret_ref: LocalReference | None = None
    """Secret with the credentials; for hf:// its key `HF_TOKEN`. Penstock never reads it: the pod refers to it."""
    cache: Cache | None = None
    """Where downloads are kept."""


class Quantization(Part):
    """Three separate choices."""

    weights: Word | None = None
    """Scheme of the weights, such as `fp8_per_channel_static`."""
    kv_cache: Word | None = None
    """Scheme of the KV cache, such as `fp8_e4m3`."""
    activations: Word | None = None
    """Scheme of the activations, such as `dynamic`."""


class Limits(Part):
    """Sizes of the engine; absent ones take the engine's defaults."""

    max_model_len: int | None = Field(default=None, ge=1, le=100_000_000)
    """Tokens of prompt and output together."""
    max_num_seqs: int | None = Field(default=None, ge=1, le=65_536)
    """Requests in one step."""
    max_batched_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    """Tokens in one step."""
    long_prefill_threshold: int | None = Field(default=None, ge=0, le=10_000_000)
    """Prompt tokens of one request in a step; 0: no cap."""
    block_size: int | None = Field(default=None, ge=1, le=1024)
    """Tokens in one KV cache block."""
    memory_percent: int | None = Field(default=None, ge=1, le=100)
    """Share of the device's memory for weights and KV cache."""


class Speculative(Part):
    """Speculative decoding."""

    method: Word
    """Where drafts come from, such as `ngram`."""
    tokens: int = Field(default=4, ge=1, le=64)
    """Draft tokens in one step."""


class Connector(Part):
    """How KV cache leaves a replica."""

    type: Word = "none"
    """`none`: it does not."""


class Engine(Part):
    """What each replica runs."""

    RULES = (
        Rule(
            f"!has(self.extraArgs) || self.extraArgs.all(arg, !arg.matches('{OWNED_FLAGS}'))",
            "engine: extraArgs may not set --host, --port, --events-port, --replay-port, --served-model-name or "
            "--shutdown-timeout, which Penstock sets; use spec.served and spec.drainTimeout",
            lambda engine: not any(re.match(OWNED_FLAGS, arg) for arg in engine.extra_args),
        ),
    )

    image: str | None = Field(default=None, min_length=1, max_length=512)
    """Container image; absent: the operator's default."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of weights and activations; `auto` is the checkpoint's."""
    quantization: Quantization | None = None
    """Absent: as the checkpoint is."""
    limits: Limits = Limits()
    """Sizes."""
    speculative: Speculative | None = None
    """Absent: off."""
    connector: Connector = Connector()
    """KV transfer."""
    extra_args: list[Argument] = Field(default=[], max_length=64, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    """More flags for `penstock serve`, as they are."""


class AdapterSource(Part):
    """A place that adapters may come from."""

    prefix: Uri
    """URIs that begin so are allowed."""
    secret_ref: LocalReference | None = None
    """Secret with the credentials for it."""


class Lora(Part):
    """Room for LoRA adapters, and the allow-list of where they come from."""

    RULES = (
        Rule(
            "!has(self.cpuSlots) || self.cpuSlots >= self.slots",
            "lora: cpuSlots must not be below slots",
            lambda lora: lora.cpu_slots is None or lora.cpu_slots >= lora.slots,
        ),
    )

    slots: int = Field(default=4, ge=1, le=256)
    """Adapters on the device at once."""
    cpu_slots: int | None = Field(default=None, ge=1, le=4096)
    """Adapters in host memory at once."""
    max_rank: int = Field(default=16, ge=1, le=512)
    """Largest rank."""
    sources: list[AdapterSource] = Field(default=[], max_length=32, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    """Where LoraAdapters of this model may come from."""


class Canary(Part):
    """A share of another model's traffic."""

    of: ServedName
    """Served name of the model whose traffic is shared; same namespace."""
    weight: int = Field(ge=0, le=100)
    """Percent."""


def _whole(pools: list[Pool]) -> bool:
    roles = {pool.role for pool in pools}
    return roles == {"Both"} or roles == {"Prefill", "Decode"}


class InferenceModelSpec(Part):
    """What is wanted."""

    RULES = (
        Rule(
            "!has(self.replicas) || (size(self.pools) == 1 && !has(self.pools[0].scaling))",
            "replicas is for a model with one pool and no scaling: remove replicas, or keep one pool and remove its scaling",
            lambda spec: spec.replicas is None or (len(spec.pools) == 1 and spec.pools[0].scaling is None),
        ),
        Rule(
            "self.pools.all(pool, pool.role == 'Both') || (self.pools.all(pool, pool.role != 'Both') && "
            "self.pools.exists(pool, pool.role == 'Prefill') && self.pools.exists(pool, pool.role == 'Decode'))",
            "pools: give every pool the role Both, or have at least one Prefill and one Decode and none with Both",
            lambda spec: _whole(spec.pools),
        ),
        Rule(
            "self.pools.all(pool, pool.role == 'Both') || "
            "(has(self.engine) && has(self.engine.connector) && self.engine.connector.type != 'none')",
            "pools: Prefill and Decode need engine.connector to hand the KV cache over",
            lambda spec: spec.pools[0].role == "Both" or spec.engine.connector.type != "none",
        ),
        Rule(
            "!has(self.canary) || self.canary.of != self.served.name",
            "canary: of must name another model, not this one's served.name",
            lambda spec: spec.canary is None or spec.canary.of != spec.served.name,
        ),
        Rule("", "pools: two pools have the same name", lambda spec: len({pool.name for pool in spec.pools}) == len(spec.pools)),
        Rule(
            "duration(self.drainTimeout) <= duration('24h')",
            "drainTimeout must be 24h or shorter",
            lambda spec: seconds(spec.drain_timeout) <= 86_400,
        ),
    )

    served: Served
    """The names that clients use."""
    canary: Canary | None = None
    """Absent: traffic comes by this model's own names."""
    source: Source
    """Where the weights are."""
    engine: Engine = Engine()
    """What each replica runs."""
    lora: Lora | None = None
    """Absent: no adapters."""
    replicas: int | None = Field(default=None, ge=0, le=1000)
    """Replicas of the only pool, and the model's scale subresource (`kubectl scale`). 0 stops serving on purpose."""
    pools: list[Pool] = Field(
        min_length=1, max_length=8, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
    )
    """Groups of interchangeable replicas: all `Both`, or at least one `Prefill` and one `Decode`."""
    routing: Routing = Routing()
    """How the gateway chooses replicas."""
    rollout: Rollout = Rollout()
    """How a change reaches the replicas."""
    drain_timeout: Duration = "120s"
    """How long a replica that is told to stop may finish its requests."""


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
    decisions: list[Sentence] = Field(default=[], max_length=10, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    """The last changes, newest first."""


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
    scaling: list[PoolScalingStatus] = Field(
        default=[], max_length=8, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["pool"]}
    )
    """The autoscaler's last decision for each pool that it sizes."""
    conditions: Conditions = Field(default=[])
    """`Ready` sums up the others."""


class InferenceModel(BaseModel):
    """A large language model that is served."""

    model_config = ConfigDict(frozen=True)

    metadata: ResourceMeta
    spec: InferenceModelSpec

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if not NAME_RULE.holds(self):
            raise ValueError(NAME_RULE.message)
        return self

    @classmethod
    def parse(cls, resource: dict[str, Any]) -> Self:
        """Checks a resource as YAML or the API server give it; its status is left out.

        Raises:
            pydantic.ValidationError: a field is wrong; the message names it.
            ValueError: it is no InferenceModel of this version.
        """
        return cls.model_validate(body(resource, "InferenceModel"))

    @property
    def served_names(self) -> list[str]:
        """What clients may put in `model`: the served name, then the aliases."""
        return [self.spec.served.name, *self.spec.served.aliases]
