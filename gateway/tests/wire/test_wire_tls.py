"""TLS on the gRPC ports: what a client sees of certificates that are replaced while the server runs."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from penstock.api.fleet import Fleet
from penstock.gateway.cli import gateway
from penstock.gateway.process import Gateway, GatewaySettings
from penstock.gateway.tls import Certificate, CertificateFiles, Pair, SelfSigned, TlsError, ssl_context
from penstock.gateway.xds.listener import ListenerSettings

SERVING = HealthCheckResponse.SERVING


class Files:
    """A certificate and its key, replaced as a Secret's are: by one symbolic link."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self.certificate, self.key = folder / "now/tls.crt", folder / "now/tls.key"

    def put(self, pair: Pair) -> Pair:
        self._count += 1
        version = self._folder / str(self._count)
        version.mkdir()
        (version / "tls.crt").write_bytes(pair.certificates)
        (version / "tls.key").write_bytes(pair.key)
        link = self._folder / "next"
        link.symlink_to(version.name)
        link.replace(self._folder / "now")
        return pair


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture(autouse=True)
def nobody_is_to_notice_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.process.NOTICE_S", 0.0)


class Idle:
    """An empty fleet."""

    async def watch(self) -> AsyncIterator[Fleet]:
        yield Fleet()
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def running(certificate: Certificate | None, health_port: int | None = None) -> AsyncIterator[Gateway]:
    listener = ListenerSettings(host="127.0.0.1", port=1)
    settings = GatewaySettings(
        name="gw", host="127.0.0.1", grpc_port=0, http_port=0, listener=listener, health_port=health_port, certificate=certificate
    )
    stop, started = asyncio.Event(), asyncio.Event()
    it = Gateway(settings, Idle())
    task = asyncio.create_task(it.run(stop, started))
    await started.wait()
    try:
        yield it
    finally:
        stop.set()
        await task


async def check(channel: grpc.aio.Channel, name: str = "liveness") -> int:
    answer = await HealthStub(channel).Check(HealthCheckRequest(service=name), timeout=60, wait_for_ready=False)
    return answer.status


def trusting(port: int, pair: Pair) -> grpc.aio.Channel:
    """A new connection that believes in `pair` alone."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(pair.certificates), options)


async def presented(port: int) -> Pair:
    """The certificate that a new connection is shown, without a key."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    connection = writer.get_extra_info("ssl_object")
    assert connection.selected_alpn_protocol() == "h2"
    der = connection.getpeercert(binary_form=True)
    writer.close()
    return Pair(ssl.DER_cert_to_PEM_cert(der).encode(), b"")


async def test_grpc_presents_the_certificate_that_is_there_now(files: Files) -> None:
    first = files.put(SelfSigned().current())
    async with running(CertificateFiles(files.certificate, files.key)) as its:
        async with trusting(its.grpc_port, first) as old:
            assert await check(old) == SERVING
            second = files.put(SelfSigned().current())
            async with trusting(its.grpc_port, second) as new:
                assert await check(new) == SERVING
            assert await check(old) == SERVING, "connections that are open go on"
        async with trusting(its.grpc_port, first) as outdated:
            with pytest.raises(grpc.aio.AioRpcError):
                await check(outdated)


async def test_asyncio_presents_the_certificate_that_is_there_now(files: Files) -> None:
    first = files.put(SelfSigned().current())
    context = ssl_context(CertificateFiles(files.certificate, files.key))
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert (await presented(port)).certificates == first.certificates
        second = files.put(SelfSigned().current())
        assert (await presented(port)).certificates == second.certificates


@pytest.mark.parametrize("broken", ["key of another", "no certificate", "no key", "missing"])
def test_a_pair_that_cannot_be_used_is_refused_at_first_and_later_ignored(
    files: Files, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, other = SelfSigned().current(), SelfSigned().current()
    bad = {
        "key of another": Pair(good.certificates, other.key),
        "no certificate": Pair(b"", good.key),
        "no key": Pair(good.certificates, b"-----BEGIN PRIVATE KEY-----"),
        "missing": good,
    }[broken]
    files.put(good)
    source = CertificateFiles(files.certificate, files.key)
    files.put(bad)
    if broken == "missing":
        files.key.unlink()
    assert source.current() == source.current() == good
    assert caplog.text.count("stays as it was") == 1
    with pytest.raises(TlsError, match=r"tls\.(crt|key)"):
        CertificateFiles(files.certificate, files.key)
    assert files.put(other) == source.current(), "and the next good one counts"


def test_a_self_signed_certificate_names_whom_it_is_for() -> None:
    certificate = x509.load_pem_x509_certificate(SelfSigned(["localhost", "::1"]).current().certificates)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["localhost", "::1"]


async def test_the_health_port_speaks_plainly_beside_tls() -> None:
    async with running(SelfSigned(), health_port=0) as its:
        assert its.health_port
        async with grpc.aio.insecure_channel(f"127.0.0.1:{its.health_port}") as channel:
            names = ("liveness", "", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor")
            async with asyncio.timeout(60):
                while await check(channel, "readiness") != SERVING:
                    await asyncio.sleep(0.02)
            assert [await check(channel, name) for name in names] == [SERVING] * len(names)


@pytest.mark.parametrize(
    "flags", [["--tls-cert", "a"], ["--tls-key", "a"], ["--tls-cert", "a", "--tls-key", "b", "--tls-self-signed"]]
)
def test_flags_that_make_no_sense_together(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gateway(flags)
    assert "--tls-cert" in capsys.readouterr().err


def test_a_certificate_that_is_not_there_is_an_error_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gateway(["--tls-cert", str(tmp_path / "a"), "--tls-key", str(tmp_path / "b"), "--discovery", "file:/nowhere"]) == 1
    assert str(tmp_path / "a") in capsys.readouterr().err
