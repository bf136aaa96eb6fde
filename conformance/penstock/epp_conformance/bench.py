"""What a check has in its hands: streams to the picker, and an Envoy in front of it."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from penstock.epp_conformance.conversation import Conversation, Hint
from penstock.epp_conformance.outcome import Outcome
from penstock.epp_conformance.rig import Rig
from penstock.epp_conformance.target import Target
from penstock.epp_conformance.verdict import NotApplicable

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


class Bench:
    """The tools of all checks of one run."""

    def __init__(self, target: Target, channel: grpc.aio.Channel, rig: Rig | None) -> None:
        self.target = target
        self._channel = channel
        self._rig = rig

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[Conversation]:
        """One stream, reset in the end if it is still open."""
        conversation = Conversation(self._channel, self.target)
        try:
            yield conversation
        finally:
            await conversation.close()

    def call(self, method: str = PROCESS, compression: grpc.Compression | None = None) -> Any:
        """A call of whatever method, of whatever bytes; the caller ends it."""
        return self._channel.stream_stream(method)(compression=compression)

    async def ask(self, body: bytes | None = None, *, hint: Hint = ..., hint_on: str = "both", **head: Any) -> Outcome:
        """One whole FULL_DUPLEX_STREAMED request; what came of it.

        Args:
            body: A completion by default.
            hint: Subset hint.
            hint_on: Which messages carry it: `headers`, `body`, or `both`, as Envoy does it.
            head: See `Conversation.headers`.
        """
        async with self.stream() as stream:
            await stream.headers(hint=... if hint_on == "body" else hint, **head)
            await stream.body(self.target.body() if body is None else body, hint=... if hint_on == "headers" else hint)
            return await stream.outcome()

    async def look(self, **head: Any) -> Outcome:
        """One request without a body."""
        async with self.stream() as stream:
            await stream.headers(method="GET", path="/v1/models", ends=True, **head)
            return await stream.outcome()

    def endpoints(self, count: int) -> tuple[str, ...]:
        """Return the endpoints, if the picker knows that many."""
        known = self.target.endpoints
        if len(known) < count:
            raise NotApplicable(f"the picker was told of {len(known)} endpoints; this takes {count} (--endpoint)")
        return known

    @property
    def rig(self) -> Rig:
        """Envoy and the backends."""
        if self._rig is None:
            raise NotApplicable("needs backends of the suite's own at the picker's endpoints (--serve-endpoints)")
        return self._rig
