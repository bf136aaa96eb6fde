"""TLS to replicas: the files with the CA to trust and our own certificate, for Envoy, the gateway and the operator."""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
"""The entries of a Secret as cert-manager writes them."""


class TlsError(ValueError):
    """A certificate that cannot be used; the message says which file and why."""


@dataclass(frozen=True, kw_only=True)
class ReplicaTls:
    """A folder such as a mounted Secret; at the gateway's and at Envoy's the same place.

    `ca.crt` says who signs replicas' certificates. `tls.crt` and `tls.key`, where they are there, are presented to them (mTLS).
    """

    folder: Path
    name: str | None = None
    """What a replica's certificate must hold, a DNS name or an address; None: any that the CA has signed."""
    presents: bool = False
    """Whether there is a certificate of our own."""

    @staticmethod
    def of(folder: Path, name: str | None) -> "ReplicaTls":
        """Read the folder. It presents a certificate of our own if the folder has one.

        Raises:
            TlsError: a file cannot be used now.
        """
        presents = any((folder / file).exists() for file in (CERTIFICATE, KEY))
        found = ReplicaTls(folder=folder.absolute(), name=name, presents=presents)
        found.context()
        return found

    @property
    def files(self) -> list[Path]:
        """The files that are in use."""
        return [self.folder / file for file in (CA, *((CERTIFICATE, KEY) if self.presents else ()))]

    def context(self) -> ssl.SSLContext:
        """A client's context of the files as they are; raises `TlsError` for those that cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = self.name is not None
        try:
            context.load_verify_locations(self.folder / CA)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise TlsError(f"{self.folder / CA}: {error}") from None
        if self.presents:
            try:
                context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY, password=_no_password)
            except (OSError, ValueError) as error:
                raise TlsError(f"{self.folder / CERTIFICATE} and {KEY}: {error}") from None
        return context


class CurrentContext:
    """A client's context by the files as they are, or were before they could not be used.

    Args:
        tls: The files.

    Raises:
        TlsError: They cannot be used now.
    """

    def __init__(self, tls: ReplicaTls) -> None:
        self.name = tls.name
        self._tls = tls
        self._seen = self._look()
        self._context = tls.context()

    def get(self) -> ssl.SSLContext:
        """A new one where the files are new; it has new connections."""
        if (seen := self._look()) != self._seen:
            self._seen = seen
            try:
                self._context = self._tls.context()
                log.info("TLS to replicas: new files in %s", self._tls.folder)
            except TlsError as error:
                log.error("TLS to replicas: %s; it stays as it was", error)
        return self._context

    def _look(self) -> list[object]:
        return [identity(path) for path in self._tls.files]


def identity(path: Path) -> object:
    """What changes when a file's content does."""
    try:
        status = path.stat()
    except OSError as error:
        return error.errno
    return status.st_ino, status.st_mtime_ns, status.st_size


def _no_password() -> str:
    """Asked for only where the key has one; OpenSSL would ask the terminal."""
    raise ValueError("the key has a password")
