"""InferenceModel: a model, how its replicas run, and how many of them."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.api.resources.base import (
    URI_SCHEMES,
    Duration,
    Flag,
    LocalReference,
    ObjectName,
    Part,
    ResourceMeta,
    Rule,
    Served,
    Uri,
    Word,
    body,
    lasting,
)
from penstock.api.resources.canary import Canary
from penstock.api.resources.pools import MAX_POOLS, Pool, Rollout, Routing
from penstock.api.resources.scaling import SharedScaling

Argument = Annotated[str, Field(max_length=512)]

# Child objects are called NAME-POOL, and a Service's name has 63 characters and begins with a letter.
NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_RULE = Rule(
    f"self.metadata.name.size() <= 40 && self.metadata.name.matches('{NAME}')",
    "metadata.name must have at most 40 characters, begin with a letter and hold only a-z, 0-9 and '-'",
    lambda model: len(model.metadata.name) <= 40 and re.match(NAME, model.metadata.name) is not None,
)
# Set by Penstock: a second value would break probes, discovery or drain.
OWNED_FLAGS = r"^--(host|port|admin-port|events-port|replay-port|served-model-name|shutdown-timeout)(=.*)?$"
# What has a field of its own is said there alone, also where the engine has no such flag yet.
TYPED_FLAGS = (
    r"^--(revision|load-format|dtype|quantization|kv-cache-dtype|max-model-len|max-num-seqs|max-num-batched-tokens"
    r"|long-prefill-token-threshold|block-size|gpu-memory-utilization|limit-mm-per-prompt"
    r"|mm-processor-kwargs|speculative-config"
    r"|spec-method|spec-model|spec-tokens|kv-transfer-config|kv-transfer-secret-file"
    r"|kv-offload-(memory-bytes|directory|disk-bytes|store|store-bytes|bucket|bucket-bytes)|device"
    r"|enable-lora|allow-runtime-lora-updating|lora-modules|max-loras|max-cpu-loras|max-lora-rank"
    r"|(tensor|pipeline|data)-parallel-size|data-parallel-size-local|nnodes|enable-expert-parallel|num-redundant-experts|enable-eplb|eplb-config)(=.*)?$"
)
# Methods of speculative decoding that need a checkpoint, and where it may be.
DRAFTERS = "^(draft_model|eagle|eagle3)$"
DRAFTER_URIS = "^((hf|file)://|/)"
MEMORY_FLAGS = r"^--(kv-cache-memory-bytes|num-gpu-blocks-override)(=.*)?$"


MODEL_URIS = r"^((hf|file|pvc|s3|oci)://.|/.)"
_IMAGE = r"^oci://[a-zA-Z0-9][a-zA-Z0-9.-]*(:[0-9]+)?(/[a-z0-9._-]+)+(:[a-zA-Z0-9._-]+)?(@sha256:[0-9a-f]{64})?$"
_CLAIM = r"^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/.*)?$"


class Cache(Part):
    """Where downloaded weights are kept between replicas."""

    RULES = (
        Rule(
            "self.type == 'PVC' ? has(self.claimName) != has(self.size) : !has(self.claimName) && !has(self.size)",
            "source: cache: type PVC needs either claimName, a claim of yours, or size, for one that the operator makes; type "
            "Node takes neither",
            lambda cache: ((cache.claim_name is not None) + (cache.size is not None)) == (1 if cache.type == "PVC" else 0),
        ),
    )

    type: Literal["PVC", "Node"] = "PVC"
    """`PVC`: a PersistentVolumeClaim, which a Job fills. `Node`: a folder of each node, which the administrator chooses; the
    first replica on a node downloads."""
    claim_name: ObjectName | None = None
    """The name of a claim in the model's namespace."""
    size: str | None = Field(default=None, pattern=r"^[1-9][0-9]{0,5}(Mi|Gi|Ti)$", max_length=8)
    """Size of a claim that the operator makes for this model, in the administrator's storage class, and deletes with it."""


