"""Asks replicas for their load: ours where the event stream is silent, so that an idle replica is known to be idle; those of
others every few seconds, by the page that they write for Prometheus."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec

from penstock.api.events import absurd
from penstock.api.fleet import Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.load.foreign import ForeignLoad, engine_of
from penstock.gateway.load.replica_client import ReplicaClient
from penstock.gateway.load.traits import Traits
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.state import FleetState
from penstock.http.replica_answers import UNREADABLE, body_of
from penstock.plain_errors import words_of

log = logging.getLogger(__name__)

SILENT_S = 1.0
PERIOD_S = 2.0
"""Between two looks at an engine of others. Its answers' headers and our own bookings tell what happens in between."""
TICK_S = 0.25
TIMEOUT = aiohttp.ClientTimeout(total=1.0)
PARALLEL = 32
MAX_BYTES = 8 * 2**20
"""Largest page in bytes. Large pages have a few hundred kB."""


class _RankReports(msgspec.Struct):
    """What `/load` says of each data-parallel rank."""

    data_parallel_ranks: list[LoadReport]


class LoadPoller:
    """Polls ready replicas that report no load themselves.

    Args:
        state: The fleet.
        learned: Called when a replica's engine becomes known or changes.
        period_s: Seconds between two polls of another project's engine. 0: poll none; only response headers and events report
        loads.
    """

    def __init__(self, state: FleetState, learned: Callable[[ReplicaKey], None], period_s: float = PERIOD_S) -> None:
        self._state = state
        self._learned = learned
        self._period_s = period_s
        self._limit = asyncio.Semaphore(PARALLEL)
        self._foreign: dict[ReplicaKey, ForeignLoad] = {}
        self._due: dict[ReplicaKey, float] = {}
        """When to look again, of engines that are not ours."""

    async def run(self, client: ReplicaClient) -> None:
        """Polls until cancelled."""
        if not self._period_s:
            await asyncio.Event().wait()
        while True:
            now = time.monotonic()
            ready = {key: replica for key, replica in self._state.directory.replicas.items() if replica.ready}
            for gone in self._due.keys() - ready.keys():
                self._due.pop(gone)
                self._foreign.pop(gone, None)
            ours = [key for key in ready if self._state.ours(key)]
            silent = self._state.reports.silent(ours, now, SILENT_S)
            due = [key for key in ready.keys() - set(ours) if self._due.get(key, now) <= now]
            polls = [self._poll(client, ready[key], self._report) for key in silent]
            polls += [self._poll(client, ready[key], self._look) for key in due]
            await asyncio.gather(*polls)
            await asyncio.sleep(TICK_S)

    async def _poll(
        self, client: ReplicaClient, replica: Replica, ask: Callable[[ReplicaClient, Replica], Awaitable[None]]
    ) -> None:
        async with self._limit:
            try:
                await ask(client, replica)
            except (aiohttp.ClientConnectorError, TimeoutError) as error:  # nobody there, or stopped
                log.info("%s cannot be reached: %s", replica.title, words_of(error))
                self._state.unreachable(key_of(replica), time.monotonic())
            except UNREADABLE as error:
                log.info("no load report of %s: %s", replica.title, words_of(error))

    async def _report(self, client: ReplicaClient, replica: Replica) -> None:
        """Asks a replica of ours."""
        asked_at = time.monotonic()
        try:
            report = _report_of(replica, await _get(client, replica, "/load"))
        except (aiohttp.ClientResponseError, ValueError) as error:
            if not isinstance(error, aiohttp.ClientResponseError) or error.status < 500:  # else it may have one later
                self._state.mute(key_of(replica))
            raise
        self._heard(key_of(replica), report, asked_at)

    async def _look(self, client: ReplicaClient, replica: Replica) -> None:
        """Looks at the page of another's engine, or finds out whose it is."""
        key, asked_at = key_of(replica), time.monotonic()
        self._due[key] = asked_at + self._period_s
        page = await _get(client, replica, "/metrics")
        engine = self._state.engine(key)
        if engine == "auto":
            found = engine_of(page)
            if found is None:
                log.info("%s runs an engine that its metrics do not tell", replica.title)
                return
            log.info("%s runs %s", replica.title, found)
            engine = found
        if engine == "penstock":
            self._learn(key, Traits(engine=engine))
            return
        load = self._foreign.get(key)
        if load is None:
            load = self._foreign[key] = ForeignLoad(engine)
        report, traits = load.read(page, time.monotonic())
        self._learn(key, traits)
        self._heard(key, report, asked_at)

    def _heard(self, key: ReplicaKey, report: LoadReport, asked_at: float) -> None:
        """Takes in a report; raises `ValueError` where it cannot be true."""
        if (why := absurd(report)) is not None:
            raise ValueError(why)
        self._state.reported(key, report, time.monotonic(), asked_at)

    def _learn(self, key: ReplicaKey, traits: Traits) -> None:
        if traits != self._state.traits(key):
            self._state.learned(key, traits)
            self._learned(key)


def _report_of(replica: Replica, page: bytes) -> LoadReport:
    """The report of a process, or of a rank of it; raises `ValueError` where the page has none."""
    if replica.rank is None:
        return msgspec.json.decode(page, type=LoadReport)
    ranks = msgspec.json.decode(page, type=_RankReports).data_parallel_ranks
    if replica.rank >= len(ranks):
        raise ValueError(f"it has {len(ranks)} data-parallel ranks, and none of number {replica.rank}")
    return ranks[replica.rank]


async def _get(client: ReplicaClient, replica: Replica, path: str) -> bytes:
    async with client.get(replica, path, TIMEOUT) as response:
        response.raise_for_status()
        return await body_of(response, MAX_BYTES)
