"""Envoy's aggregated discovery service (ADS), state of the world, on grpc.aio."""

import asyncio
from collections.abc import AsyncIterator

import grpc
from prometheus_client import CollectorRegistry, Counter

from penstock.api import metrics
from penstock.api.fleet import Fleet
from penstock.gateway._pb.envoy.service.discovery.v3.ads_pb2_grpc import AggregatedDiscoveryServiceServicer
from penstock.gateway._pb.envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse
from penstock.gateway.xds.listener import ListenerSettings
from penstock.gateway.xds.resources import Snapshot, snapshot
from penstock.gateway.xds.stream import AdsStream

_Inbox = asyncio.Queue[DiscoveryRequest | Snapshot | None]
"""A stream's requests and the snapshots it has to follow, in order of arrival; None ends it."""


class AdsServicer(AggregatedDiscoveryServiceServicer):
    """Tells every connected Envoy about the latest fleet; nothing before there is one. Register it with
    `add_AggregatedDiscoveryServiceServicer_to_server`."""

    def __init__(self, settings: ListenerSettings, registry: CollectorRegistry) -> None:
        self._settings = settings
        self._snapshot: Snapshot | None = None
        self._inboxes: set[_Inbox] = set()
        self._nacks = Counter(metrics.XDS_NACKS, "Resources that an Envoy refused", ["type"], registry=registry)

    def update(self, fleet: Fleet) -> None:
        """Makes `fleet` what Envoys are told, now and when they connect. It must be complete."""
        self._snapshot = snapshot(fleet, self._settings)
        for inbox in self._inboxes:
            inbox.put_nowait(self._snapshot)

    async def StreamAggregatedResources(
        self, request_iterator: AsyncIterator[DiscoveryRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[DiscoveryResponse]:
        """One Envoy's stream, until it closes it."""
        stream = AdsStream()
        inbox: _Inbox = asyncio.Queue()
        reader = asyncio.create_task(_forward(request_iterator, inbox))
        self._inboxes.add(inbox)
        try:
            while (item := await inbox.get()) is not None:
                if isinstance(item, Snapshot):
                    responses = stream.on_snapshot(item)
                else:
                    responses, refused = stream.on_request(item, self._snapshot)
                    if refused:
                        self._nacks.labels(type=item.type_url.rpartition(".")[2]).inc()
                for response in responses:
                    yield response
        finally:
            self._inboxes.discard(inbox)
            reader.cancel()


async def _forward(requests: AsyncIterator[DiscoveryRequest], inbox: _Inbox) -> None:
    try:
        async for request in requests:
            inbox.put_nowait(request)
    finally:
        inbox.put_nowait(None)
