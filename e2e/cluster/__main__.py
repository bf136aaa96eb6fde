"""An interactive testbed: `python -m e2e.cluster up`, then `… kubectl get pods -A` or `… run -- COMMAND`, then `… down`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from e2e.cluster import network
from e2e.cluster.build import build
from e2e.cluster.cluster import Cluster, add_default_nodes
from e2e.cluster.commands import CommandError, TestbedError, check_machine
from e2e.cluster.phases import Phases


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=__doc__)
    parser.add_argument(
        "--name", default="penstock", help="the cluster's name; clusters of different names run side by side (default: penstock)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build the control plane's programs, if they are not there yet")
    up = commands.add_parser("up", help="start a control plane and two nodes")
    up.add_argument(
        "manifests", nargs="*", type=Path, help="files or folders to apply before the controllers start, such as CRDs"
    )
    commands.add_parser("down", help="stop it; the logs stay")
    kubectl = commands.add_parser("kubectl", help="kubectl as the cluster's admin", add_help=False)
    kubectl.add_argument("args", nargs=argparse.REMAINDER)
    inside = commands.add_parser("run", help="run a command in the cluster's network, with the admin's KUBECONFIG")
    inside.add_argument("args", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    console, cluster = Console(stderr=True, highlight=False, soft_wrap=True), Cluster(args.name)
    try:
        match args.command:
            case "build":
                check_machine(cluster.state)
                build(console)
            case "up":
                _up(cluster, args.manifests, console)
            case "down":
                cluster.stop()
            case "kubectl":
                _run_inside(cluster, ["kubectl", *args.args])
            case "run":
                _run_inside(cluster, args.args[1:] if args.args[:1] == ["--"] else args.args)
    except (TestbedError, CommandError) as problem:
        console.print(str(problem), style="red", markup=False)
        sys.exit(1)


def _up(cluster: Cluster, manifests: Sequence[Path], console: Console) -> None:
    check_machine(cluster.state)
    build(console)
    cluster.create()
    phases = Phases(console.print)
    try:
        with network.entered(cluster.name):
            cluster.start(manifests, phases)
            add_default_nodes(cluster, phases)
    except BaseException:
        console.print(f"the logs are in {cluster.processes.logs}")
        cluster.stop()
        raise
    console.print(f"cluster {cluster.name} is up; its logs are in {cluster.processes.logs}")
    console.print("try: python -m e2e.cluster kubectl get pods -A")


def _run_inside(cluster: Cluster, command: list[str]) -> None:
    """Become that command, in the cluster's network."""
    if not command:
        raise TestbedError("name a command to run")
    if not cluster.exists():
        raise TestbedError(f"there is no cluster named {cluster.name}: run `python -m e2e.cluster up` first")
    network.enter(cluster.name)
    environment = dict(os.environ) | cluster.environment
    try:
        os.execvpe(command[0], command, environment)
    except FileNotFoundError as problem:
        raise TestbedError(f"{command[0]}: no such command") from problem


if __name__ == "__main__":
    main()
