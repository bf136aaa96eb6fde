"""The commands `penstock gateway` and `penstock envoy`. Light to import: `penstock --help` loads them."""

import argparse
import platform
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock.flag_values import number, port_or_any, positive, seconds
from penstock.gateway.logs import LEVELS, log_to_stderr

if TYPE_CHECKING:
    from penstock.gateway.discovery.address import Address
    from penstock.gateway.discovery.source import Discovery
    from penstock.gateway.process import GatewaySettings
    from penstock.gateway.tls import Certificate
    from penstock.gateway.tracing import TraceSettings


def gateway(argv: list[str]) -> int:
    """Runs the endpoint picker and Envoy's control plane."""
    parser = argparse.ArgumentParser(prog="penstock gateway", description=gateway.__doc__)
    _add_addresses(parser)
    _add_certificates_and_pools(parser)
    _add_limits_and_engines(parser)
    options = parser.parse_args(argv)
    _check(parser, options)

    import uvloop

    from penstock.gateway.process import serve
    from penstock.kube.errors import NoApiServer

    log_to_stderr(options.log_level)
    try:
        settings = _settings(options)
        uvloop.run(serve(settings, _discovery(options, settings)))
    except NoApiServer as error:
        sys.stderr.write(f"penstock gateway: no API server to go to; see --discovery: {error}\n")
        return 2
    except (OSError, ValueError, RuntimeError) as error:  # a port that is taken, a flag; anything else is worth a traceback
        sys.stderr.write(f"penstock gateway: {error}\n")
        return 1
    return 0


