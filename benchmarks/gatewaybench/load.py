"""The load: chat requests over kept connections, at random times whatever the answers do, or one after the other."""

import asyncio
import itertools
import time
from collections.abc import Iterator

import numpy as np

from penstock.client.bench.arrivals import arrival_times, drive

CLOSED = 0
"""In place of a rate: every connection asks as soon as it is answered."""


class Client:
    """One kept connection, that asks what `requests` has next."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: Iterator[bytes]) -> None:
        self._reader, self._writer, self._requests = reader, writer, requests

    async def ask(self) -> None:
        """One request and its answer; raises RuntimeError on anything but 200."""
        self._writer.write(next(self._requests))
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode(errors="replace"))
        await self._reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))

    def close(self) -> None:
        """Hangs up."""
        self._writer.close()


async def load(port: int, rate: float, seconds: float, connections: int, requests: Iterator[bytes]) -> list[float]:
    """Latencies in seconds, sorted; those of an open loop count from the intended moment."""
    clients = [Client(*await asyncio.open_connection("127.0.0.1", port), requests) for _ in range(connections)]
    try:
        for client in clients:
            await client.ask()
        return sorted(await (_open(clients, rate, seconds) if rate else _closed(clients, seconds)))
    finally:
        for client in clients:
            client.close()


async def _closed(clients: list[Client], seconds: float) -> list[float]:
    latencies: list[float] = []
    until = time.perf_counter() + seconds

    async def work(client: Client) -> None:
        while (start := time.perf_counter()) < until:
            await client.ask()
            latencies.append(time.perf_counter() - start)

    await asyncio.gather(*map(work, clients))
    return latencies


async def _open(clients: list[Client], rate: float, seconds: float) -> list[float]:
    latencies: list[float] = []
    idle: asyncio.Queue[Client] = asyncio.Queue()
    for client in clients:
        idle.put_nowait(client)

    async def ask(intended: float, _: None) -> None:
        client = await idle.get()
        await client.ask()
        idle.put_nowait(client)
        latencies.append(time.perf_counter() - intended)

    times = itertools.takewhile(lambda at: at < seconds, arrival_times(rate, 1.0, np.random.default_rng(1)))
    await drive(((at, None) for at in times), ask)
    return latencies
