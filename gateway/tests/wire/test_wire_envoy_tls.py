"""TLS before and behind Envoy: clients to its listener, and Envoy to the gateway, with certificates that the test makes."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from wire_waiting import eventually

from penstock.gateway.tls import Pair, SelfSigned

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def mount(folder: Path, pair: Pair, version: str) -> None:
    """Puts a pair into a folder as Kubernetes mounts a Secret: replaced by one symbolic link."""
    (folder / version).mkdir(parents=True)
    (folder / version / "tls.crt").write_bytes(pair.certificates)
    (folder / version / "tls.key").write_bytes(pair.key)
    (folder / "..next").symlink_to(version)
    (folder / "..next").replace(folder / "..data")
    for name in ("tls.crt", "tls.key"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


async def presented(port: int) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    connection = writer.get_extra_info("ssl_object")
    assert connection.selected_alpn_protocol() == "h2"
    der = connection.getpeercert(binary_form=True)
    writer.close()
    return ssl.DER_cert_to_PEM_cert(der).strip().encode()


@pytest.mark.parametrize("front_end", ["grpc", "lean"])
async def test_both_ways_are_encrypted_and_a_new_certificate_is_served(
    tmp_path: Path, processes: Any, ports: Any, engine: Any, fleet_of: Any, front_end: str
) -> None:
    port, grpc_port, http_port, admin = ports(4)
    of_gateway, of_listener = SelfSigned().current(), SelfSigned().current()
    mount(tmp_path / "gateway", of_gateway, "one")
    mount(tmp_path / "listener", of_listener, "one")
    its = await engine("only")
    (tmp_path / "fleet.json").write_bytes(msgspec.json.encode(fleet_of(its.replica())))
    gateway = ["gateway", "--discovery", f"file:{tmp_path / 'fleet.json'}", "--name", "test", "--ext-proc", front_end]
    gateway += ["--grpc-port", str(grpc_port), "--http-port", str(http_port)]
    gateway += ["--listener-host", "127.0.0.1", "--listener-port", str(port), "--listener-tls", str(tmp_path / "listener")]
    pair = (str(tmp_path / "gateway/tls.crt"), str(tmp_path / "gateway/tls.key"))
    processes.start("gateway", *gateway, "--tls-cert", pair[0], "--tls-key", pair[1])
    envoy = [
        "envoy",
        "--gateway",
        f"127.0.0.1:{grpc_port}",
        "--admin-port",
        str(admin),
        "--concurrency",
        "1",
        "--node-id",
        "test",
    ]
    processes.start("envoy", *envoy, "--node-id", "test", "--gateway-ca", pair[0], "--gateway-name", "localhost")

    trusting = ssl.create_default_context(cadata=of_listener.certificates.decode())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as client:

        async def answers() -> bool:
            async with client.post(f"https://127.0.0.1:{port}/v1/chat/completions", json=BODY) as response:
                return response.status == 200

        await eventually(answers)
        async with client.get(f"http://127.0.0.1:{admin}/stats?filter=penstock_(gateway|picker).ssl.handshake") as response:
            handshakes = [int(line.rpartition(" ")[2]) for line in (await response.text()).splitlines()]
        assert len(handshakes) == 2 and all(handshakes), "the control plane and the picker"

    renewed = SelfSigned().current()
    mount(tmp_path / "listener", renewed, "two")

    async def serves_the_new_one() -> bool:
        return await presented(port) == renewed.certificates.strip()

    await eventually(serves_the_new_one)


async def test_a_gateway_that_nobody_vouches_for_is_not_believed(tmp_path: Path, processes: Any, ports: Any) -> None:
    port, grpc_port, http_port, admin = ports(4)
    mount(tmp_path / "gateway", SelfSigned().current(), "one")
    mount(tmp_path / "other", SelfSigned().current(), "one")
    (tmp_path / "fleet.json").write_bytes(b"{}")
    gateway = ["gateway", "--discovery", f"file:{tmp_path / 'fleet.json'}", "--grpc-port", str(grpc_port)]
    gateway += ["--http-port", str(http_port), "--listener-host", "127.0.0.1", "--listener-port", str(port)]
    files = ("--tls-cert", str(tmp_path / "gateway/tls.crt"), "--tls-key", str(tmp_path / "gateway/tls.key"))
    processes.start("gateway", *gateway, *files)
    envoy = [
        "envoy",
        "--gateway",
        f"127.0.0.1:{grpc_port}",
        "--admin-port",
        str(admin),
        "--concurrency",
        "1",
        "--node-id",
        "test",
    ]
    processes.start("envoy", *envoy, "--node-id", "test", "--gateway-ca", str(tmp_path / "other/tls.crt"))

    async with aiohttp.ClientSession() as client:

        async def refused() -> bool:
            async with client.get(f"http://127.0.0.1:{admin}/stats?filter=penstock_gateway.ssl.fail_verify_error") as response:
                return int((await response.text()).rpartition(" ")[2]) > 0

        await eventually(refused)
        async with client.get(f"http://127.0.0.1:{admin}/stats?filter=listener_manager.total_listeners_active") as response:
            assert (await response.text()).strip().endswith(" 0")
