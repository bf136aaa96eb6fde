"""What an exchange costs by itself: the gateway's front end and its Envoy, with replicas named in turn and no body read.

python -m benchmarks.gatewaybench.undecided GRPC_PORT LISTENER_PORT FLEET_FILE
"""

import asyncio
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import uvloop
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from prometheus_client import CollectorRegistry

from benchmarks.pickerbench.layers import Decided
from penstock.api.fleet import Fleet
from penstock.gateway._pb.envoy.service.accesslog.v3.als_pb2_grpc import add_AccessLogServiceServicer_to_server
from penstock.gateway._pb.envoy.service.discovery.v3.ads_pb2_grpc import add_AggregatedDiscoveryServiceServicer_to_server
from penstock.gateway.extproc.access_log import AccessLogService
from penstock.gateway.extproc.call import Call, Routed
from penstock.gateway.extproc.health import Health
from penstock.gateway.extproc.service import ExtProcService
from penstock.gateway.extproc.underway import Underway
from penstock.gateway.extproc.wire import wire_of
from penstock.gateway.front_ends import LeanFrontEnd
from penstock.gateway.load.reports import ReportStore
from penstock.gateway.picker.bookings import Bookings
from penstock.gateway.picker.choice import MAX_ENDPOINTS
from penstock.gateway.picker.compiled import installed
from penstock.gateway.xds.listener import ListenerSettings
from penstock.gateway.xds.server import AdsServicer

LOCALHOST = "127.0.0.1"
CHOICE: Any = SimpleNamespace(policy="Cost", scores=[0.4], resident_tokens=0, hop=None)
"""What a pick notes of its choice in Envoy's metadata."""


class InTurn(Decided):
    """Names the replicas of `fleet` in turn."""

    def __init__(self, fleet: Fleet, underway: Underway) -> None:
        super().__init__()
        self._underway = underway
        its = [f"{replica.host}:{replica.port}" for replica in fleet.replicas]
        self._orders = itertools.cycle([[*its[n:], *its[:n]][:MAX_ENDPOINTS] for n in range(len(its))])
        self._pool = fleet.pools[0].id

    async def route(self, call: Call) -> Routed:
        """Choose the destination of a complete request."""
        own = {"endpoints": next(self._orders), "pool": self._pool, "named": self._underway.name(), "choice": CHOICE}
        return msgspec.structs.replace(self._routed, prompt_tokens=1000, **own)


async def serve(port: int, listener_port: int, fleet: Fleet) -> None:
    """Serves all that Envoy asks of a gateway at `port`, until it is killed."""
    compiled, health = installed(), Health()
    underway = Underway(Bookings(), ReportStore())
    server = LeanFrontEnd(compiled)
    ExtProcService(InTurn(fleet, underway), wire=wire_of(compiled)).add_to(server)
    ads = AdsServicer(ListenerSettings(LOCALHOST, listener_port), CollectorRegistry())
    ads.update(fleet)
    add_AggregatedDiscoveryServiceServicer_to_server(ads, server)
    add_AccessLogServiceServicer_to_server(AccessLogService(underway, lambda _routed, _entry: None), server)
    add_HealthServicer_to_server(health.servicer, server)
    await health.ready(True)
    await server.listen(LOCALHOST, port, None)
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asked_port, clients_port, fleet_file = sys.argv[1:]
    uvloop.run(serve(int(asked_port), int(clients_port), msgspec.json.decode(Path(fleet_file).read_bytes(), type=Fleet)))
