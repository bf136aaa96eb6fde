"""kopf's watches of the users' resources. It posts no Events, adds no finalizers or annotations and scans for no CRDs.

kopf replaces the handlers of signals and cancels every task of its event loop when it ends. It has a thread with a loop of its
own so that both stay ours.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import aiohttp
import kopf
from kubernetes.aio.client import ApiClient

from penstock.operator.api import RESOURCES
from penstock.operator.objects import Object

Heard = Callable[[str | None, Object], None]
"""Told the type of an event and its object; the type of an object in a list is None."""

LOGIN_HOLDS: Final = timedelta(seconds=60)
"""A token in a file is replaced by and by: it is read again this often."""
LOGIN_PAUSE_S: Final = 1.0
"""Between two logins where the server takes none."""
END_S: Final = 7.0
"""How long kopf may take to end by itself; it gives its tasks five seconds."""
BACKOFFS_S: Final = (0.5, 1.0, 2.0, 5.0)
"""Between tries of one request. The last failure ends kopf."""
# kopf logs each try. The operator's own lists and watches say once what is wrong with the server.
_TALKATIVE: Final = ("kopf._cogs.clients", "kopf._core.reactor.running", "kopf._core.reactor.orchestration")


async def live(api: ApiClient, kinds: Iterable[str], namespaces: Sequence[str], heard: Heard) -> None:
    """Runs kopf until it ends, or until this is cancelled; either way its thread has ended when this returns.

    Args:
        kinds: The kinds of resources to watch. The server must know their CRDs.
        namespaces: None named: all.
        heard: Called on this event loop.

    Raises:
        Exception: what has ended kopf. None where it got stuck while it ended.
    """
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    ours = asyncio.get_running_loop()
    life = _Life(ours, heard)
    # No task: when an event loop ends it cancels all tasks, and a cancelled one would say that its thread has ended.
    thread = ours.run_in_executor(None, asyncio.run, life.run(api, kinds, namespaces))
    ending = asyncio.ensure_future(life.ending.wait())
    try:
        await asyncio.wait([thread, ending], return_when=asyncio.FIRST_COMPLETED)
        done, _ = await asyncio.wait([thread], timeout=END_S)
        if done:
            thread.result()
    finally:
        ending.cancel()
        await _ended(thread, life)
        _ = thread.cancelled() or thread.exception()  # raised above, or of no interest any more


async def _ended(thread: asyncio.Future[None], life: "_Life") -> None:
    """Waits until kopf's thread has ended, however often this is cancelled meanwhile."""
    again: asyncio.CancelledError | None = None
    while not thread.done():
        life.cancel()
        try:
            await asyncio.wait([thread], timeout=1.0)
        except asyncio.CancelledError as error:
            again = error
    if again is not None:
        raise again


class _Life:
    """One run of kopf, in a thread of its own."""

    def __init__(self, ours: asyncio.AbstractEventLoop, heard: Heard) -> None:
        self.ending = asyncio.Event()
        """Set when kopf begins to end."""
        self._ours = ours
        self._heard = heard
        self._its: asyncio.AbstractEventLoop | None = None

    async def run(self, api: ApiClient, kinds: Iterable[str], namespaces: Sequence[str]) -> None:
        """Call it in the thread."""
        self._its = asyncio.get_running_loop()
        registry = kopf.OperatorRegistry()
        for resource in (RESOURCES[kind] for kind in kinds):
            kopf.on.event(resource.group, resource.version, resource.plural, registry=registry)(self._seen)
        kopf.on.login(registry=registry, backoff=LOGIN_PAUSE_S)(_Login(api, self._ours).give)
        kopf.on.cleanup(registry=registry)(self._ends)
        everywhere = not namespaces
        await kopf.operator(
            registry=registry, settings=_settings(), standalone=True, clusterwide=everywhere, namespaces=namespaces
        )

    def cancel(self) -> None:
        """Cancels all of kopf's tasks. Some of them survive one cancellation, where the server has not answered yet."""
        its = self._its
        if its is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
                its.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(its)])

    async def _seen(self, event: Any, **_: Any) -> None:
        self._ours.call_soon_threadsafe(self._heard, event["type"], event["object"])

    async def _ends(self, **_: Any) -> None:
        self._ours.call_soon_threadsafe(self.ending.set)


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.process.ultimate_exiting_timeout = None  # it would kill the process
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.chunk_size = 500
    settings.networking.connect_timeout = 10.0
    settings.networking.request_timeout = 60.0
    settings.networking.error_backoffs = BACKOFFS_S
    return settings


class _Login:
    """Gives kopf the credentials of our own client. Two answers are never equal: kopf ends where a server refuses the same ones
    twice."""

    def __init__(self, api: ApiClient, loop: asyncio.AbstractEventLoop) -> None:
        """
        Args:
            loop: The client's, where it may read its credentials anew.
        """
        self._api = api
        self._loop = loop
        self._not_before = 0.0

    async def give(self, **_: Any) -> kopf.AiohttpSession:
        await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
        self._not_before = time.monotonic() + LOGIN_PAUSE_S
        headers = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._headers(), self._loop))
        its = self._api.configuration
        connector = aiohttp.TCPConnector(limit=0, ssl=self._api.rest_client.ssl_context)
        session = aiohttp.ClientSession(connector=connector, headers=headers, proxy=its.proxy)
        return kopf.AiohttpSession(server=its.host, aiohttp_session=session, expiration=datetime.now(UTC) + LOGIN_HOLDS)

    async def _headers(self) -> dict[str, str]:
        request = await self._api.param_serialize("GET", "/", header_params={}, auth_settings=["BearerToken"])
        return dict(request[2])
