"""The commands `penstock gateway` and `penstock envoy`. Light to import: `penstock --help` loads them."""

import argparse
import logging
import platform
import sys


def gateway(argv: list[str]) -> int:
    """Runs the endpoint picker and Envoy's control plane."""
    parser = argparse.ArgumentParser(prog="penstock gateway", description=gateway.__doc__)
    parser.add_argument("--discovery", default="kubernetes", help="`kubernetes` or file:PATH (default: %(default)s)")
    parser.add_argument("--namespace", help="Kubernetes discovery: only this namespace (default: all)")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default: %(default)s)")
    parser.add_argument("--grpc-port", type=_port, default=9002, help="ext_proc, ADS and gRPC health (default: %(default)s)")
    parser.add_argument("--http-port", type=_port, default=9090, help="/pools, /metrics, probes, … (default: %(default)s)")
    parser.add_argument("--listener-host", default="0.0.0.0", help="where Envoy is told to listen (default: %(default)s)")
    parser.add_argument("--listener-port", type=_port, default=8080, help="where Envoy is told to listen (default: %(default)s)")
    parser.add_argument("--name", default=platform.node(), help="this process's name in /pools (default: the host's)")
    options = parser.parse_args(argv)

    import uvloop

    from penstock.gateway.discovery.source import discovery_from
    from penstock.gateway.process import GatewaySettings, serve
    from penstock.gateway.xds.listener import ListenerSettings
    from penstock.kube.errors import NoApiServer

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = GatewaySettings(
        name=options.name,
        host=options.host,
        grpc_port=options.grpc_port,
        http_port=options.http_port,
        listener=ListenerSettings(host=options.listener_host, port=options.listener_port),
    )
    try:
        uvloop.run(serve(settings, discovery_from(options.discovery, options.namespace)))
    except NoApiServer as error:
        sys.stderr.write(f"penstock gateway: no API server to go to; see --discovery: {error}\n")
        return 2
    except (OSError, ValueError, RuntimeError) as error:  # a port that is taken, a flag; anything else is worth a traceback
        sys.stderr.write(f"penstock gateway: {error}\n")
        return 1
    return 0


def _port(text: str) -> int:
    """A TCP port; 0: any that is free."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)


def envoy(argv: list[str]) -> int:
    """Runs Envoy against a gateway."""
    from penstock.gateway.envoy import main

    return main(argv)
