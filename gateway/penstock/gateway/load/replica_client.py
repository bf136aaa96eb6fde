"""How the gateway itself asks replicas: plain HTTP, or HTTPS by the same files as Envoy on its way to them."""

import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Literal

import aiohttp
import msgspec

from penstock.api.fleet import Replica
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.http.replica_tls import CurrentContext, ReplicaTls

log = logging.getLogger(__name__)


class TlsView(msgspec.Struct, frozen=True, kw_only=True):
    """What `/debug/tls` says of one replica."""

    replica: str
    address: str
    state: Literal["plain", "unknown", "ok", "failed"]
    """`unknown`: not asked yet. The gateway's own connections; Envoy's are made by the same files."""
    why: str = ""


class ReplicaTlsStates:
    """How the last attempt at TLS with each replica has ended.

    Args:
        tls: None: plain HTTP.
    """

    def __init__(self, tls: ReplicaTls | None = None) -> None:
        self.tls = tls
        self._failures: dict[ReplicaKey, str | None] = {}

    def ok(self, replica: Replica) -> None:
        """Record a successful handshake."""
        self._failures[key_of(replica)] = None

    def failed(self, replica: Replica, why: str) -> None:
        """Record a failed handshake or a broken connection."""
        key = key_of(replica)
        if self._failures.get(key) is None:
            log.warning("no TLS with %s at %s: %s", replica.name, replica.endpoint, why)
        self._failures[key] = why

    def view(self, replicas: Iterable[Replica]) -> list[TlsView]:
        """Return the states of these replicas, and forget the others."""
        known = list(replicas)
        keys = {key_of(replica) for replica in known}
        self._failures = {key: why for key, why in self._failures.items() if key in keys}
        return [self._view(replica) for replica in known]

    def _view(self, replica: Replica) -> TlsView:
        its: dict[str, Any] = {"replica": replica.name, "address": replica.endpoint}
        if self.tls is None:
            return TlsView(**its, state="plain")
        if key_of(replica) not in self._failures:
            return TlsView(**its, state="unknown")
        why = self._failures[key_of(replica)]
        return TlsView(**its, state="ok") if why is None else TlsView(**its, state="failed", why=why)


class ReplicaClient:
    """Asks replicas over one session.

    Args:
        session: Of connections, kept for all replicas.
        states: Told how it went; None: plain HTTP.
    """

    def __init__(self, session: aiohttp.ClientSession, states: ReplicaTlsStates | None = None) -> None:
        self._session = session
        self._states = states or ReplicaTlsStates()
        self._tls = None if self._states.tls is None else CurrentContext(self._states.tls)

    @contextlib.asynccontextmanager
    async def get(
        self, replica: Replica, path: str, limits: aiohttp.ClientTimeout, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer of a replica, as `aiohttp.ClientSession.get`. One that cannot prove who it is, is not asked."""
        if self._tls is None:
            async with self._session.get(f"http://{replica.endpoint}{path}", timeout=limits, headers=headers) as response:
                yield response
            return
        context, name = self._tls.get(), self._tls.name
        url = f"https://{replica.endpoint}{path}"
        try:
            async with self._session.get(url, timeout=limits, headers=headers, ssl=context, server_hostname=name) as response:
                self._states.ok(replica)
                yield response
        except aiohttp.ClientConnectionError as error:
            if isinstance(error, aiohttp.ClientSSLError) or "[SSL" in str(error):  # the replica's alert comes with the answer
                self._states.failed(replica, str(error))
            raise
