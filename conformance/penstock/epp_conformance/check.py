"""What a check is."""

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import cleandoc

from penstock.epp_conformance.bench import Bench

# Where a rule comes from.
PROTOCOL = "GAIE proposal 004, endpoint picker protocol"
EXT_PROC = "Envoy external_processor.proto"
MODES = "Envoy processing_mode.proto"
MUTATIONS = "Envoy ext_proc filter, header mutation rules"
HEALTH = "gRPC health checking protocol; GAIE proposal 004"
GRPC = "gRPC over HTTP/2, compression, status codes"
HTTP2 = "HTTP/2, RFC 9113"
OPENAI = "OpenAI API, error object"
PRACTICE = "practice: what gateways and clients do"


class Level(enum.StrEnum):
    """How much depends on a rule."""

    MUST = "MUST"
    """A gateway that keeps the protocol breaks, or sends a request to the wrong place."""
    SHOULD = "SHOULD"
    """Without it the picker works worse, or with fewer gateways."""


@dataclass(frozen=True)
class Check:
    """One rule, and how to see whether it is kept."""

    name: str
    level: Level
    source: str
    statement: str
    """One sentence: what a picker does."""
    run: Callable[[Bench], Awaitable[None]]
    """Raises `Failed` or `NotApplicable`."""


@dataclass(frozen=True)
class Group:
    """Checks of one subject."""

    name: str
    title: str
    checks: tuple[Check, ...]
    alone: bool = False
    """Run one by one: they share an Envoy and stop backends."""


def check(name: str, level: Level, source: str) -> Callable[[Callable[[Bench], Awaitable[None]]], Check]:
    """Makes a check of a function; its docstring is the statement."""

    def made(run: Callable[[Bench], Awaitable[None]]) -> Check:
        statement = " ".join(cleandoc(run.__doc__ or "").split())
        return Check(name, level, source, statement, run)

    return made