def _add_addresses(parser: argparse.ArgumentParser) -> None:
    """Add the flags of discovery, of the ports, and of the gateway's address for Envoy."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--discovery", metavar="SOURCE", help="where the fleet comes from: `kubernetes` or file:PATH (default: kubernetes)"
    )
    where.add_argument(
        "--endpoint",
        type=_endpoint,
        action="append",
        default=[],
        metavar="IP:PORT[=ENGINE]",
        help="a replica of a fixed fleet, instead of --discovery; repeat for more. The replica tells which models it serves",
    )
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        help="Kubernetes discovery: only this namespace; repeat for more (default: all)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default: %(default)s)")
    parser.add_argument(
        "--grpc-port", type=port_or_any, default=9002, help="ext_proc, ADS and gRPC health (default: %(default)s)"
    )
    parser.add_argument(
        "--health-port", type=port_or_any, metavar="N", help="gRPC health also on this port, never with TLS (default: none)"
    )
    parser.add_argument(
        "--ext-proc",
        choices=("grpc", "lean"),
        default="lean",
        help="server of the gRPC ports: our own HTTP/2 server (lean) or grpc.aio (grpc) (default: %(default)s)",
    )
    parser.add_argument("--http-port", type=port_or_any, default=9090, help="/pools, /metrics, probes, … (default: %(default)s)")
    parser.add_argument(
        "--debug-token-file",
        type=Path,
        metavar="FILE",
        help="file with the token that /debug/* requires; reread on change (default: /debug/* answers only this machine)",
    )
    parser.add_argument(
        "--console",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve a read-only page at /console on the HTTP port (default: on)",
    )
    parser.add_argument("--listener-host", default="0.0.0.0", help="address that Envoy listens on (default: %(default)s)")
    parser.add_argument(
        "--listener-port", type=port_or_any, default=8080, help="port that Envoy listens on (default: %(default)s)"
    )
    parser.add_argument(
        "--listener-tls",
        type=PurePosixPath,
        metavar="FOLDER",
        help="Envoy's listener with TLS: where Envoy finds tls.crt and tls.key; reread when they are replaced (default: no TLS)",
    )
    parser.add_argument(
        "--fail-open",
        action="store_true",
        help="while no gateway answers, let Envoy use the model's healthy replicas in turn; not with --tenants (default: 503)",
    )
    parser.add_argument(
        "--otlp-traces-endpoint",
        type=_collector,
        metavar="URL",
        help="a collector's OTLP/HTTP endpoint for traces, reached from here and from Envoy (default: no traces)",
    )
    parser.add_argument(
        "--trace-percent",
        type=_percent,
        default=100.0,
        metavar="N",
        help="percentage of traced requests, among those without a trace of their own (default: 100)",
    )
    parser.add_argument(
        "--log-level", default="INFO", choices=LEVELS, help="log messages of this level and above (default: %(default)s)"
    )
    parser.add_argument("--name", default=platform.node(), help="this process's name in /pools (default: the host's)")
    parser.add_argument(
        "--single-destination",
        action="store_true",
        help="name one replica for each request, for gateways that accept no list (ORIGINAL_DST)",
    )


def _add_certificates_and_pools(parser: argparse.ArgumentParser) -> None:
    """TLS, and the ports of InferencePools."""
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="TLS on the gRPC port: certificates, PEM; reread on change")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="private key of --tls-cert, PEM")
    parser.add_argument(
        "--tls-self-signed", action="store_true", help="TLS with a certificate made at the start (default: no TLS)"
    )
    parser.add_argument(
        "--replica-tls",
        type=Path,
        metavar="FOLDER",
        help="TLS to replicas, Envoy's and our own: ca.crt, and tls.crt and tls.key to present, at this place here and at "
        "Envoy's; reread when they are replaced (default: no TLS)",
    )
    parser.add_argument(
        "--replica-name", metavar="NAME", help="name that replicas' certificates must hold (default: any signed by ca.crt)"
    )
    parser.add_argument(
        "--pool-port",
        type=_pool_port,
        action="append",
        default=[],
        metavar="NAMESPACE/NAME=PORT",
        help="port for this InferencePool; repeat for more (default: one of --pool-port-range)",
    )
    parser.add_argument(
        "--pool-port-range",
        type=_port_range,
        default=range(9100, 9200),
        metavar="FIRST-LAST",
        help="ports for all other InferencePools (default: 9100-9199)",
    )
    parser.add_argument(
        "--pool-fallbacks",
        action="store_true",
        help="name several replicas for each request on InferencePools' ports, for gateways that accept a list (default: one)",
    )
    parser.add_argument(
        "--pool-tls-self-signed",
        action="store_true",
        help="TLS on InferencePools' ports alone, with a certificate made at the start (default: as on the gRPC port)",
    )


def _add_limits_and_engines(parser: argparse.ArgumentParser) -> None:
    """Add the flags of tenants and limits, and of other engines."""
    parser.add_argument("--tenants", type=Path, metavar="FILE", help="API keys and what they allow (default: no key needed)")
    parser.add_argument(
        "--audit-log",
        type=Path,
        metavar="PATH",
        help="write one JSON line for each request, without prompts, answers and keys; `-`: standard output (default: none)",
    )
    parser.add_argument(
        "--max-queued-requests",
        type=positive,
        default=5_000,
        metavar="N",
        help="largest number of waiting requests (default: %(default)s)",
    )
    parser.add_argument(
        "--max-queued-mib",
        type=positive,
        default=512,
        metavar="N",
        help="largest total size of waiting requests, in MiB (default: %(default)s)",
    )
    parser.add_argument(
        "--poll-period",
        type=seconds,
        default=2.0,
        metavar="SECONDS",
        help="poll the metrics of other engines this often; 0: never (default: %(default)s)",
    )
    parser.add_argument(
        "--tokenizer",
        type=_tokenizer,
        action="append",
        default=[],
        metavar="MODEL=FOLDER",
        help="tokenizer and chat template of a model that other engines serve; repeat for more (default: none)",
    )


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program where flags contradict each other."""
    pool_ports = dict(options.pool_port)
    if len(pool_ports) < len(options.pool_port) or len(set(pool_ports.values())) < len(pool_ports):
        parser.error("--pool-port: an InferencePool has one port, and no two have the same")
    if (options.tls_cert is None) != (options.tls_key is None):
        parser.error("--tls-cert and --tls-key come together")
    if options.tls_cert is not None and options.tls_self_signed:
        parser.error("--tls-self-signed and --tls-cert exclude each other")
    if options.replica_name is not None and options.replica_tls is None:
        parser.error("--replica-name needs --replica-tls")
    if options.endpoint and options.namespace:
        parser.error("--namespace and --endpoint exclude each other: a fixed fleet has no namespaces")
    if options.fail_open and options.tenants is not None:
        parser.error("--fail-open and --tenants exclude each other: without a gateway nobody would ask for keys")


