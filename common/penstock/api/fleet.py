"""What exists (models, pools, replicas), as discovery hands it to the picker, and how loaded it is, as the picker hands it to
the autoscaler.

The same types are the file format of local discovery (`penstock gateway --discovery file:PATH`, with the short forms of
`penstock.gateway.discovery.document`) and of the gateway's `/pools`.
"""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from penstock.api import labels
from penstock.api.load_report import LoadReport

Role = Literal["Both", "Prefill", "Decode"]
LATENCY_EDGES_S: Final = tuple(0.01 * 1.2**step for step in range(56))
"""10 ms to 226 s, each a fifth above the one before."""
Engine = Literal["penstock", "vllm", "sglang", "trtllm", "llamacpp", "auto"]
"""What a replica runs, which decides how it says its load; `auto`: to be found out."""


def pool_id(namespace: str, model: str, pool: str) -> str:
    """The fleet-wide name of a pool: `Pool.id`."""
    return f"{namespace}/{model}/{pool}"


_OPEN = "inferencepool:"


def open_id(namespace: str, name: str) -> str:
    """`Model.id`, and the beginning of `Pool.id`, for pods of an InferencePool that belong to no InferenceModel."""
    return f"{_OPEN}{namespace}/{name}"


class Replica(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine process, or one data-parallel rank of it; known by `id`, never by its address, which may be given out again."""

    uid: str
    """Pod UID."""
    name: str
    pool: str
    """`Pool.id`."""
    host: str
    """IP address."""
    port: int
    events_port: int
    """0: it has no event stream."""
    replay_port: int
    """0: its events cannot be asked for again."""
    engine: Engine = "penstock"
    ready: bool
    """The kubelet's (or the local runtime's) word; what the picker itself sees comes on top."""
    terminating: bool = False
    cordoned: bool = False
    """Chosen for scale-in: gets no new requests, and finishes those that it has."""

    kv_layout: str = ""
    """Fingerprint of the content and layout of its KV cache: blocks travel between equal ones only; empty: never."""
    rank: int | None = None
    """Which data-parallel rank of the process it is. The ranks share an address, and each has a cache and an event stream of its
    own; None: the whole process."""

    @property
    def process(self) -> str:
        """`uid:port`: the same for all ranks of a process."""
        return f"{self.uid}:{self.port}"

    @property
    def id(self) -> str:
        """`uid:port`, or `uid:port:rank`: what it is known by."""
        return self.process if self.rank is None else f"{self.process}:{self.rank}"

    @property
    def title(self) -> str:
        """What people call it: its name, with its rank where there are several."""
        return self.name if self.rank is None else f"{self.name} rank {self.rank}"

    @property
    def open(self) -> bool:
        """Whether its pool is."""
        return self.pool.startswith(_OPEN)

    @property
    def endpoint(self) -> str:
        """`ip:port`, IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def ranks_of(whole: Replica, ports: Mapping[str, int]) -> list[Replica]:
    """Return the data-parallel ranks of a process, or the process itself where it has one rank.

    Args:
        whole: The process, with the event stream of its first rank.
        ports: Numbers of its container ports, by name; they tell how many ranks there are.
    """
    streams = [(whole.events_port, whole.replay_port)]
    while (events := ports.get(labels.rank_port(labels.EVENTS_PORT, len(streams)))) is not None:
        streams.append((events, ports.get(labels.rank_port(labels.REPLAY_PORT, len(streams)), 0)))
    if len(streams) == 1:
        return [whole]
    return [
        msgspec.structs.replace(whole, events_port=events, replay_port=replay, rank=rank)
        for rank, (events, replay) in enumerate(streams)
    ]


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Interchangeable replicas of one model; one Envoy cluster."""

    id: str
    """`namespace/model/pool`; the value of the pool header and the name of the Envoy cluster."""
    model: str
    """`Model.id`."""
    role: Role = "Both"

    @property
    def open(self) -> bool:
        """Whether it belongs to an InferencePool and to no InferenceModel: our own Envoy does not know it."""
        return self.id.startswith(_OPEN)


class Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A share of another model's traffic."""

    of: str
    """A name of that model, which is in the same namespace."""
    weight: float
    """Percent, 0 to 100."""


