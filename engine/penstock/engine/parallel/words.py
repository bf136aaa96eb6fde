"""What the core and the processes of the ranks say to each other, in msgpack.

Plans and calls go to all ranks alike, through shared memory. Each rank answers in the same order.
"""

import hashlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.engine.config import EngineConfig
from penstock.engine.core import plan as columns
from penstock.engine.core.plan import SampledTokens, SampleInputs, StepPlan, StepResult
from penstock.engine.parallel.expert_group import CoreExperts
from penstock.engine.parallel.links import LinkEnd


class FarLink(NamedTuple):
    """A pipeline stage beside this one that is on another node."""

    end: LinkEnd
    """The side of the link that is the other stage's, were it here."""
    wire: int
    """File descriptor of the connection to it."""


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing that a rank reads. The file descriptors are those that its process has inherited."""

    config: EngineConfig
    runner: str
    """`module:Class` of the model runner."""
    rank: int
    world: int
    """Ranks of all stages and nodes."""
    readers: int
    """Ranks of its node."""
    ring: int
    """Where orders are."""
    memory: int
    """Shared with the ranks of its stage."""
    meeting: str
    """Where ranks that cannot use shared memory find each other."""
    before: LinkEnd | None = None
    """From the pipeline stage before; None: there is none."""
    after: LinkEnd | None = None
    """To the next one."""
    outgoing: list[tuple[int, int]] = []
    """Wires to other nodes of the stage, and the rank, among those of the stage, that reads each."""
    incoming: list[int] = []
    """Wires from ranks on other nodes; this rank takes in what comes for all ranks of its node."""
    far_before: FarLink | None = None
    far_after: FarLink | None = None
    experts: CoreExperts | None = None
    """None: each rank has a part of every expert."""
    page_memory: list[int] = []
    """As in `Group`."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Apply a plan and run its forward pass."""

    plan: StepPlan
    masked: bool
    """Whether a `Sample` follows. False: sample without one."""
    sampled: list[SampledTokens] = []
    """Of the steps that have ended since the plan before: what the last pipeline stage tells the others."""


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """Sample the step submitted last, under masks."""

    inputs: SampleInputs


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Call a method of the runner."""

    method: str
    arguments: list[Any]
    """As msgpack has them: the method's annotations give their types."""


Order = Submit | Sample | Call


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The runner is there, and has loaded nothing yet."""

    fingerprint: dict[str, str]


class Retired(msgspec.Struct, frozen=True, tag="retired"):
    """A step is over."""

    digest: bytes
    """Digest of its result, which must be the same on every rank."""
    result: StepResult | None
    """Of the first rank of the last pipeline stage; None: the others'."""
    encoder_s: float = 0.0
    """Of an earlier stage's rank: how long it has encoded images."""


class StepLost(msgspec.Struct, frozen=True, tag="step_lost"):
    """A step came to nothing: `StepFailed`."""

    message: str


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """A call has returned."""

    value: msgspec.Raw


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A call has raised an error that its caller expects."""

    kind: Literal["ConfigError", "OSError"]
    message: str


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The rank cannot go on, and says why."""

    message: str


Reply = Hello | Retired | StepLost | Answer | Refused | Broken


def digest_of(result: StepResult) -> bytes:
    """Return a digest of everything that decides how requests continue."""
    state = hashlib.blake2b(digest_size=8)
    for array in (result.token_ids, result.counts, result.not_finite, result.drafts):
        state.update(b"-" if array is None else array.tobytes())
    if result.pooled is not None:
        state.update(result.pooled.vectors.tobytes())
    state.update(f"{result.step_id} {sorted(result.failed)}".encode())
    return state.digest()


def _enc_hook(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else columns.enc_hook(value)


def dec_hook(kind: type, value: Any) -> Any:
    """What msgpack has no form for."""
    return Path(value) if kind is Path else columns.dec_hook(kind, value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
encode = _encoder.encode
decode_start = msgspec.msgpack.Decoder(WorkerStart, dec_hook=dec_hook).decode
decode_order = msgspec.msgpack.Decoder(Order, dec_hook=columns.dec_hook).decode
decode_reply = msgspec.msgpack.Decoder(Reply, dec_hook=dec_hook).decode


def decode_value(value: msgspec.Raw, kind: Any) -> Any:
    """What a method of this return type has returned."""
    return msgspec.msgpack.decode(value, type=kind, dec_hook=dec_hook)
