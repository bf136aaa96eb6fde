"""The command line that `penstock envoy` makes."""

import subprocess
import sys

import pytest

from penstock.gateway.envoy import host_port
from penstock.gateway.xds.bootstrap import bootstrap


@pytest.mark.parametrize(
    ("text", "host", "port"), [("127.0.0.1:9002", "127.0.0.1", 9002), ("gw.ns.svc:1", "gw.ns.svc", 1), ("[::1]:80", "::1", 80)]
)
def test_host_port(text: str, host: str, port: int) -> None:
    assert host_port(text) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:70000", "host:x", "::1:80"])
def test_not_host_port(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|brackets"):
        host_port(text)


def test_the_admin_interface_is_only_there_when_asked_for_and_only_local() -> None:
    assert "admin" not in bootstrap(xds_host="g", xds_port=1, node_id="n", admin_port=None)
    admin = bootstrap(xds_host="g", xds_port=1, node_id="n", admin_port=9901)["admin"]
    assert admin["address"]["socket_address"] == {"address": "127.0.0.1", "port_value": 9901}


def test_a_gateway_that_comes_late_or_moves_is_found_within_seconds() -> None:
    config = bootstrap(xds_host="g", xds_port=1, node_id="n", admin_port=None)
    (service,) = config["dynamic_resources"]["ads_config"]["grpc_services"]
    assert service["envoy_grpc"]["retry_policy"]["retry_back_off"]["max_interval"] == "2s"
    assert config["static_resources"]["clusters"][0]["dns_refresh_rate"] == "1s"


def test_bad_arguments_are_named() -> None:
    result = subprocess.run([sys.executable, "-m", "penstock.cli", "envoy", "--xds", "nowhere"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "'nowhere' is not HOST:PORT" in result.stderr
