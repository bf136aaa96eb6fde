"""The frontend's side of the core: starts its process, sends requests, yields what it says, and notices its death.

Imports no torch. The frontend binds a ZMQ socket in a folder of its own, to which the core connects; further frontends connect
to one that the core binds there. Messages are those of `penstock.engine.messages`.
"""

import asyncio
import shutil
import socket
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine import messages
from penstock.engine.commands import Command
from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.core.ipc.calls import Calls
from penstock.engine.core.ipc.coupling import Coupling
from penstock.engine.core.ipc.far_cores import FarCores
from penstock.engine.core.ipc.framing import framed
from penstock.engine.core.ipc.inbox import Inbox
from penstock.engine.environment import computing
from penstock.engine.kv_events_config import KVEventsConfig
from penstock.engine.messages import (
    AbortRequests,
    AdaptersChanged,
    AddRequest,
    Control,
    ControlDone,
    CoreFailed,
    CoreInput,
    CoreOutput,
    CoreReady,
    CoreStart,
    ExtendPrompt,
    FrontendLeft,
    StepOutputs,
)
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.stats import CoreStats

_LAST_WORDS_S = 0.5
_CLOSE_S = 5.0


class CoreError(RuntimeError):
    """The core could not start, failed, or is gone; the message says why."""


class CoreConnection(ABC):
    """The messages of every client to a core, whichever process started it.

    Args:
        first_number: The first number of requests and calls.
    """

    def __init__(self, first_number: int = 0) -> None:
        self.first_number = first_number
        self._calls = Calls(first_number)

    @abstractmethod
    async def _send(self, message: CoreInput) -> None:
        """Raises `CoreError` when the core is gone."""

    @abstractmethod
    async def _receive(self) -> CoreOutput:
        """The next message; raises `CoreError` when the core fails or is gone."""

    async def add(self, request: AddRequest) -> None:
        """Sends one request; raises `CoreError` when the core is gone."""
        await self._send(request)

    async def extend(self, part: ExtendPrompt) -> None:
        """Sends more of the prompt of a request that was added without all of it; raises `CoreError` when the core is gone."""
        await self._send(part)

    async def abort(self, indexes: Sequence[int]) -> None:
        """Ends requests; unknown and finished ones are ignored. Does nothing when the core is gone, as they are then too."""
        try:
            await self._send(AbortRequests(list(indexes)))
        except CoreError:
            return

    async def call(self, command: Command) -> Any:
        """Have the core execute a command and return its result. `outputs` must be consumed meanwhile.

        Raises:
            CommandRefused: The core refused it.
            CoreError: The core is gone.
        """
        with self._calls.opened() as (call_id, done):
            await self._send(Control(call_id, command))
            return await done

    async def outputs(self) -> AsyncIterator[StepOutputs | CoreStats | AdaptersChanged]:
        """Yield the core's messages endlessly. Raises `CoreError` when the core fails or dies."""
        try:
            while True:
                message = await self._receive()
                if isinstance(message, StepOutputs | CoreStats | AdaptersChanged):
                    yield message
                elif isinstance(message, ControlDone):
                    self._calls.settle(message)
        except CoreError as error:
            self._calls.fail(CoreError(str(error)))
            raise


