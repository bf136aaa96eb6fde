"""A port of its own for each InferencePool.

A foreign gateway's request does not say which pool it is for: the port by which it comes does. A pool gets the port that
`--pool-port` gives it, or one of a range: a number drawn from its name, the next free one where an older pool has that. So a
picker that restarts, and another beside it, come to the same ports.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Protocol
from zlib import crc32

from penstock.api.fleet import InferencePool
from penstock.gateway.extproc.ceiling import Ceiling
from penstock.gateway.extproc.exchange import Director
from penstock.gateway.extproc.service import ExtProcService
from penstock.gateway.extproc.wire import Wire
from penstock.gateway.picker.choice import MAX_ENDPOINTS

log = logging.getLogger(__name__)

CLOSE_S = 20.0
"""How long requests in progress may keep the port of a pool that is gone."""


class Listening(Protocol):
    """A server that listens on one port."""

    async def stop(self, grace: float) -> None:
        """Takes no more calls, and gives those in progress `grace` seconds."""
        ...


Listen = Callable[[ExtProcService, int], Awaitable[Listening]]
"""Begins to serve ext_proc and health on a port; raises OSError or RuntimeError where it cannot be had."""


def assign(
    pools: Iterable[InferencePool], fixed: Mapping[str, int], ports: range, current: Mapping[str, int], busy: Collection[int] = ()
) -> tuple[dict[str, int], list[str]]:
    """The port of each pool by its id, and the pools for which there is none left.

    Args:
        pools: All pools.
        fixed: Ports that were given to pools.
        ports: Those that may be given out.
        current: What was assigned before, which stays.
        busy: Ports that cannot be given out now.
    """
    oldest_first = sorted(pools, key=lambda pool: (pool.created, pool.id))
    given = {pool.id: fixed[pool.id] for pool in oldest_first if pool.id in fixed}
    taken = {*fixed.values(), *busy}
    for pool in oldest_first:
        if pool.id not in given and current.get(pool.id, 0) in ports and current[pool.id] not in taken:
            given[pool.id] = current[pool.id]
            taken.add(current[pool.id])
    left_out: list[str] = []
    for pool in oldest_first:
        if pool.id in given:
            continue
        start = crc32(pool.id.encode())
        tried = (ports[(start + step) % len(ports)] for step in range(len(ports)))
        port = next((port for port in tried if port not in taken), None)
        if port is None:
            left_out.append(pool.id)
        else:
            given[pool.id] = port
            taken.add(port)
    return given, left_out


class PoolPorts:
    """The servers of all InferencePools.

    Args:
        director: Who decides.
        listen: Serves one of them.
        fixed: Ports by pool id.
        ports: What the other pools get theirs of.
        fallbacks: Answers name several destinations; else one, since many gateways take no more.
        ceiling: What the requests of all ports together may keep.
        wire: What reads and writes their messages; None: protobuf.
    """

    def __init__(
        self,
        director: Director,
        listen: Listen,
        *,
        fixed: Mapping[str, int],
        ports: range,
        fallbacks: bool = False,
        ceiling: Ceiling | None = None,
        wire: Wire | None = None,
    ) -> None:
        self._wire = wire
        self._director = director
        self._ceiling = ceiling
        self._listen = listen
        self._fixed = fixed
        self._range = ports
        self._destinations = MAX_ENDPOINTS if fallbacks else 1
        self._assigned: dict[str, int] = {}
        self._servers: dict[str, tuple[int, Listening, ExtProcService]] = {}
        self._closing: dict[asyncio.Task[None], tuple[int, Listening]] = {}
        self._lock = asyncio.Lock()

    @property
    def ports(self) -> dict[str, int]:
        """The pools that are served, and where."""
        return {pool: port for pool, (port, _, _) in sorted(self._servers.items())}

    @property
    def services(self) -> list[ExtProcService]:
        """What serves them."""
        return [service for _, _, service in self._servers.values()]

    async def update(self, pools: Iterable[InferencePool]) -> bool:
        """Give ports to exactly these pools; whether `ports` differs afterwards. A port that is taken is tried again at the next
        call."""
        async with self._lock:
            before = self.ports
            await self._update(list(pools))
            return self.ports != before

    async def _update(self, pools: Collection[InferencePool]) -> None:
        for pool in self._servers.keys() - {pool.id for pool in pools}:
            port, server, _ = self._servers.pop(pool)
            log.info("InferencePool %s is not served on port %d any more", pool, port)
            task = asyncio.create_task(server.stop(CLOSE_S))
            self._closing[task] = port, server
            task.add_done_callback(self._closing.pop)
        busy = [port for port, _ in self._closing.values()]
        self._assigned, left_out = assign(pools, self._fixed, self._range, self._assigned, busy)
        for pool in left_out:
            log.error("InferencePool %s gets no port: all of --pool-port-range are taken", pool)
        for pool, port in self._assigned.items():
            if pool in self._servers:
                continue
            service = ExtProcService(self._director, self._destinations, pool, self._ceiling, wire=self._wire)
            try:
                self._servers[pool] = port, await self._listen(service, port), service
                log.info("InferencePool %s is served on port %d", pool, port)
            except (OSError, RuntimeError) as error:
                log.error("InferencePool %s: port %d cannot be had: %s", pool, port, error)

    async def close(self, grace: float) -> None:
        """Ends all of them."""
        servers = [server for _, server, _ in self._servers.values()] + [server for _, server in self._closing.values()]
        for task in self._closing:
            task.cancel()
        self._servers.clear()
        await asyncio.gather(*(server.stop(grace) for server in servers))
