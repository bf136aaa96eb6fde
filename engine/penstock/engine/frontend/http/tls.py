"""HTTPS, and who may ask by certificate: files that are looked at again at each handshake, so that what is renewed is used.

Connections that are open keep what they began with.
"""

import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from penstock.engine.config import ConfigError
from penstock.engine.frontend.errors import ApiError

log = logging.getLogger(__name__)

PROBED_PATHS: Final = frozenset(("/health", "/live", "/ready"))
"""What needs no client certificate: the kubelet has none."""


class _ServerContext(ssl.SSLContext):
    """Handles each connection with the context that `current` returns at that moment.

    A resumed session skips the check of the client's certificate, so it must not outlive the files that vouched for it. A context
    resumes only its own sessions. An SNI callback would be too late: OpenSSL looks for the session before it calls one.
    """

    current: Callable[[], ssl.SSLContext]

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """The method by which event loops begin a TLS connection."""
        return self.current().wrap_bio(*args, **kwargs)


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files, as `penstock serve`'s flags name them."""

    certificates: str
    """The server's chain, its own first."""
    key: str
    """Without a password."""
    clients: str | None = None
    """The CA of clients' certificates; None: clients need none."""

    def context(self) -> ssl.SSLContext:
        """A server's context that presents and believes what the files hold at each handshake.

        Files that cannot be used then (half of them replaced) are logged once, and those before stay.

        Raises:
            ConfigError: they cannot be used now.
        """
        server = _ServerContext(ssl.PROTOCOL_TLS_SERVER)
        server.current = self._current()
        return server

    def _current(self) -> Callable[[], ssl.SSLContext]:
        """Returns what gives the context of the files as they are at that moment."""
        seen = self._look()
        fresh = self._load()

        def current() -> ssl.SSLContext:
            nonlocal seen, fresh
            if (now := self._look()) != seen:
                seen = now
                try:
                    fresh = self._load()
                    log.info("TLS: new files, among them %s", self.certificates)
                except ConfigError as error:
                    log.error("TLS: %s; the certificate stays as it was", error)
            return fresh

        return current

    def _look(self) -> Sequence[object]:
        """What identifies the content of the files."""
        return [_identity(path) for path in (self.certificates, self.key, self.clients) if path is not None]

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificates, self.key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(f"--ssl-certfile {self.certificates} --ssl-keyfile {self.key}: {error}") from None
        if self.clients is not None:
            try:
                context.load_verify_locations(self.clients)
            except (OSError, ValueError) as error:
                raise ConfigError(f"--ssl-ca-certs {self.clients}: {error}") from None
            # A wrong certificate ends the handshake; whether there is one is asked by path, see `check_certificate`.
            context.verify_mode = ssl.CERT_OPTIONAL
        return context


def check_certificate(request: web.Request) -> None:
    """`ApiError` 403 for a request on a connection without a client certificate that needs one."""
    if request.path not in PROBED_PATHS and not request.get_extra_info("peercert"):
        message = "this server answers those alone who present a client certificate that it knows the signer of"
        raise ApiError(403, message, "permission_error", code="client_certificate_required")


def _no_password() -> str:
    """Asked for only where the key has one; OpenSSL would ask the terminal."""
    raise ValueError("the key has a password")


def _identity(path: str) -> object:
    try:
        status = Path(path).stat()
    except OSError as error:
        return error.errno
    return status.st_ino, status.st_mtime_ns, status.st_size
