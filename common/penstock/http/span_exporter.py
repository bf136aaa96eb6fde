"""Export of spans to a collector (OTLP, JSON over HTTP).

No caller waits for the collector: spans are queued up to a bound, sent in batches, and dropped if the collector does not accept
them.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Final

import aiohttp

from penstock.api.tracing import Span, Value, encode

log = logging.getLogger(__name__)

EXPORT_EVERY_S: Final = 1.0
TIMEOUT: Final = aiohttp.ClientTimeout(total=2.0)
MAX_WAITING: Final = 4096
"""Spans that wait to be sent; more are dropped."""
MAX_BATCH: Final = 512


class SpanExporter:
    """Takes spans to a collector.

    Args:
        endpoint: The collector's OTLP endpoint for traces over HTTP.
        resource: Who they are of, such as `service.name`.
    """

    def __init__(self, endpoint: str, resource: Mapping[str, Value]) -> None:
        self._endpoint = endpoint
        self._resource = resource
        self._waiting: deque[Span] = deque()
        self._lost = 0
        self._failing = False

    def add(self, span: Span) -> None:
        """One more."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(span)
        else:
            self._lost += 1

    async def run(self) -> None:
        """Sends what has gathered, every second, until cancelled; then once more."""
        async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
            try:
                while True:
                    await asyncio.sleep(EXPORT_EVERY_S)
                    await self.flush(session)
            finally:
                await self.flush(session)

    async def flush(self, session: aiohttp.ClientSession) -> None:
        """Sends what has gathered. What is not taken is lost, and the log says so once until it is taken again."""
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
            try:
                await self._post(session, encode(batch, self._resource))
            except Exception as error:  # noqa: BLE001 - whatever is wrong with a collector must not become ours
                self._lost += len(batch)
                if not self._failing:
                    log.warning("traces are lost, since the collector does not take them: %r", error)
                self._failing = True
                return
            if self._failing or self._lost:
                log.warning("the collector takes traces again; %d spans are lost", self._lost)
            self._failing, self._lost = False, 0

    async def _post(self, session: aiohttp.ClientSession, body: bytes) -> None:
        async with session.post(self._endpoint, data=body, headers={"content-type": "application/json"}) as response:
            response.raise_for_status()
