"""The frontend's side of the core: starts its process, sends requests, yields what it says, and notices its death.

Imports no torch. Frontend ROUTER and core DEALER meet on a Unix socket in a folder of their own; messages are those of
`penstock.engine.messages`.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from penstock.engine import messages
from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.core.ipc.calls import Calls
from penstock.engine.messages import (
    AbortRequests,
    AddRequest,
    Command,
    Control,
    ControlDone,
    CoreFailed,
    CoreInput,
    CoreOutput,
    CoreReady,
    CoreStart,
    CoreStats,
    ExtendPrompt,
    FrontendLeft,
    StepOutputs,
)

MODEL_RUNNER = "penstock.engine.runner.model_runner:ModelRunner"
_LAST_WORDS_S = 0.5
_CLOSE_S = 5.0


class CoreError(RuntimeError):
    """The core could not start, failed, or is gone; the message says why."""


class CoreConnection(ABC):
    """What every client says to a core, whoever started it.

    Args:
        first_number: Of requests and calls.
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
        """Has the core carry out a command and returns its result; somebody must consume `outputs` meanwhile.

        Raises:
            CommandRefused: The core could not.
            CoreError: The core is gone.
        """
        with self._calls.opened() as (call_id, done):
            await self._send(Control(call_id, command))
            return await done

    async def outputs(self) -> AsyncIterator[StepOutputs | CoreStats]:
        """What the core says, without end; raises `CoreError` when it fails or dies."""
        try:
            while True:
                message = await self._receive()
                if isinstance(message, StepOutputs | CoreStats):
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
        events_address: Where the core publishes its event stream, such as `tcp://127.0.0.1:5557`; None: nowhere.
        replay_address: Where it answers requests for replay.
        engine_index: The core's number among those of this frontend.
        runner: `module:Class` of the model runner.
        shared: Whether further frontends may join, at `frontends_address`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        events_address: str | None = None,
        replay_address: str | None = None,
        engine_index: int = 0,
        runner: str = MODEL_RUNNER,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-core-"))
        self._start = CoreStart(
            config=config,
            engine_index=engine_index,
            address=f"ipc://{self._folder}/core",
            events_address=events_address,
            replay_address=replay_address,
            runner=runner,
            frontends_address=f"ipc://{self._folder}/frontends" if shared else None,
        )
        self._identity = messages.core_identity(engine_index)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # Nothing is ever dropped: requests are bounded by the core's queue, outputs by what the requests generate.
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._process: asyncio.subprocess.Process | None = None
        self._exited: asyncio.Task[int] | None = None

    @property
    def frontends_address(self) -> str | None:
        """Where further frontends join the core."""
        return self._start.frontends_address

    @property
    def pid(self) -> int | None:
        """The core's process, once started."""
        return self._process.pid if self._process else None

    async def start(self) -> CoreReady:
        """Starts the process and waits until it has made its first forward pass; raises `CoreError` when it cannot,
        `ConfigError` when it cannot as it was asked to."""
        self._socket.bind(self._start.address)
        # The OpenMP runtime reads its thread count from the environment alone, when torch is loaded.
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._config.threads)}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock.engine.core.ipc.process", stdin=asyncio.subprocess.PIPE, env=environment
        )
        self._exited = asyncio.create_task(self._process.wait())
        start = messages.encode(self._start)
        pipe = self._process.stdin
        assert pipe is not None
        pipe.write(len(start).to_bytes(4, "little") + start)
        message = await self._receive()
        if not isinstance(message, CoreReady):
            raise CoreError(f"the engine core began with {type(message).__name__} instead of CoreReady")
        if self.frontends_address is None:
            self._remove_folder()  # both ends are connected: nothing is left behind, even by a frontend that is killed
        return message

    async def frontend_left(self, frontend: int) -> None:
        """Ends the requests of a frontend that has died."""
        await self._send(FrontendLeft(frontend))

    async def close(self) -> None:
        """Ends the process, at once and whatever it is doing, and releases everything; safe to call twice."""
        if self._process is not None and self._exited is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            try:
                await asyncio.wait_for(asyncio.shield(self._exited), _CLOSE_S)
            except TimeoutError:
                self._process.kill()
                await self._exited
        self._socket.close()
        self._context.term()
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _send(self, message: CoreInput) -> None:
        if self._exited is None or self._exited.done():
            raise CoreError(self._obituary())
        try:
            await self._socket.send(self._identity, zmq.SNDMORE)
            await self._socket.send(messages.encode(message))
        except zmq.ZMQError as error:
            raise CoreError(f"the engine core does not answer: {error}") from error

    async def _receive(self) -> CoreOutput:
        """The next message; `CoreFailed` is raised as `CoreError`, or `ConfigError` where that is what it was."""
        assert self._exited is not None, "start() first"
        receive = asyncio.ensure_future(self._socket.recv_multipart())
        try:
            await asyncio.wait({receive, self._exited}, return_when=asyncio.FIRST_COMPLETED)
            if not receive.done():  # dead; what it said last may still be under way
                await asyncio.wait({receive}, timeout=_LAST_WORDS_S)
            if not receive.done():
                raise CoreError(self._obituary())
            _, payload = receive.result()
        finally:
            receive.cancel()
        message = messages.decode_output(payload)
        if isinstance(message, CoreFailed):
            raise ConfigError(message.message) if message.refused else CoreError(message.message)
        return message

    def _obituary(self) -> str:
        if self._exited is None:
            return "the engine core has not been started"
        status = self._exited.result()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        return f"the engine core {how}; its log says more"
