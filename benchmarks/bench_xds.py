"""What Envoy's control plane costs with many models: time and bytes of the first push, and of one endpoint that comes.

Usage: `python benchmarks/bench_xds.py [--models N] [--replicas N]`. The client keeps what it is told, as Envoy does, in this
process, so the figures are the server's own and need no quiet machine: CPU time and bytes.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

from report import write_results

from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.gateway._pb.envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryRequest
from penstock.gateway.xds.delta import DeltaStream
from penstock.gateway.xds.listener import ListenerSettings
from penstock.gateway.xds.resources import CLUSTERS, ENDPOINTS, LISTENERS, ROUTES, Snapshot, SnapshotBuilder


def fleet_of(models: int, replicas: int, more: int = 0) -> Fleet:
    """`models` models of one pool with `replicas` replicas each, and `more` in the first."""

    def replica(model: int, number: int) -> Replica:
        host = f"10.{model // 250}.{model % 250}.{number + 1}"
        name = f"m{model}-{number}"
        return Replica(uid=name, name=name, pool=f"d/m{model}/p", host=host, port=8000, events_port=1, replay_port=2, ready=True)

    return Fleet(
        models=[Model(id=f"d/m{it}", served_names=[f"m{it}"]) for it in range(models)],
        pools=[Pool(id=f"d/m{it}/p", model=f"d/m{it}") for it in range(models)],
        replicas=[replica(it, n) for it in range(models) for n in range(replicas + (more if it == 0 else 0))],
    )


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(CPU milliseconds, result)."""
    began = time.process_time()
    result = work()
    return (time.process_time() - began) * 1e3, result


def measure(before: Fleet, after: Fleet) -> dict[str, float]:
    """The first push to one Envoy, and that of the change."""
    stream, builder = DeltaStream(), SnapshotBuilder(ListenerSettings(host="0.0.0.0", port=8080))
    build_ms, first = timed(lambda: builder.snapshot(before))
    names = {CLUSTERS: [], ENDPOINTS: [pool.id for pool in before.pools], LISTENERS: [], ROUTES: ["penstock"]}

    def subscribe(snapshot: Snapshot) -> list[bytes]:
        requests = [DeltaDiscoveryRequest(type_url=kind, resource_names_subscribe=wanted) for kind, wanted in names.items()]
        return [it.SerializeToString() for request in requests for it in stream.on_request(request, snapshot)[0]]

    push_ms, sent = timed(lambda: subscribe(first))
    rebuild_ms, second = timed(lambda: builder.snapshot(after))
    change_ms, changed = timed(lambda: [it.SerializeToString() for it in stream.on_snapshot(second)])
    return {
        "build_ms": build_ms,
        "first_push_ms": push_ms,
        "first_push_bytes": sum(map(len, sent)),
        "rebuild_ms": rebuild_ms,
        "change_ms": change_ms,
        "change_bytes": sum(map(len, changed)),
    }


def main() -> None:
    """Prints a table and writes it to `results/`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=4, help="of each model")
    options = parser.parse_args()
    before, after = (fleet_of(options.models, options.replicas, more) for more in (0, 1))
    row = measure(before, after)
    print(f"{options.models} models of {options.replicas} replicas, one Envoy; CPU ms and bytes")
    print("".join(f"{column:>18}" for column in row))
    print("".join(f"{figure:>18,.2f}" for figure in row.values()))
    path = write_results("xds", {"models": options.models, "replicas": options.replicas, "row": row})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