class Source(Part):
    """Where the weights are."""

    RULES = (
        Rule(
            f"self.uri.matches('{MODEL_URIS}')",
            "source: uri must be an absolute path or begin with hf://, file://, pvc://, s3:// or oci://",
            lambda source: re.match(MODEL_URIS, source.uri) is not None,
        ),
        Rule(
            f"!self.uri.startsWith('oci://') || self.uri.matches('{_IMAGE}')",
            "source: oci:// must be followed by the reference of an image, such as registry.example.com/models/llama:1",
            lambda source: not source.uri.startswith("oci://") or re.match(_IMAGE, source.uri) is not None,
        ),
        Rule(
            "!has(self.secretRef) || self.uri.matches('^(hf|s3)://')",
            "source: secretRef is for hf:// and s3://; remove it",
            lambda source: source.secret_ref is None or re.match("^(hf|s3)://", source.uri) is not None,
        ),
        Rule(
            "!has(self.cache) || self.uri.matches('^(hf|s3)://')",
            "source: cache is for hf:// and s3://; remove it",
            lambda source: source.cache is None or re.match("^(hf|s3)://", source.uri) is not None,
        ),
        Rule(
            f"!self.uri.startsWith('pvc://') || self.uri.matches('{_CLAIM}')",
            "source: pvc:// must be followed by a claim's name, then '/' and a path on it",
            lambda source: not source.uri.startswith("pvc://") or re.match(_CLAIM, source.uri) is not None,
        ),
    )

    uri: Uri
    """`hf://ORG/NAME`, `file://PATH` or an absolute path, `pvc://CLAIM/PATH`, `s3://BUCKET/PATH`, `oci://IMAGE`. Paths are those
    that the engine sees, relative ones from its working directory."""
    revision: str | None = Field(default=None, min_length=1, max_length=128)
    """Branch, tag or commit; resolved once to a commit."""
    load_format: Annotated[
        Literal["auto", "safetensors"], Flag("--load-format", lambda name: None if name == "auto" else name)
    ] = "auto"
    """Format of the weights; `auto` looks."""
    secret_ref: LocalReference | None = None
    """Secret with the credentials: for hf:// its key `HF_TOKEN`, for s3:// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and, if
    they are there, `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT_URL`. Penstock never reads it: the pod refers to it."""
    cache: Cache | None = None
    """Where downloads are kept. Absent: each replica downloads for itself."""


class Quantization(Part):
    """Three separate choices. A quantized checkpoint needs none of them: its scheme is in its `config.json`."""

    weights: Annotated[Word | None, Flag("--quantization")] = None
    """Scheme by which the weights of an ordinary checkpoint are quantized while they load, such as `int4_per_group_32`."""
    kv_cache: Annotated[Word | None, Flag("--kv-cache-dtype")] = None
    """Type of the KV cache, such as `fp8_e4m3`."""
    activations: Word | None = None
    """Scheme of the activations, such as `dynamic`."""


class Limits(Part):
    """Sizes of the engine; absent ones take the engine's defaults."""

    max_model_len: Annotated[int | None, Flag("--max-model-len")] = Field(default=None, ge=1, le=100_000_000)
    """Tokens of prompt and output together."""
    max_num_seqs: Annotated[int | None, Flag("--max-num-seqs")] = Field(default=None, ge=1, le=65_536)
    """Requests in one step."""
    max_batched_tokens: Annotated[int | None, Flag("--max-num-batched-tokens")] = Field(default=None, ge=1, le=10_000_000)
    """Tokens in one step."""
    long_prefill_threshold: Annotated[int | None, Flag("--long-prefill-token-threshold")] = Field(
        default=None, ge=0, le=10_000_000
    )
    """Prompt tokens of one request in a step; 0: no cap."""
    block_size: Annotated[int | None, Flag("--block-size")] = Field(default=None, ge=1, le=1024)
    """Tokens in one KV cache block."""
    memory_percent: Annotated[int | None, Flag("--gpu-memory-utilization", lambda percent: percent / 100)] = Field(
        default=None, ge=1, le=100
    )
    """Share of the device's memory for weights and KV cache."""
    images_per_prompt: Annotated[int | None, Flag("--limit-mm-per-prompt", lambda images: f'{{"image": {images}}}')] = Field(
        default=None, ge=0, le=1024
    )
    """Images of one request; 0 refuses them."""
    image_pixels: Annotated[int | None, Flag("--mm-processor-kwargs", lambda pixels: f'{{"max_pixels": {pixels}}}')] = Field(
        default=None, ge=784, le=50_000_000
    )
    """Pixels to which the model's processor shrinks an image, where the model reads images in about their own size."""