class CoreClient(CoreConnection):
    """One core process.

    `start` first, then `add` and `abort` at will while one task consumes `outputs`; `close` at the end, whatever happened.

    Args:
        config: The engine's configuration.
        events_addresses: Where the core publishes its event stream, such as `tcp://127.0.0.1:5557`: the first that is free;
            empty: nowhere.
        replay_addresses: Where it answers requests for replay: the first that is free.
        kv_events: Where it publishes KV events in vLLM's form; None: nowhere.
        engine_index: The core's number among those of this frontend.
        runner: `module:Class` of the model runner; None: the device's.
        shared: Whether further frontends may join, at `frontends_address`.
        coupling: With the other cores of the replica, whose steps are this one's too; None: it makes its own.
        far: The other nodes of the replica; the process here stands in for a core that is on one of them. None: all are here.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        events_addresses: Sequence[str] = (),
        replay_addresses: Sequence[str] = (),
        kv_events: KVEventsConfig | None = None,
        engine_index: int = 0,
        runner: str | None = None,
        shared: bool = False,
        coupling: Coupling | None = None,
        far: FarCores | None = None,
    ) -> None:
        super().__init__()
        self._coupling, self._far = coupling, far
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-core-"))
        self._address = str(self._folder / "core")
        self._start = CoreStart(
            config=config,
            engine_index=engine_index,
            address=self._address,
            events_addresses=list(events_addresses),
            replay_addresses=list(replay_addresses),
            kv_events=kv_events,
            runner=runner,
            frontends_address=str(self._folder / "frontends") if shared else None,
        )
        self._inbox = Inbox()
        self._process: asyncio.subprocess.Process | None = None
        self._exited: asyncio.Task[int] | None = None

    @property
    def frontends_address(self) -> str | None:
        """Address at which further frontends join the core."""
        return self._start.frontends_address

    @property
    def pid(self) -> int | None:
        """The core's process, once started."""
        return self._process.pid if self._process else None

    async def start(self) -> CoreReady:
        """Starts the process and waits until it has made its first forward pass; raises `CoreError` when it cannot,
        `ConfigError` when it cannot as it was asked to."""
        loop, inbox = asyncio.get_running_loop(), self._inbox
        try:
            inbox.bind(self._address)
        except OSError as error:
            raise CoreError(f"no socket for the engine core, see TMPDIR: {error}") from error
        core, coupling = self._start.engine_index, self._coupling
        if self._far is not None and core not in self._config.parallel.local_cores:
            with (await self._streams(self._far)).pop(core) as stream:
                self._start = msgspec.structs.replace(self._start, stream=stream.fileno())
                await self._run("stand_in", (stream.fileno(),))
        elif coupling is None:
            await self._run("process", ())
        else:
            if self._far is not None:  # whose cores this one makes steps with
                await self._streams(self._far)
            joined = {"wave": coupling.wave(core), "experts": coupling.experts(core)}
            self._start = msgspec.structs.replace(self._start, **joined)
            await self._run("process", coupling.descriptors(core))
        assert self._process is not None
        self._exited = asyncio.create_task(self._process.wait())
        self._exited.add_done_callback(lambda _: self._ended())
        # What it said last may still be under way.
        self._exited.add_done_callback(lambda _: loop.call_later(_LAST_WORDS_S, inbox.end))
        start = messages.encode(self._start)
        pipe = self._process.stdin
        assert pipe is not None
        pipe.write(framed(start))
        message = await self._receive()
        if not isinstance(message, CoreReady):
            raise CoreError(f"the engine core began with {type(message).__name__} instead of CoreReady")
        if self.frontends_address is None:
            self._remove_folder()  # both ends have met: nothing is left behind, even by a frontend that is killed
        return message

    async def _streams(self, far: FarCores) -> dict[int, socket.socket]:
        try:
            return await far.streams()
        except GroupFailed as error:
            raise CoreError(str(error)) from error

    async def _run(self, module: str, descriptors: Sequence[int]) -> None:
        """Start the process, which waits for its `CoreStart`."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"penstock.engine.core.ipc.{module}"),
            stdin=asyncio.subprocess.PIPE,
            env=computing(self._config),
            pass_fds=descriptors,
        )

    async def frontend_left(self, frontend: int) -> None:
        """Ends the requests of a frontend that has died."""
        await self._send(FrontendLeft(frontend))

    async def close(self) -> None:
        """Ends the process, at once and whatever it is doing, and releases everything; safe to call twice."""
        if self._far is not None:
            self._far.close()
        if self._process is not None and self._exited is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            try:
                await asyncio.wait_for(asyncio.shield(self._exited), _CLOSE_S)
            except TimeoutError:
                self._process.kill()
                await self._exited
        self._inbox.close()
        if self._coupling is not None:
            self._coupling.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _send(self, message: CoreInput) -> None:
        if self._exited is None or self._exited.done():
            raise CoreError(self._obituary())
        try:
            self._inbox.send(messages.encode(message))
        except ConnectionError as error:
            raise CoreError(f"the engine core does not answer: {error}") from error

    async def _receive(self) -> CoreOutput:
        """The next message; `CoreFailed` is raised as `CoreError`, or `ConfigError` where that is what it was."""
        payload = await self._inbox.next()
        if payload is None:
            raise CoreError(self._obituary())
        message = messages.decode_output(payload)
        if isinstance(message, CoreFailed):
            self._ended()
            raise ConfigError(message.message) if message.refused else CoreError(message.message)
        return message

    def _ended(self) -> None:
        """Those who wait for the core hear that it has ended, unless all are to end."""
        if self._coupling is not None:
            self._coupling.core_ended(self._start.engine_index)
        if self._far is not None:
            self._far.core_ended(self._start.engine_index)

    def _obituary(self) -> str:
        if self._exited is None:
            return "the engine core has not been started"
        if not self._exited.done():
            return "the engine core has been closed"
        status = self._exited.result()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        return f"the engine core {how}; its log says more"
