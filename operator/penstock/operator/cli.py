"""The commands `penstock operator`, `crds`, `up` and `demo`. Light to import: `penstock --help` loads this module."""

import argparse
import sys
from pathlib import Path

from penstock.flag_values import above_zero, port, port_or_any
from penstock.kube.errors import NoApiServer
from penstock.operator.command_line import add_server, nowhere


def operator(argv: list[str]) -> int:
    """Runs the operator and the autoscaler against a Kubernetes API server."""
    parser = _operator_parser()
    options = parser.parse_args(argv)
    if options.replica_name is not None and options.replica_tls is None:
        parser.error("--replica-name needs --replica-tls")
    import asyncio
    import logging

    from penstock.http.replica_tls import ReplicaTls, TlsError
    from penstock.operator.desired import Rendering
    from penstock.operator.process import Options, run
    from penstock.operator.restrictions import Allowances

    logging.basicConfig(level=options.log_level, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each look at a gateway
    rendering = Rendering(
        image=options.engine_image,
        system_namespace=options.system_namespace,
        allow_privileged_templates=options.allow_privileged_templates,
        allowances=Allowances(
            secrets=frozenset(options.template_secret),
            root=options.allow_root_templates,
            node_name=options.allow_node_name_templates,
            command=options.allow_command_templates,
            system_priority=options.allow_system_priority_templates,
        ),
        monitor_labels=options.pod_monitors,
        node_cache=options.node_cache,
        storage_class=options.cache_storage_class,
    )
    try:
        replica_tls = None if options.replica_tls is None else ReplicaTls.of(options.replica_tls, options.replica_name)
    except TlsError as error:
        sys.stderr.write(f"penstock operator: --replica-tls: {error}\n")
        return 2
    settings = Options(
        rendering=rendering,
        namespaces=options.namespace,
        system_namespace=options.system_namespace,
        kubeconfig=options.kubeconfig,
        leader_elect=options.leader_elect,
        resync_s=options.resync,
        http_host=options.http_host,
        http_port=options.http_port,
        gateway_url=options.gateway_url,
        gateway_http_port=options.gateway_http_port,
        replica_tls=replica_tls,
        budgets=dict(options.namespace_budget),
    )
    try:
        asyncio.run(run(settings))
    except NoApiServer as error:
        return nowhere("penstock operator", error)
    return 0


def _operator_parser() -> argparse.ArgumentParser:
    from importlib.metadata import version

    parser = argparse.ArgumentParser(prog="penstock operator", description=operator.__doc__)
    add = parser.add_argument
    add("--namespace", action="append", default=[], help="only this namespace; repeat for more (default: all)")
    add("--system-namespace", default="penstock-system", help="namespace of the Lease and the gateways (default: %(default)s)")
    add_server(parser, context=False)
    add("--leader-elect", action=argparse.BooleanOptionalAction, default=True, help="act only while holding the Lease")
    add(
        "--resync",
        type=above_zero,
        default=300.0,
        metavar="SECONDS",
        help="reconcile every object this often (default: %(default)s)",
    )
    add("--http-host", default="127.0.0.1", help="address of /metrics and /healthz (default: %(default)s)")
    add("--http-port", type=port_or_any, default=9091, help="port of /metrics and /healthz (default: %(default)s)")
    add(
        "--engine-image",
        default=f"penstock/engine:{version('penstock')}",
        help="image for models without engine.image (default: %(default)s)",
    )
    add("--gateway-url", default="", help="where clients reach the gateway; shown in status.url")
    add("--gateway-http-port", type=port, default=9090, help="gateways' port for /pools (default: %(default)s)")
    add(
        "--replica-tls",
        type=Path,
        metavar="FOLDER",
        help="TLS to replicas: ca.crt, and tls.crt and tls.key to present; reread when they are replaced (default: no TLS)",
    )
    add("--replica-name", metavar="NAME", help="name that replicas' certificates must hold (default: any signed by ca.crt)")
    add(
        "--allow-privileged-templates",
        action="store_true",
        help="let pool templates ask for anything, host access and privilege included: everyone who may create InferenceModels "
        "may then run any pod",
    )
    add(
        "--template-secret",
        action="append",
        default=[],
        metavar="NAME",
        help="let pool templates read the Secrets of this name; repeat for more (default: none)",
    )
    add("--allow-root-templates", action="store_true", help="let pool templates run containers as root")
    add(
        "--allow-node-name-templates",
        action="store_true",
        help="let pool templates set nodeName, which bypasses the scheduler",
    )
    add("--allow-command-templates", action="store_true", help="let pool templates replace the engine's command")
    add("--allow-system-priority-templates", action="store_true", help="let pool templates use the system-… priority classes")
    add(
        "--pod-monitors",
        type=_labels,
        nargs="?",
        const={},
        metavar="LABEL=VALUE,…",
        help="make a PodMonitor for each model, with these labels, where that CRD is installed (default: none; the chart has one "
        "for all models)",
    )
    add(
        "--cache-storage-class",
        metavar="NAME",
        help="storage class of claims that the operator makes for source.cache.size (default: the cluster's default)",
    )
    add(
        "--node-cache",
        type=_absolute,
        metavar="FOLDER",
        help="folder of every node for source.cache of type Node; FOLDER/NAMESPACE must exist there and be writable for group "
        "65532 (default: refuse that type)",
    )
    add(
        "--namespace-budget",
        type=_budget,
        action="append",
        default=[],
        metavar="NAMESPACE=COST",
        help="the most that the autoscaled replicas of all models in a namespace may cost, in the unit of pools[].cost; repeat "
        "for more (default: no limit)",
    )
    add("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    return parser


def _absolute(text: str) -> str:
    """A path from the root, without a slash at its end."""
    if not text.startswith("/") or ".." in text.split("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not an absolute path")
    return text.rstrip("/")


def _budget(text: str) -> tuple[str, float]:
    """`team-a=100` as a namespace and its budget."""
    namespace, _, cost = text.partition("=")
    if not namespace or not cost.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE=COST with a whole number")
    return namespace, float(cost)


def _labels(text: str) -> dict[str, str]:
    """`a=b,c=d` as labels; argparse says what is wrong where a part has no `=`."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name and equals for name, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not LABEL=VALUE,…")
    return {name: value for name, _, value in pairs}


def up(argv: list[str]) -> int:
    """Runs everything on this machine as processes: engines, gateway, Envoy, autoscaler."""
    from penstock.operator.local import cli

    return cli.up(argv)


def demo(argv: list[str]) -> int:
    """Runs everything on this machine, asks one question through the gateway, and stops."""
    from penstock.operator.local import cli

    return cli.demo(argv)


def explain(argv: list[str]) -> int:
    """Says why a model has the size that it has, and what size more load would give it."""
    from penstock.operator import explain as command

    return command.main(argv)


def crds(argv: list[str]) -> int:
    """Prints the CustomResourceDefinitions as YAML, or writes them to a folder."""
    parser = argparse.ArgumentParser(prog="penstock crds", description=crds.__doc__)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write one file for each kind into this folder")
    parser.add_argument(
        "--check",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="report what would break if these replaced the cluster's CRDs, or those in FILE",
    )
    parser.add_argument("--kubeconfig", help="for --check; default: the pod's ServiceAccount, else kubectl's file")
    options = parser.parse_args(argv)
    if options.check is not None:
        return _check_crds(None if options.check == Path() else options.check, options.kubeconfig)
    import yaml

    from penstock.api import resources

    documents = {f"{crd['metadata']['name']}.yaml": crd for crd in resources.crds()}
    if options.write is None:
        sys.stdout.write(yaml.dump_all(documents.values(), Dumper=_dumper(), sort_keys=False, width=120))
        return 0
    options.write.mkdir(parents=True, exist_ok=True)
    for name, crd in documents.items():
        text = "# Generated by `penstock crds --write`; do not edit.\n" + yaml.dump(
            crd, Dumper=_dumper(), sort_keys=False, width=120
        )
        (options.write / name).write_text(text)
    return 0


def _check_crds(path: Path | None, kubeconfig: str | None) -> int:
    """0: they only add to what is there; 1: they break what it says; 2: there is nothing to compare with."""
    from kubernetes.aio.client import ApiException

    from penstock.operator.crd_check import check

    try:
        found = check(path, kubeconfig)
    except (NoApiServer, ApiException, OSError, ValueError) as error:
        sys.stderr.write(f"penstock crds: {error}\n")
        return 2
    sys.stdout.writelines(f"{line}\n" for line in found or ["nothing breaks"])
    return 1 if found else 0


def _dumper() -> type:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes equal parts out instead of pointing from one to the other, which kubectl reads but people do not."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    return Dumper
