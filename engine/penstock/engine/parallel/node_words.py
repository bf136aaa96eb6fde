"""What the nodes of an engine say to each other, in msgpack over TCP. Node 0 has the core.

A node greets node 0, and is welcomed or refused. Then node 0 sends it what its ranks are to do, and it tells what they say.
"""

from typing import Final

import msgspec

from penstock.engine.parallel.layout import WireKind
from penstock.engine.parallel.shared_memory import RankProgress

MAX_GREETING: Final = 1 << 22
"""Bytes of a greeting: anybody may connect to the port."""


class NodeHello(msgspec.Struct, frozen=True, tag="node"):
    """A node has come."""

    node: int
    fingerprint: dict[str, str]
    port: int
    """Where it waits for wires."""
    count: int = 1
    """Data-parallel ranks that it has, `node` being the first; 1 where nodes have ranks of one core."""


class WireHello(msgspec.Struct, frozen=True, tag="wire"):
    """The connection is a wire."""

    token: str
    sender: int
    receiver: int
    kind: WireKind = "sums"


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """All nodes have come."""

    token: str
    """What wires must show."""
    addresses: list[tuple[str, int]]
    """Of every node's port for wires."""
    starts: list[int]
    """The first number of each: its own, or that of the first data-parallel rank that it has."""


class TurnedAway(msgspec.Struct, frozen=True, tag="turned_away"):
    """The node cannot join, or no node can."""

    message: str


class Order(msgspec.Struct, frozen=True, tag="order"):
    """For all ranks of the node: `words.Order`."""

    data: bytes


class BesideOrder(msgspec.Struct, frozen=True, tag="beside"):
    """The same for all ranks, at once."""

    data: bytes


class ShowStack(msgspec.Struct, frozen=True, tag="show_stack"):
    """A rank hangs: it is to write its stack to the log."""

    rank: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The engine ends in good order."""


class CoreLost(msgspec.Struct, frozen=True, tag="core_lost"):
    """A core of another node has ended."""

    core: int


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The ranks' processes are there."""

    pids: list[int]


class Said(msgspec.Struct, frozen=True, tag="said"):
    """What a rank has said: `words.Reply`."""

    rank: int
    data: bytes
    beside: bool
    """Whether it answers a `BesideOrder`."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A rank's process has ended."""

    rank: int
    how: str


class Marks(msgspec.Struct, frozen=True, tag="marks"):
    """How far the ranks of the node have come."""

    progress: list[RankProgress]


Greeting = NodeHello | WireHello
Answer = Welcome | TurnedAway
Task = Order | BesideOrder | ShowStack | CoreLost | Close
Report = Started | Said | Ended | Marks

encode = msgspec.msgpack.Encoder().encode
decode_greeting = msgspec.msgpack.Decoder(Greeting).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode_task = msgspec.msgpack.Decoder(Task).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
