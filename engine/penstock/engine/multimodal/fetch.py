"""Fetches images for clients: over HTTPS, from the domains that were allowed, and from public addresses alone.

A name is resolved once, and the connection goes to the address that was checked: a name that resolves to another address a moment
later leads nowhere. No redirect is followed; no proxy, cookie or credential is used.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection
from typing import Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from penstock.engine.multimodal.addresses import is_public
from penstock.plain_errors import words_of
from penstock.prompt.data_url import MAX_IMAGE_BYTES
from penstock.prompt.errors import PromptError

TIMEOUT_S: Final = 10.0
MAX_FETCHES: Final = 16
"""At once."""
HTTPS_PORT: Final = 443

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""A host's name and a port to the addresses."""


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host by the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Fetcher:
    """Gets files by HTTPS.

    Args:
        domains: Host names that may be asked; none: every URL is refused.
        resolve: Finds a host's addresses.
        permits: Whether an address may be asked.
        tls: Certificates that are trusted; None: the system's.
        port: The only one.
        timeout_s: Seconds for the whole of a file.
    """

    def __init__(
        self,
        domains: Collection[str],
        *,
        resolve: Resolve = resolve,
        permits: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
        port: int = HTTPS_PORT,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._domains = frozenset(domain.lower() for domain in domains)
        self._resolve, self._permits = resolve, permits
        self._tls: ssl.SSLContext | bool = True if tls is None else tls
        self._port = port
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._free = asyncio.Semaphore(MAX_FETCHES)

    async def fetch(self, url: str, param: str) -> bytes:
        """The file at `url`; raises `PromptError` naming `param`, the field that has it."""
        checked = self._checked(url, param)
        async with self._free:
            try:
                return await self._get(checked, param)
            except TimeoutError:
                message = f"{param} was not fetched within {self._timeout.total:g} s"
            except (aiohttp.ClientError, OSError) as error:
                message = f"{param} could not be fetched: {words_of(error)}"
        raise PromptError(message, param)

    def _checked(self, url: str, param: str) -> URL:
        """The URL as the client library reads it, so that what is checked is what is asked."""
        try:
            parsed = URL(url)
            host, port = parsed.raw_host, parsed.port
        except ValueError as error:
            raise PromptError(f"{param} is not a URL: {error}", param) from None
        if parsed.scheme != "https" or not host:
            raise PromptError(f"{param} must be an https:// URL or a data: URL", param)
        if parsed.user is not None or parsed.password is not None:
            raise PromptError(f"{param} holds a user name or a password, which are not sent", param)
        if host.lower() not in self._domains:
            raise PromptError(f"{param}: images are not fetched from {host} (--allowed-media-domains)", param)
        if port != self._port:
            raise PromptError(f"{param} names port {port}; images are fetched from port {self._port} alone", param)
        return parsed

    async def _get(self, url: URL, param: str) -> bytes:
        connector = aiohttp.TCPConnector(
            resolver=_Checked(self._resolve, self._permits, param), use_dns_cache=False, force_close=True, ssl=self._tls
        )
        assert url.raw_host is not None
        if _is_literal(url.raw_host) and not self._permits(url.raw_host):  # which the connector does not resolve
            raise _private(param)
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self._timeout,
                trust_env=False,
                auto_decompress=False,
                headers={"accept": "image/*", "accept-encoding": "identity"},
            ) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            if 300 <= response.status < 400:
                raise PromptError(f"{param} redirects to another place, and redirects are not followed", param)
            if response.status != 200:
                raise PromptError(f"{param} was answered with HTTP status {response.status}", param)
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                raise PromptError(f"{param} is compressed by its server, which was asked not to", param)
            return await _body(response, param)


async def _body(response: aiohttp.ClientResponse, param: str) -> bytes:
    found = bytearray()
    if (response.content_length or 0) <= MAX_IMAGE_BYTES:
        async for chunk in response.content.iter_any():
            found += chunk
            if len(found) > MAX_IMAGE_BYTES:
                break
        else:
            return bytes(found)
    raise PromptError(f"{param} has more than {MAX_IMAGE_BYTES} bytes", param)


def _is_literal(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host.partition("%")[0])
        except OSError:
            continue
        return True
    return False


def _private(param: str) -> PromptError:
    return PromptError(f"{param} leads to an address outside the public internet", param)


class _Checked(AbstractResolver):
    """Resolves for one connection, and refuses where any of the addresses may not be asked."""

    def __init__(self, find: Resolve, permits: Callable[[str], bool], param: str) -> None:
        self._find, self._permits, self._param = find, permits, param

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list[ResolveResult]:
        """See the base class."""
        addresses = await self._find(host, port)
        if not all(self._permits(address) for address in addresses):
            raise _private(self._param)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """See the base class: it holds nothing."""