class Speculative(Part):
    """Speculative decoding."""

    RULES = (
        Rule(
            f"has(self.model) == self.method.matches('{DRAFTERS}')",
            "engine: speculative: model goes with the methods draft_model, eagle and eagle3, and with no other",
            lambda drafts: (drafts.model is not None) == (re.match(DRAFTERS, drafts.method) is not None),
        ),
        Rule(
            f"!has(self.model) || self.model.matches('{DRAFTER_URIS}')",
            "engine: speculative: model must be an absolute path in the pods or begin with hf:// or file://",
            lambda drafts: drafts.model is None or re.match(DRAFTER_URIS, drafts.model) is not None,
        ),
    )

    method: Annotated[Word, Flag("--spec-method")]
    """Where drafts come from: `ngram`, the request's own text; `suffix`, that and earlier outputs; `mtp`, a layer of the model's
    own checkpoint; `auto`, `mtp` if there is such a layer, else `suffix`; `draft_model`, `eagle` or `eagle3`, the checkpoint
    that `model` names."""
    tokens: Annotated[int, Flag("--spec-tokens")] = Field(default=4, ge=1, le=32)
    """Drafts of a request in one step at most."""
    model: Annotated[Uri | None, Flag("--spec-model")] = None
    """The draft model or head, which each replica loads: hf://org/name, file:// or an absolute path in the pods."""


def _bytes(size: str) -> int:
    """The bytes of a size such as `8Gi`, which has been checked."""
    return int(size[:-2]) << {"Mi": 20, "Gi": 30, "Ti": 40}[size[-2:]]


Size = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}(Mi|Gi|Ti)$", max_length=8)]


class ConnectorDisk(Part):
    """A disk for copies of KV pages."""

    size: Annotated[Size, Flag("--kv-offload-disk-bytes", _bytes)]
    """Of the pages, on each rank."""
    claim_name: ObjectName | None = None
    """PersistentVolumeClaim, whose pages outlive the replicas. Absent: a volume that goes with the pod."""


class ConnectorStore(Part):
    """A Mooncake store for copies of KV pages, which all replicas of a model share."""

    uri: Annotated[str, Field(pattern=r"^mooncake://[^/:]+:[1-9][0-9]{0,4}$", max_length=512), Flag("--kv-offload-store")]
    """`mooncake://HOST:PORT`, where its master listens."""
    size: Annotated[Size, Flag("--kv-offload-store-bytes", _bytes)]
    """Of the pages there that a replica knows, on each rank."""


class ConnectorBucket(Part):
    """An object store for copies of KV pages, which all replicas of a model share."""

    uri: Annotated[str, Field(pattern=r"^s3://[^/]+/.*[^/]$", max_length=512), Flag("--kv-offload-bucket")]
    """`s3://BUCKET/PATH`. The replicas list, read, write and delete objects below it."""
    size: Annotated[Size, Flag("--kv-offload-bucket-bytes", _bytes)]
    """Of the pages there that a replica uses, on each rank."""
    secret_ref: LocalReference | None = None
    """Secret with the credentials, as for a source `s3://`. Absent: the pod's own role."""


class Connector(Part):
    """How KV cache leaves a replica."""

    RULES = (
        Rule(
            "has(self.memory) || !(has(self.disk) || has(self.store) || has(self.bucket))",
            "engine: connector: disk, store and bucket keep copies of what is in memory, and need it",
            lambda connector: (
                connector.memory is not None or (connector.disk is None and connector.store is None and connector.bucket is None)
            ),
        ),
        Rule(
            "(self.type in ['offload', 'transfer']) == has(self.memory)",
            "engine: connector: memory goes with the types offload and transfer, and with no other",
            lambda connector: (connector.type in ("offload", "transfer")) == (connector.memory is not None),
        ),
        Rule(
            "(self.type == 'transfer') == has(self.secretRef)",
            "engine: connector: secretRef goes with the type transfer, and with no other",
            lambda connector: (connector.type == "transfer") == (connector.secret_ref is not None),
        ),
    )

    type: Word = "none"
    """`none`: it does not. `offload`: pages that leave the KV cache stay in the memory of the replica's host. `transfer`: the
    same, and Prefill replicas lend pages to Decode replicas."""
    memory: Annotated[Size | None, Flag("--kv-offload-memory-bytes", _bytes)] = None
    """Memory of the host, on each rank, for these pages."""
    disk: ConnectorDisk | None = None
    """Copies of them on a disk. Absent: none."""
    store: ConnectorStore | None = None
    """Copies of them in a store that replicas share. Absent: none."""
    bucket: ConnectorBucket | None = None
    """Copies of them in an object store. Absent: none."""
    secret_ref: LocalReference | None = None
    """Secret of which the key `secret` has 16 bytes at least: the replicas of a model prove to each other that they know it.
    Penstock never reads it: the pods mount it."""


