"""Every certificate that Penstock or its tests make passes the strict verification (RFC 5280) that Python does from 3.13 on."""

import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.pki import Pki
from penstock.gateway.tls import SelfSigned


def handshake(certificate: Path, key: Path, authority: Path, name: str) -> None:
    """A TLS handshake in memory, between a server with that certificate and a client that trusts that authority."""
    trusting = ssl.create_default_context(cafile=authority)
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate, key)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(down, up, server_hostname=name)
    server = serving.wrap_bio(up, down, server_side=True)
    waiting = [client, server]
    while waiting:
        for side in list(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)


def test_those_of_an_authority_of_the_tests(make_authority: Any, tmp_path: Path) -> None:
    folder = make_authority().mount(tmp_path)
    handshake(folder / "tls.crt", folder / "tls.key", folder / "ca.crt", "replica")
    stranger = make_authority().mount(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError, match=r"unable to get local issuer|self-signed"):
        handshake(folder / "tls.crt", folder / "tls.key", stranger / "ca.crt", "replica")


def test_the_gateway_s_own(tmp_path: Path) -> None:
    pair = SelfSigned(["gateway.example.com"]).current()
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    certificate.write_bytes(pair.certificates)
    key.write_bytes(pair.key)
    handshake(certificate, key, certificate, "gateway.example.com")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="apt install openssl")
def test_those_of_the_cluster_tier(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    pki.create()
    handshake(*pki.create_server("webhook.example.com"), "webhook.example.com")
    handshake(pki.folder / "apiserver.crt", pki.folder / "apiserver.key", pki.folder / "ca.crt", "kubernetes.default.svc")
