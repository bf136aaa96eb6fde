"""What exists (models, pools, replicas), as discovery hands it to the picker, and how loaded it is, as the picker hands it to
the autoscaler.

The same types are the file format of local discovery (`penstock gateway --discovery file:PATH`) and of the gateway's `/pools`.
"""

from typing import Literal

import msgspec

from penstock.api.load_report import LoadReport

Role = Literal["Both", "Prefill", "Decode"]


def pool_id(namespace: str, model: str, pool: str) -> str:
    """The fleet-wide name of a pool: `Pool.id`."""
    return f"{namespace}/{model}/{pool}"


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One engine process; known by (`uid`, `port`), never by its address, which may be given out again."""

    uid: str
    """Pod UID."""
    name: str
    pool: str
    """`Pool.id`."""
    host: str
    """IP address."""
    port: int
    events_port: int
    replay_port: int
    ready: bool
    """The kubelet's (or the local runtime's) word; what the picker itself sees comes on top."""
    terminating: bool = False
    cordoned: bool = False
    """Chosen for scale-in: gets no new requests, and finishes those that it has."""

    @property
    def endpoint(self) -> str:
        """`ip:port`, IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Interchangeable replicas of one model; one Envoy cluster."""

    id: str
    """`namespace/model/pool`; the value of the pool header and the name of the Envoy cluster."""
    model: str
    """`Model.id`."""
    role: Role = "Both"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One InferenceModel as far as routing goes."""

    id: str
    """`namespace/name`."""
    served_names: list[str]
    """What clients put in `model`: the served name first, then its aliases."""
    created: float = 0.0
    """Unix time; where two models claim one served name, the oldest wins."""
    policy: str = "Cost"
    hold_timeout_s: float = 300.0


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that exists, at one moment."""

    models: list[Model] = []
    pools: list[Pool] = []
    replicas: list[Replica] = []


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


class PoolLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One pool: its replicas and the requests held at the gateway for want of one."""

    id: str
    model: str
    held: int
    replicas: list[ReplicaLoad]


class PoolsView(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `GET /pools`; with `?after=VERSION&timeout=SECONDS` it is withheld until `version` differs or the time is
    over."""

    gateway: str
    """Name of the gateway process, so that the autoscaler can sum over several."""
    version: int
    """Rises when a hold begins or the set of replicas changes: the things that must wake an autoscaler."""
    pools: list[PoolLoad]
