"""`python -m e2e.cluster.kubelet`: one node, until SIGTERM."""

import argparse
import logging
import os
import signal
from pathlib import Path

from e2e.cluster.kubelet.api import Api
from e2e.cluster.kubelet.node import Node, NodeConfig


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster.kubelet", description=__doc__)
    parser.add_argument("--kubeconfig", required=True, type=Path, help="a kubeconfig in JSON, with a client certificate")
    parser.add_argument("--node", required=True, help="the node's name")
    parser.add_argument("--folder", required=True, type=Path, help="folder for pods' files; its file system must suit overlayfs")
    parser.add_argument("--logs", required=True, type=Path, help="folder for containers' logs, which outlive their pods")
    parser.add_argument("--netns-prefix", required=True, help="first part of the names of the pods' network namespaces")
    parser.add_argument("--kubernetes-version", required=True, help="the kubelet version to report")
    parser.add_argument(
        "--capacity", action="append", default=[], metavar="RESOURCE=N", help="say nvidia.com/gpu=8; may be repeated"
    )
    parser.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="a label of the node; may be repeated")
    parser.add_argument("--programs", required=True, type=Path, help="JSON file: commands by the images that they stand in for")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = NodeConfig(
        name=args.node,
        folder=args.folder,
        logs=args.logs,
        netns_prefix=args.netns_prefix,
        kubernetes_version=args.kubernetes_version,
        capacity=dict(item.split("=", 1) for item in args.capacity),
        labels=dict(item.split("=", 1) for item in args.label),
        environment=dict(os.environ),
        programs=args.programs,
    )
    node = Node(Api(args.kubeconfig), config)
    signal.signal(signal.SIGTERM, lambda *_: node.stop())
    node.run()


if __name__ == "__main__":
    main()
