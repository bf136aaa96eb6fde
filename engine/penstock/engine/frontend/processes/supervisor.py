"""Several frontends on one core: the parent that starts them all, and lets each fail alone.

The parent serves nothing itself. A frontend that dies takes its own connections with it; the core ends its requests, and another
takes its place. The core's death, and a signal, end all of them.
"""

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from penstock.engine.config import ConfigError
from penstock.engine.core.ipc.client import CoreClient, CoreError
from penstock.engine.frontend import banner
from penstock.engine.frontend.observe.metrics import EngineMetrics
from penstock.engine.frontend.observe.shared_counts import SharedCounts
from penstock.engine.frontend.processes import words
from penstock.engine.frontend.processes.serve import Ending, ServeConfig, clients, http_ports, port_error
from penstock.engine.frontend.processes.words import CoreGone, FrontendStart, Stop, StopNow, Word
from penstock.engine.messages import CoreReady

log = logging.getLogger(__name__)

# A frontend that lived shorter than this is replaced only when it would have lived so long: nothing starts in a tight loop.
_PATIENCE_S = 2.0
# Beyond what a frontend waits for by itself.
_GRACE_S = 5.0


async def supervise(config: ServeConfig) -> int:
    """Serves with `config.api_server_count` frontends; as `serve` otherwise."""
    ending = Ending()
    ending.on_signals()
    with ExitStack() as held:
        for flag, port in http_ports(config).items():
            held.enter_context(_reserve(config.host, flag, port))
        cores = clients(config, shared=True)
        try:
            return await _Supervisor(config, cores, ending).run()
        finally:
            await asyncio.gather(*(core.close() for core in cores))


def _reserve(host: str, flag: str, port: int) -> socket.socket:
    """Holds a port without listening; `ConfigError` where another server has it, which sharing ports would hide."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise port_error(host, flag, port, error) from error
    holder = socket.socket(family, kind)
    try:
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
    except OSError as error:
        holder.close()
        raise port_error(host, flag, port, error) from error
    return holder


class _Supervisor:
    """Supervisor of one replica.

    Args:
        config: How to serve.
        cores: Its cores by data-parallel rank, not yet started.
        ending: Signals when to end.
    """

    def __init__(self, config: ServeConfig, cores: Sequence[CoreClient], ending: Ending) -> None:
        self._config = config
        self._cores = cores
        self._ending = ending
        self._counts = [SharedCounts.create(config.api_server_count, EngineMetrics().table.size) for _ in cores]
        self._frontends: dict[int, asyncio.subprocess.Process] = {}
        self._number = 0
        self._ready = list[CoreReady]()
        self._over = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        """Run from the start of the first process to the end of the last."""
        keepers = [asyncio.create_task(self._keep(row)) for row in range(self._config.api_server_count)]
        works: list[Coroutine[Any, Any, object]] = [self._follow_core(rank) for rank in range(len(self._cores))]
        works += [self._follow_ending(), self._over.wait()]
        followers = [asyncio.create_task(work) for work in works]
        tasks = [*keepers, *followers]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # or raises what makes a start impossible
            await asyncio.wait(keepers, timeout=self._config.shutdown_timeout + _GRACE_S)
            return max(self._status, *(keeper.result() if keeper.done() else 1 for keeper in keepers))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for process in self._frontends.values():
                process.kill()
                await process.wait()
            for counts in self._counts:
                os.close(counts)

    async def _follow_core(self, rank: int) -> None:
        """Follow a core until it dies, which ends everything once the requests of other cores have ended."""
        core = self._cores[rank]
        try:
            ready = await core.start()
            self._ready.append(ready)
            if len(self._ready) == len(self._cores):
                banner.show(self._config, ready.kernels, ready.num_blocks)
            async for _ in core.outputs():
                pass
        except CoreError as error:
            if len(self._ready) < len(self._cores):
                raise
            log.error("engine failed: %s", error)
            self._end(1)
            self._tell(CoreGone(rank, str(error)))

    async def _follow_ending(self) -> None:
        await self._ending.stop.wait()
        self._end(0)
        self._tell(Stop())
        await self._ending.now.wait()
        self._tell(StopNow())

    def _end(self, status: int) -> None:
        self._status = max(self._status, status)
        self._over.set()

    async def _keep(self, row: int) -> int:
        """Keeps a frontend in a place until the end; returns the last one's exit status. Raises `ConfigError` where one cannot
        even start."""
        while not self._over.is_set():
            self._number += 1
            number, began = self._number, time.monotonic()
            process = await self._start(number, row)
            status = await process.wait()
            del self._frontends[number]
            if self._over.is_set():
                return abs(status)
            if status == 2:
                assert process.stdout is not None
                raise ConfigError((await process.stdout.read()).decode())
            log.error("frontend %d has ended with status %d; another takes its place", number, status)
            for core in self._cores:
                with suppress(CoreError):  # then its requests have ended too
                    await core.frontend_left(number)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), max(0.0, _PATIENCE_S - (time.monotonic() - began)))
        return 0

    async def _start(self, number: int, row: int) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.engine.frontend.processes.process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=tuple(self._counts),
        )
        self._frontends[number] = process
        addresses = [core.frontends_address for core in self._cores if core.frontends_address is not None]
        start = FrontendStart(config=self._config, frontend=number, row=row, core_addresses=addresses, counts=self._counts)
        _say(process, start)
        return process

    def _tell(self, word: Word) -> None:
        for process in self._frontends.values():
            _say(process, word)


def _say(process: asyncio.subprocess.Process, word: Word) -> None:
    pipe = process.stdin
    assert pipe is not None
    if not pipe.is_closing():  # else it has just died
        pipe.write(words.encode(word))