def _discovery(options: argparse.Namespace, settings: "GatewaySettings") -> "Discovery":
    """Return the source of the fleet.

    Raises:
        ValueError: --discovery names nothing that exists.
    """
    if options.endpoint:
        from penstock.gateway.discovery.endpoints import EndpointsDiscovery

        return EndpointsDiscovery(options.endpoint, settings.replica_tls)
    from penstock.gateway.discovery.source import discovery_from

    return discovery_from(options.discovery or "kubernetes", options.namespace)


def _settings(options: argparse.Namespace) -> "GatewaySettings":
    """What the flags say; raises ValueError for a certificate that cannot be used."""
    from penstock.gateway.flow.control import FlowLimits
    from penstock.gateway.picker.choice import MAX_ENDPOINTS
    from penstock.gateway.process import GatewaySettings
    from penstock.gateway.xds.listener import ListenerSettings
    from penstock.http.replica_tls import ReplicaTls

    return GatewaySettings(
        name=options.name,
        host=options.host,
        grpc_port=options.grpc_port,
        http_port=options.http_port,
        listener=ListenerSettings(
            host=options.listener_host,
            port=options.listener_port,
            tls=options.listener_tls,
            fail_open=options.fail_open,
            traces=_traces(options),
        ),
        health_port=options.health_port,
        destinations=1 if options.single_destination else MAX_ENDPOINTS,
        certificate=_certificate(options),
        ext_proc=options.ext_proc,
        pool_ports=dict(options.pool_port),
        pool_port_range=options.pool_port_range,
        pool_fallbacks=options.pool_fallbacks,
        pool_certificate=_self_signed() if options.pool_tls_self_signed else _certificate(options),
        replica_tls=None if options.replica_tls is None else ReplicaTls.of(options.replica_tls, options.replica_name),
        tenants=options.tenants,
        audit_log=options.audit_log,
        debug_token=options.debug_token_file,
        console=options.console,
        flow=FlowLimits(requests=options.max_queued_requests, bytes=options.max_queued_mib * 2**20),
        poll_period_s=options.poll_period,
        tokenizers=dict(options.tokenizer),
    )


def _traces(options: argparse.Namespace) -> "TraceSettings | None":
    from penstock.gateway.tracing import TraceSettings

    endpoint = options.otlp_traces_endpoint
    return None if endpoint is None else TraceSettings(endpoint=endpoint, percent=options.trace_percent)


def _certificate(options: argparse.Namespace) -> "Certificate | None":
    """What the gRPC port presents; None for plaintext."""
    if not options.tls_self_signed and options.tls_cert is None:
        return None
    from penstock.gateway.tls import CertificateFiles

    return _self_signed() if options.tls_self_signed else CertificateFiles(options.tls_cert, options.tls_key)


def _self_signed() -> "Certificate":
    from penstock.gateway.tls import SelfSigned

    return SelfSigned()


def _collector(text: str) -> str:
    """Parse `http://HOST[:PORT]/PATH`. Envoy needs the host and the port."""
    try:
        url = urlsplit(text)
        if url.scheme == "http" and url.hostname and url.port != 0 and url.path.strip("/"):
            return text
    except ValueError:  # a port that is none
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://collector:4318/v1/traces")


def _endpoint(text: str) -> "Address":
    """`IP:PORT[=ENGINE]`."""
    from penstock.gateway.discovery.address import address_of

    try:
        return address_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _percent(text: str) -> float:
    return number(text, 0, 100)


def _tokenizer(text: str) -> tuple[str, Path]:
    """`MODEL=FOLDER`."""
    model, _, folder = text.partition("=")
    if not model or not (Path(folder) / "tokenizer.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not MODEL=FOLDER with a tokenizer.json in the folder")
    return model, Path(folder)


def _pool_port(text: str) -> tuple[str, int]:
    """`NAMESPACE/NAME=PORT`."""
    pool, _, port = text.partition("=")
    namespace, _, name = pool.partition("/")
    if not (namespace and name) or "/" in name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/NAME=PORT")
    return pool, int(port)


def _port_range(text: str) -> range:
    """`FIRST-LAST`."""
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal()) or not 0 < int(first) <= int(last) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST-LAST, two ports")
    return range(int(first), int(last) + 1)


def envoy(argv: list[str]) -> int:
    """Runs Envoy against a gateway."""
    from penstock.gateway.envoy import main

    return main(argv)