class Engine(Part):
    """What each replica runs."""

    RULES = (
        Rule(
            f"!has(self.extraArgs) || self.extraArgs.all(arg, !arg.matches('{OWNED_FLAGS}'))",
            "engine: extraArgs may not set --host, --port, --admin-port, --events-port, --replay-port, --served-model-name or "
            "--shutdown-timeout, which Penstock sets; use spec.served and spec.drainTimeout",
            lambda engine: not any(re.match(OWNED_FLAGS, arg) for arg in engine.extra_args),
        ),
        Rule(
            f"!has(self.extraArgs) || self.extraArgs.all(arg, !arg.matches('{TYPED_FLAGS}'))",
            "engine: extraArgs may not set what has a field: use source, engine.dtype, engine.limits, engine.quantization, "
            "engine.speculative, engine.connector, lora, and the pools' parallelism and accelerator",
            lambda engine: not any(re.match(TYPED_FLAGS, arg) for arg in engine.extra_args),
        ),
        Rule(
            "!has(self.extraArgs) || !has(self.limits) || !has(self.limits.memoryPercent) || "
            f"self.extraArgs.all(arg, !arg.matches('{MEMORY_FLAGS}'))",
            "engine: limits.memoryPercent, and --kv-cache-memory-bytes or --num-gpu-blocks-override in extraArgs, exclude each "
            "other; remove one",
            lambda engine: (
                engine.limits.memory_percent is None or not any(re.match(MEMORY_FLAGS, arg) for arg in engine.extra_args)
            ),
        ),
    )

    image: str | None = Field(default=None, min_length=1, max_length=512)
    """Container image; absent: the operator's default."""
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "float32"], Flag("--dtype")] = "auto"
    """Type of weights and activations; `auto` is the checkpoint's."""
    quantization: Quantization | None = None
    """What is stored and computed in fewer bits. Absent: as the checkpoint is."""
    limits: Limits = Limits()
    """Sizes; absent ones take the engine's defaults."""
    speculative: Speculative | None = None
    """Speculative decoding. Absent: off."""
    connector: Connector = Connector()
    """How KV cache leaves a replica, for prefill/decode disaggregation and offload."""
    extra_args: list[Argument] = Field(default=[], max_length=64, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    """More flags for `penstock serve`, as they are."""


class AdapterSource(Part):
    """A place that adapters may come from."""

    RULES = (
        Rule(
            f"self.prefix.matches('{URI_SCHEMES}')",
            "lora: sources: prefix must be an absolute path or begin with hf://, file://, pvc:// or s3://",
            lambda source: re.match(URI_SCHEMES, source.prefix) is not None,
        ),
        Rule(
            "!has(self.secretRef) || self.prefix.matches('^(hf|s3)://')",
            "lora: sources: secretRef is for hf:// and s3://; remove it",
            lambda source: source.secret_ref is None or re.match("^(hf|s3)://", source.prefix) is not None,
        ),
    )

    prefix: Uri
    """This place and everything below it is allowed: `s3://team-a` and `s3://team-a/sql`, but not `s3://team-ab`."""
    secret_ref: LocalReference | None = None
    """Secret with the credentials for it, as in `source.secretRef`."""

    def allows(self, uri: str) -> bool:
        """Whether an adapter at `uri` comes from here. `uri` has no `..`, as of an `AdapterOrigin`."""
        place = self.prefix.rstrip("/")
        return uri == place or uri.startswith(place + "/")


class Lora(Part):
    """Room for LoRA adapters, and the allow-list of where they come from."""

    RULES = (
        Rule(
            "!has(self.cpuSlots) || self.cpuSlots >= self.slots",
            "lora: cpuSlots must not be below slots",
            lambda lora: lora.cpu_slots is None or lora.cpu_slots >= lora.slots,
        ),
    )

    slots: Annotated[int, Flag("--max-loras")] = Field(default=4, ge=1, le=256)
    """Adapters on the device at once."""
    cpu_slots: Annotated[int | None, Flag("--max-cpu-loras")] = Field(default=None, ge=1, le=4096)
    """Adapters in host memory at once."""
    max_rank: Annotated[int, Flag("--max-lora-rank")] = Field(default=16, ge=1, le=512)
    """Largest rank."""
    sources: list[AdapterSource] = Field(default=[], max_length=32, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    """Where LoraAdapters of this model may come from."""


def _whole(pools: list[Pool]) -> bool:
    roles = {pool.role for pool in pools}
    return roles == {"Both"} or roles == {"Prefill", "Decode"}


def _one_secret(source: Source, bucket: ConnectorBucket | None) -> bool:
    if source.secret_ref is None or not source.uri.startswith("s3://") or bucket is None or bucket.secret_ref is None:
        return True
    if source.cache is not None and source.cache.type == "PVC":  # a Job downloads, with credentials of its own
        return True
    return bucket.secret_ref.name == source.secret_ref.name


def _affordable(pools: list[Pool], scaling: SharedScaling | None) -> bool:
    if scaling is None or scaling.budget is None:
        return True
    return sum(pool.scaling.min * pool.cost for pool in pools if pool.scaling is not None) <= scaling.budget


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
            "!has(self.source.secretRef) || !self.source.uri.startsWith('s3://') || !has(self.engine) || "
            "(has(self.source.cache) && self.source.cache.type == 'PVC') || "
            "!has(self.engine.connector) || !has(self.engine.connector.bucket) || "
            "!has(self.engine.connector.bucket.secretRef) || "
            "self.engine.connector.bucket.secretRef.name == self.source.secretRef.name",
            "engine: connector: bucket: a replica has the credentials of one Secret: name that of source.secretRef",
            lambda spec: _one_secret(spec.source, spec.engine.connector.bucket),
        ),
        Rule(
            "!has(self.canary) || self.canary.of != self.served.name",
            "canary: of must name another model, not this one's served.name",
            lambda spec: spec.canary is None or spec.canary.of != spec.served.name,
        ),
        Rule(
            "!has(self.scaling) || self.pools.exists(pool, has(pool.scaling))",
            "scaling is for pools that the autoscaler sizes: give at least one pool scaling, or remove spec.scaling",
            lambda spec: spec.scaling is None or any(pool.scaling is not None for pool in spec.pools),
        ),
        Rule(
            "!has(self.scaling) || !has(self.scaling.prefillPerDecode) || self.pools.exists(pool, pool.role == 'Prefill')",
            "scaling.prefillPerDecode is for Prefill and Decode pools: remove it, or give the pools these roles",
            lambda spec: spec.scaling is None or spec.scaling.prefill_per_decode is None or spec.pools[0].role != "Both",
        ),
        Rule("", "pools: two pools have the same name", lambda spec: len({pool.name for pool in spec.pools}) == len(spec.pools)),
        Rule(
            "!has(self.scaling) || !has(self.scaling.budget) || self.pools.filter(pool, has(pool.scaling))"
            ".map(pool, pool.scaling.min * pool.cost).sum() <= self.scaling.budget",
            "scaling: budget must pay for the min of every pool; raise it, or lower a pool's scaling.min or cost",
            lambda spec: _affordable(spec.pools, spec.scaling),
        ),
        lasting("", "drainTimeout", "0s", "24h"),
    )

    served: Served
    """The names that clients use."""
    canary: Canary | None = None
    """A share of another model's traffic. Absent: traffic comes by this model's own names."""
    source: Source
    """Where the weights are."""
    engine: Engine = Engine()
    """What each replica runs."""
    lora: Lora | None = None
    """Room for LoRA adapters, and where they may come from. Absent: no adapters."""
    replicas: int | None = Field(default=None, ge=0, le=1000)
    """Replicas of the only pool, and the model's scale subresource (`kubectl scale`). 0 stops serving on purpose."""
    pools: list[Pool] = Field(
        min_length=1,
        max_length=MAX_POOLS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Groups of interchangeable replicas: all `Both`, or at least one `Prefill` and one `Decode`."""
    scaling: SharedScaling | None = None
    """What the pools share that the autoscaler sizes: a budget, a ratio."""
    routing: Routing = Routing()
    """How the gateway chooses replicas."""
    rollout: Rollout = Rollout()
    """How a change reaches the replicas."""
    drain_timeout: Duration = "120s"
    """How long a replica that is told to stop may finish its requests."""


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
        """What clients may put in `model`: the served name, then the aliases, each once."""
        return list(dict.fromkeys([self.spec.served.name, *self.spec.served.aliases]))