class Weights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights of the `WeightedScore` policy."""

    prefix: float = 3.0
    """Weight of the resident share of the prompt."""
    queue: float = 2.0
    """Against waiting requests, as a share of the replica's rows."""
    kv: float = 2.0
    """Against KV cache usage."""


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One InferenceModel as far as routing goes."""

    id: str
    """`namespace/name`; `open_id` where no InferenceModel stands behind it."""
    served_names: list[str]
    """What clients put in `model`: the served name first, then its aliases."""
    created: float = 0.0
    """Unix time; where two models or adapters claim one name, the oldest wins."""
    policy: str = "Cost"
    weights: Weights = Weights()
    priority: int = 0
    """Priority of this model's requests when room for waiting requests runs out. A smaller number is more important."""
    hold_timeout_s: float = 300.0
    canary: Canary | None = None

    @property
    def name(self) -> str:
        """What people call it: its served name, which is the one that its engines' answers carry."""
        return self.served_names[0] if self.served_names else self.id

    @property
    def namespace(self) -> str:
        """The namespace that it is in."""
        return self.id.removeprefix(_OPEN).partition("/")[0]

    @property
    def open(self) -> bool:
        """Whether it is an InferencePool that no InferenceModel owns: it serves whatever names its replicas serve."""
        return self.id.startswith(_OPEN)


class Adapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One LoraAdapter as far as routing goes."""

    id: str
    """`namespace/name`."""
    model: str
    """`Model.id`; where there is no such model, the adapter is not served."""
    served_names: list[str]
    """What clients put in `model`: the served name, by which engines call it too, then its aliases. Claims, as a model's."""
    created: float = 0.0
    """Unix time."""


class InferencePool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Gateway API InferencePool: what a foreign gateway sends requests to, by a port of its own on the picker."""

    id: str
    """`namespace/name`."""
    created: float = 0.0
    """Unix time."""
    models: list[str] = []
    """`Model.id`s of what its pods serve; an open one for pods that belong to no InferenceModel."""
    members: list[str] = []
    """`Replica.id`s. Requests that come by this pool go to no other replica."""
    picker: str = ""
    """`endpointPickerRef`, as `NAME` or `NAME:PORT`; empty where it has none."""
    fails_open: bool = False
    """If true, the gateway chooses an endpoint itself while the picker cannot be reached."""


class NameConflict(msgspec.Struct, frozen=True, kw_only=True):
    """A name that two claim: the older claim stands."""

    name: str
    claimant: str
    """The resource that does not get the name, as `InferenceModel namespace/name` or `LoraAdapter namespace/name`."""
    holder: str
    """The resource that has the name, in the same form."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every model, pool and replica at one moment."""

    models: list[Model] = []
    pools: list[Pool] = []
    replicas: list[Replica] = []
    adapters: list[Adapter] = []
    inference_pools: list[InferencePool] = []
    scaling: dict[str, str] = {}
    """The autoscaler's last word on a pool, by `Pool.id`: a sentence for people. Nothing is decided by it."""


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway knows of one replica."""

    uid: str
    name: str
    port: int
    ready: bool
    cordoned: bool
    report: LoadReport | None
    """None: nothing was heard. Never to be read as no load."""
    report_age_s: float | None
    pending: int
    """Requests picked for this replica whose response headers have not come."""
    in_flight: int
    """All requests that this gateway process sent there and that have not ended."""
    resident_blocks: int = 0
    """KV blocks that it is known to cache."""


class PoolLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One pool: its replicas and the requests held at the gateway for want of one."""

    id: str
    model: str
    held: int
    replicas: list[ReplicaLoad]
    refused: str | None = None
    """What an Envoy says of this pool's configuration, which it refuses; None where all took it."""
    ttft_counts: list[int] = []
    """Requests that have got a first token since this gateway process began, by the time that it took at the replica: one number
    for each of `LATENCY_EDGES_S`, up to which it counts, and one for all that took longer. Empty: none has."""


class ModelOutcomes(msgspec.Struct, frozen=True, kw_only=True):
    """How one model's requests began, counted from the beginning of a gateway process (`PoolsView.epoch`)."""

    model: str
    """`Model.id` of what answered: of a canary's share, the canary."""
    canary_of: str | None = None
    """`Model.id` of the model whose traffic it shares; None: it is no canary, or one that can get nothing."""
    requests: int
    """All that it was to answer."""
    failures: int
    """Requests that ended with a status of 500 or above, or that failed before there was a status."""
    ttft_counts: list[int] = []
    """Streamed answers by the time from the complete request to their first token, one number for each of `LATENCY_EDGES_S`
    and one for all that took longer."""


class PoolsView(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `GET /pools`; with `?after=VERSION&timeout=SECONDS` it is withheld until `version` differs or the time is
    over."""

    gateway: str
    """Name of the gateway process, so that the autoscaler can sum over several."""
    version: int
    """Rises when a hold begins, or the set of replicas or a port in `inference_pools` changes: what must wake an operator."""
    pools: list[PoolLoad]
    conflicts: list[NameConflict] = []
    """Claims to names that lost, for the conditions of those who made them."""
    epoch: str = ""
    """Differs between gateway processes, also between two of one name. A new epoch restarts all counts."""
    models: list[ModelOutcomes] = []
    """The models that have had requests."""
    inference_pools: dict[str, int] = {}
    """The port on which this gateway process serves each InferencePool, by `InferencePool.id`."""
