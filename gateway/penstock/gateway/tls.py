"""TLS for the gateway's own ports: a certificate from files, reread when they change, or a self-signed one.

Gateways that call an endpoint picker encrypt and do not verify, which is what a self-signed certificate is for. Both kinds of
server take theirs from a `Certificate`: gRPC's by `grpc_credentials`, asyncio's by `ssl_context`. Connections that are open keep
the certificate that they began with.
"""

import datetime
import ipaddress
import logging
import ssl
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.http.replica_tls import TlsError, identity

SELF_SIGNED_FOR = datetime.timedelta(days=3650)

log = logging.getLogger(__name__)


class Pair(NamedTuple):
    """A certificate chain and its private key, PEM."""

    certificates: bytes
    key: bytes


class Certificate(Protocol):
    """A source of a server's certificate. Any thread may call it."""

    def current(self) -> Pair:
        """What the next handshake presents."""
        ...


class CertificateFiles:
    """A certificate chain and a key in two files, looked at again at each handshake.

    A pair that cannot be used (half of it replaced, not readable) is logged once, and the one before stays. That holds for
    Kubernetes' mounted Secrets too, which change by one symbolic link.

    Args:
        certificates: PEM, the server's own first.
        key: PEM, without a password.

    Raises:
        TlsError: they cannot be used now.
    """

    def __init__(self, certificates: Path, key: Path) -> None:
        self._paths = certificates, key
        self._lock = threading.Lock()
        self._seen = self._look()
        self._pair = self._read()

    def current(self) -> Pair:
        """What the next handshake presents."""
        with self._lock:
            seen = self._look()
            if seen != self._seen:
                self._seen = seen
                try:
                    self._pair = self._read()
                    log.info("TLS: new certificate from %s", self._paths[0])
                except TlsError as error:
                    log.error("TLS: %s; the certificate stays as it was", error)
            return self._pair

    def _look(self) -> tuple[object, ...]:
        """What identifies the content of the files; a file that is missing has none."""
        return tuple(identity(path) for path in self._paths)

    def _read(self) -> Pair:
        contents: list[bytes] = []
        for path in self._paths:
            try:
                contents.append(path.read_bytes())
            except OSError as error:
                raise TlsError(f"{path}: {error.strerror}") from None
        pair = Pair(*contents)
        certificates, key = self._paths
        try:
            public = x509.load_pem_x509_certificates(pair.certificates)[0].public_key()
        except ValueError as error:
            raise TlsError(f"{certificates}: no certificate in PEM: {error}") from None
        try:
            private = load_pem_private_key(pair.key, password=None)
        except (ValueError, TypeError) as error:  # TypeError: it has a password
            raise TlsError(f"{key}: no private key in PEM without a password: {error}") from None
        if _spki(public) != _spki(private.public_key()):
            raise TlsError(f"{key} is not the key of {certificates}")
        return pair


class SelfSigned:
    """A certificate of this process's own, for callers that do not verify."""

    def __init__(self, names: Iterable[str] = ("localhost", "127.0.0.1")) -> None:
        self._pair = _self_signed(names)

    def current(self) -> Pair:
        """What the next handshake presents."""
        return self._pair


def grpc_credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Credentials of a gRPC server that presents what `certificate` says at each handshake."""
    last = certificate.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal last
        pair = certificate.current()
        if pair == last:
            return None
        last = pair
        return _configuration(pair)

    return grpc.dynamic_ssl_server_credentials(_configuration(last), changed)  # type: ignore[arg-type] - None: as before


def ssl_context(certificate: Certificate, protocols: Sequence[str] = ("h2",)) -> ssl.SSLContext:
    """A context of an asyncio server that presents what `certificate` says at each handshake.

    Args:
        certificate: The source.
        protocols: What ALPN offers.
    """
    pair = certificate.current()
    server = fresh = _context(pair, protocols)

    def hello(connection: ssl.SSLObject, _name: str | None, _context_of_server: ssl.SSLContext) -> None:
        nonlocal fresh, pair
        now = certificate.current()
        if now != pair:
            fresh, pair = _context(now, protocols), now
        connection.context = fresh

    server.sni_callback = hello  # called whether or not the client names a server
    return server


def _spki(key: object) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined] - every kind has it


def _configuration(pair: Pair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificates)])


def _context(pair: Pair, protocols: Sequence[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(list(protocols))
    with tempfile.NamedTemporaryFile(prefix="penstock-tls-") as scratch:  # of mode 0600; `ssl` reads nothing but files
        scratch.write(pair.key + b"\n" + pair.certificates)
        scratch.flush()
        context.load_cert_chain(scratch.name)
    return context


def _self_signed(names: Iterable[str]) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "penstock gateway")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + SELF_SIGNED_FOR)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Pair(certificate.public_bytes(Encoding.PEM), private)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
