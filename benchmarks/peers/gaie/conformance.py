"""Holds the Gateway API Inference Extension's own picker against the endpoint-picker protocol: `make conformance-gaie`.

Arguments are those of `penstock-epp-conformance`, without the target and what it was told of. Needs the cluster tier's machine.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.peers.gaie.picker import api_server, build_picker, picker
from e2e.cluster.commands import TestbedError
from penstock.epp_conformance.cli import main

ADDRESSES = ("127.0.1.1", "127.0.1.2", "127.0.1.3")
PORT, GRPC_PORT = 8000, 9002
MODEL = "tiny"


def judge(suite: Sequence[str]) -> int:
    """Runs the suite; its exit status."""
    console = Console(stderr=True)
    build_picker(console)
    with api_server(console, "conformance") as cluster, picker(cluster, ADDRESSES, PORT, GRPC_PORT):
        told = [flag for address in ADDRESSES for flag in ("--endpoint", f"{address}:{PORT}")]
        target = ["--target", f"127.0.0.1:{GRPC_PORT}", "--health", f"127.0.0.1:{GRPC_PORT + 1}", "--model", MODEL]
        return main([*target, *told, "--serve-endpoints", *suite])


if __name__ == "__main__":
    try:
        sys.exit(judge(sys.argv[1:]))
    except TestbedError as error:
        sys.exit(f"conformance: {error}")
