"""Access to `/debug/*`: clients with the token of `--debug-token-file`, or without such a file only clients on this machine.

`kubectl port-forward` is a client on this machine. Without a token the `Host` header must be an address or `localhost`. Otherwise
another site's page could read the answers in a browser, by resolving its own name to this machine's address (DNS rebinding).
"""

import hmac
import logging
from ipaddress import ip_address
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

log = logging.getLogger(__name__)


class DebugToken:
    """The token in a file, which is read again when the file changes.

    Raises:
        ValueError: the file cannot be read or is empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: object = None
        self._token = b""
        self._read()

    def matches(self, authorization: str) -> bool:
        """Whether an `Authorization` header holds the token."""
        try:
            self._read()
        except ValueError as error:
            log.warning("%s; the token stays as it was", error)
        scheme, _, given = authorization.partition(" ")
        given_bytes = given.strip().encode(errors="surrogateescape")
        return scheme.lower() == "bearer" and hmac.compare_digest(given_bytes, self._token)

    def _read(self) -> None:
        try:
            status = self._path.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen == self._seen:
                return
            token = self._path.read_bytes().strip()
        except OSError as error:
            raise ValueError(f"--debug-token-file {self._path}: {error.strerror}") from None
        if not token:
            raise ValueError(f"--debug-token-file {self._path}: the file is empty")
        self._token, self._seen = token, seen


def debug_access(token: DebugToken | None) -> Middleware:
    """The middleware that guards `/debug/*`, and without a token the console too: with one the page itself may be loaded, since
    it must ask for the token."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        debug, page = request.path.startswith("/debug/"), request.path in ("/", "/console")
        if token is None:
            if (debug or page) and not _local(request):
                raise web.HTTPForbidden(
                    text="only clients on the gateway's own machine may see this (kubectl port-forward); "
                    "--debug-token-file lets others in\n"
                )
        elif debug and not token.matches(request.headers.get("authorization", "")):
            raise web.HTTPUnauthorized(
                headers={"www-authenticate": 'Bearer realm="penstock"'},
                text="send the debug token: Authorization: Bearer TOKEN\n",
            )
        return await handler(request)

    return guard


def _local(request: web.Request) -> bool:
    name = request.url.host or ""
    return _is_loopback(request.remote or "") and (name == "localhost" or _is_address(name))


def _is_loopback(text: str) -> bool:
    try:
        address = ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
