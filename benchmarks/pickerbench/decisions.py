"""The whole picker, with a fleet that the benchmark makes up."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.pickerbench.proxy import BODY, FIRST, REPORT, Play, through
from penstock.api.events import BlockStored
from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.gateway.h2.server import Server
from penstock.gateway.load.tokenized import TokenizedPrompts, exact, extra_keys
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.compiled import Compiled
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.process import Gateway, GatewaySettings
from penstock.gateway.xds.listener import ListenerSettings
from penstock.prompt.memo import PrefixMemo

TOKENS = 500


class Still:
    """Discovery of what the benchmark says itself."""

    async def watch(self) -> AsyncIterator[Fleet]:
        """Yield the fleet once it is known completely, and again after each change."""
        await asyncio.Event().wait()
        yield Fleet()


def decision(
    replicas: int,
    audit_log: Path | None = None,
    memo: PrefixMemo | None = None,
    *,
    body: bytes = BODY,
    traced: bool = False,
    distinct: bytes | None = None,
    open_streams: int = 0,
    compiled: Compiled | None = None,
) -> Play:
    """The whole picker.

    Args:
        replicas: How many there are.
        audit_log: Where it is written; what its own thread does is left out.
        memo: What tokenises; None: nothing does.
        body: That of each request.
        traced: See `through`.
        distinct: See `through`.
        compiled: What makes picks; None: Python.
        open_streams: Requests with the same prompt that run all the while.
    """
    listener = ListenerSettings(host="127.0.0.1", port=1)
    settings = GatewaySettings(name="b", host="127.0.0.1", grpc_port=0, http_port=0, listener=listener, audit_log=audit_log)
    with patch("penstock.gateway.process.installed", lambda: compiled):
        gateway = Gateway(settings, Still())
    state = gateway._follower.state
    fleet = Fleet(
        models=[Model(id="b/m", served_names=["m"])],
        pools=[Pool(id="b/m/p", model="b/m")],
        replicas=[
            Replica(uid=f"u{n}", name=f"r{n}", pool="b/m/p", host=f"10.0.{n // 250}.{n % 250 + 1}", port=8000,
                    events_port=1, replay_port=1, ready=True)
            for n in range(replicas)
        ],
    )  # fmt: skip
    state.update(fleet)
    hashes = tuple(n.to_bytes(16) for n in range(TOKENS // 16))
    everywhere = frozenset(key_of(replica) for replica in fleet.replicas)
    counted = TokenizedPrompts(prompts=(Prompt(TOKENS, hashes),), comparable=everywhere)

    def tokenize(_: object, path: str, raw: bytes, body: Mapping[str, Any], *key: Any) -> TokenizedPrompts:
        if memo is None:
            return counted
        return TokenizedPrompts(prompts=exact(memo, path, body, extra_keys(body, *key)), comparable=everywhere)

    # The fleet has no replica to ask for its prompt bundle. No thread tokenises: what it does would not count.
    groups = ([] if memo is None else [(memo, everywhere)]), frozenset[ReplicaKey]()
    gateway._prompts.spaces = lambda _: groups  # type: ignore[method-assign]
    gateway._prompts.at_once = tokenize  # type: ignore[method-assign]
    for number, replica in enumerate(fleet.replicas):
        state.event(key_of(replica), BlockStored(list(hashes[: number % len(hashes)])), 0.0)
    for replica in fleet.replicas:
        state.reported(key_of(replica), REPORT, time.monotonic())
    for number in range(open_streams):
        key = key_of(fleet.replicas[number % replicas])
        running = RequestView(id=f"open-{number}", path="", model="m", prompts=counted.prompts)
        state.bookings.responded(state.book(running, key, 0, time.monotonic()), (1, FIRST), time.monotonic())
        state.reported(key, REPORT, time.monotonic())
    server = Server(2**25, compiled=compiled)
    gateway._extproc.add_to(server)
    play = through(server, body, traced=traced, distinct=distinct)

    async def ended(count: int, cold: list[float] | None = None) -> None:
        """Nobody tells the picker here what has ended: it finds out by itself, in two looks."""
        await play(count, cold)
        for _ in range(2):
            gateway._underway.sweep(time.monotonic())

    return ended
