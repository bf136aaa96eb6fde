"""Polls `/load` of the replicas whose event stream is silent, so that an idle replica is known to be idle."""

import asyncio
import logging
import time

import aiohttp
import msgspec

from penstock.api.fleet import Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.picker.candidates import key_of
from penstock.gateway.picker.state import FleetState

log = logging.getLogger(__name__)

SILENT_S = 1.0
TICK_S = 0.25
TIMEOUT = aiohttp.ClientTimeout(total=1.0)
PARALLEL = 32


class LoadPoller:
    """Keeps every ready replica heard of at least about once a second."""

    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._limit = asyncio.Semaphore(PARALLEL)

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Polls until cancelled."""
        while True:
            ready = {key: replica for key, replica in self._state.replicas().items() if replica.ready}
            silent = self._state.reports.silent(list(ready), time.monotonic(), SILENT_S)
            await asyncio.gather(*(self._poll(session, ready[key]) for key in silent))
            await asyncio.sleep(TICK_S)

    async def _poll(self, session: aiohttp.ClientSession, replica: Replica) -> None:
        async with self._limit:
            asked_at = time.monotonic()
            try:
                async with session.get(f"http://{replica.endpoint}/load", timeout=TIMEOUT) as response:
                    response.raise_for_status()
                    report = msgspec.json.decode(await response.read(), type=LoadReport)
            except aiohttp.ClientConnectorError as error:
                log.info("%s cannot be reached: %s", replica.name, error)
                self._state.suspect(key_of(replica), time.monotonic())
            except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
                log.info("no load report of %s: %r", replica.name, error)
            else:
                self._state.reported(key_of(replica), report, time.monotonic(), asked_at)
