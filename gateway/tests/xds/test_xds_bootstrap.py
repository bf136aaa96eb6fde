"""The command line that `penstock envoy` makes."""

from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.envoy import host_port, main
from penstock.gateway.xds.bootstrap import GATEWAY_CLUSTER, PICKER_CLUSTER, Address, BootstrapSettings, bootstrap


@pytest.mark.parametrize(
    ("text", "host", "port"), [("127.0.0.1:9002", "127.0.0.1", 9002), ("gw.ns.svc:1", "gw.ns.svc", 1), ("[::1]:80", "::1", 80)]
)
def test_host_port(text: str, host: str, port: int) -> None:
    assert host_port(text) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:70000", "host:x", "::1:80"])
def test_not_host_port(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|brackets"):
        host_port(text)


def settings(**changes: Any) -> BootstrapSettings:
    known: dict[str, Any] = {"node_id": "n", "gateways": [Address("g", 1)], "admin": Path("/run/admin.sock")}
    return BootstrapSettings(**{**known, **changes})


def clusters(config: dict[str, Any]) -> dict[str, Any]:
    return {cluster["name"]: cluster for cluster in config["static_resources"]["clusters"]}


def test_the_admin_interface_is_private_or_local() -> None:
    assert bootstrap(settings())["admin"]["address"] == {"pipe": {"path": "/run/admin.sock", "mode": 0o600}}
    admin = bootstrap(settings(admin=Address("127.0.0.1", 9901)))["admin"]
    assert admin["address"]["socket_address"] == {"address": "127.0.0.1", "port_value": 9901}


@pytest.mark.parametrize("admin", [Path("/run/admin.sock"), Address("127.0.0.1", 9901)])
def test_metrics_are_one_path_of_the_admin_interface_on_a_listener_of_its_own(admin: Path | Address) -> None:
    assert "listeners" not in bootstrap(settings(admin=admin))["static_resources"]
    config = bootstrap(settings(admin=admin, metrics=Address("0.0.0.0", 9902)))
    (listener,) = config["static_resources"]["listeners"]
    assert listener["address"]["socket_address"] == {"address": "0.0.0.0", "port_value": 9902}
    (chain,) = listener["filter_chains"]
    (host,) = chain["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    (route,) = host["routes"]
    assert route["match"]["path"] == "/metrics"
    assert route["route"]["regex_rewrite"]["substitution"].startswith("/stats/prometheus?filter=")
    (endpoint,) = clusters(config)[route["route"]["cluster"]]["load_assignment"]["endpoints"][0]["lb_endpoints"]
    address = endpoint["endpoint"]["address"]
    assert address == ({"pipe": {"path": str(admin)}} if isinstance(admin, Path) else config["admin"]["address"])


def test_a_gateway_that_comes_late_or_moves_is_found_within_seconds() -> None:
    config = bootstrap(settings())
    (service,) = config["dynamic_resources"]["ads_config"]["grpc_services"]
    assert service["envoy_grpc"]["retry_policy"]["retry_back_off"]["max_interval"] == "2s"
    for cluster in clusters(config).values():
        assert cluster["dns_refresh_rate"] == "1s"
        (check,) = cluster["health_checks"]
        assert check["unhealthy_interval"] == check["no_traffic_interval"] == "0.5s"


def test_a_gateway_that_hangs_is_found_out_within_five_seconds() -> None:
    for cluster in clusters(bootstrap(settings())).values():
        [options] = cluster["typed_extension_protocol_options"].values()
        keepalive = options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]
        assert sum(float(keepalive[name].removesuffix("s")) for name in ("interval", "timeout")) <= 5
        [check] = cluster["health_checks"]
        once = sum(float(check[name].removesuffix("s")) for name in ("interval", "interval_jitter", "timeout"))
        assert check["unhealthy_threshold"] * once <= 5.5


def test_each_gateway_is_a_priority_and_pickers_may_be_elsewhere() -> None:
    def priorities(cluster: dict[str, Any]) -> list[tuple[int, str, int]]:
        return [
            (it["priority"], address["address"], address["port_value"])
            for it in cluster["load_assignment"]["endpoints"]
            for address in [it["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]]
        ]

    gateways = [Address("a", 1), Address("b", 2)]
    both = clusters(bootstrap(settings(gateways=gateways)))
    assert priorities(both[GATEWAY_CLUSTER]) == priorities(both[PICKER_CLUSTER]) == [(0, "a", 1), (1, "b", 2)]
    both = clusters(bootstrap(settings(gateways=gateways, pickers=[Address("a", 3), Address("b", 4)])))
    assert priorities(both[GATEWAY_CLUSTER]) == [(0, "a", 1), (1, "b", 2)]
    assert priorities(both[PICKER_CLUSTER]) == [(0, "a", 3), (1, "b", 4)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gateway", "nowhere"], "'nowhere' is not HOST:PORT"),
        ([], "--gateway"),
        (["--gateway", "g:1", "--drain-timeout", "-1"], "argument --drain-timeout: -1 is not at least 0"),
        (["--gateway", "g:1", "--gateway-name", "g"], "needs --gateway-ca"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code not in (0, None)
    assert message in f"{capsys.readouterr().err} {end.value.code}"
