"""The picker under test: its address, and the endpoints that it knows."""

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import orjson
from cryptography import x509
from cryptography.x509.oid import NameOID

MAX_MESSAGE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the flags say."""

    host: str
    port: int
    model: str
    """A model that the picker serves."""
    endpoints: tuple[str, ...]
    """`ip:port` of the replicas that the picker knows. All are ready."""
    health: tuple[str, int]
    path: str = "/v1/completions"
    tls: bool = False
    """The ext_proc port uses TLS. Any certificate is accepted, as gateways do."""
    tls_ca: Path | None = None
    """The CA to trust if the certificate is not its own issuer."""
    timeout_s: float = 5.0
    """How long one answer may take."""
    serve: bool = False
    """The suite serves the endpoints itself, and so sees what reaches them."""
    envoy: str | None = None
    """Envoy's binary; None for the one that is installed."""

    @property
    def address(self) -> str:
        """`host:port`, IPv6 in brackets."""
        return _joined(self.host, self.port)

    def body(self, **fields: object) -> bytes:
        """A request for the model as JSON."""
        return orjson.dumps({"model": self.model, "prompt": "Say hello.", "max_tokens": 8, **fields})

    async def channel(self) -> grpc.aio.Channel:
        """A connection of its own to the ext_proc port."""
        return await _channel(self.host, self.port, self.tls, self.tls_ca)

    async def health_channel(self) -> grpc.aio.Channel:
        """A connection to where health is asked; TLS only where it is the ext_proc port."""
        host, port = self.health
        return await _channel(host, port, self.tls and self.health == (self.host, self.port), self.tls_ca)


async def _channel(host: str, port: int, tls: bool, ca: Path | None) -> grpc.aio.Channel:
    options: list[tuple[str, str | int]] = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
    if not tls:
        return grpc.aio.insecure_channel(_joined(host, port), options)
    pem = await asyncio.to_thread(ssl.get_server_certificate, (host, port), timeout=5.0)
    options.append(("grpc.ssl_target_name_override", _name(pem)))
    roots = await asyncio.to_thread(ca.read_bytes) if ca is not None else pem.encode()
    return grpc.aio.secure_channel(_joined(host, port), grpc.ssl_channel_credentials(roots), options)


def _name(pem: str) -> str:
    """A name that the certificate is good for."""
    certificate = x509.load_pem_x509_certificate(pem.encode())
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = []
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    found = [str(name.value) for name in names] or [str(each.value) for each in common]
    return found[0].replace("*", "any") if found else "picker"


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
