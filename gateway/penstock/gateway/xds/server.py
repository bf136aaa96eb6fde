"""Envoy's aggregated discovery service (ADS), state of the world, on grpc.aio."""

import asyncio
from collections.abc import AsyncIterator
from typing import Literal

import grpc
from prometheus_client import CollectorRegistry, Counter

from penstock.api import metrics
from penstock.api.fleet import Fleet
from penstock.gateway._pb.envoy.service.discovery.v3.ads_pb2_grpc import AggregatedDiscoveryServiceServicer
from penstock.gateway._pb.envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse
from penstock.gateway.xds.listener import ListenerSettings
from penstock.gateway.xds.resources import Snapshot, snapshot
from penstock.gateway.xds.stream import AdsStream

_Inbox = asyncio.Queue[DiscoveryRequest | Literal["fleet", "end"]]
"""What happened to a stream: Envoy said something, there is a newer fleet, Envoy hung up."""


class AdsServicer(AggregatedDiscoveryServiceServicer):
    """Tells every connected Envoy about the latest fleet; nothing before there is one. Register it with
    `add_AggregatedDiscoveryServiceServicer_to_server`."""

    def __init__(self, settings: ListenerSettings, registry: CollectorRegistry) -> None:
        self._settings = settings
        self._snapshot: Snapshot | None = None
        self._streams: dict[_Inbox, AdsStream] = {}
        self._progress = asyncio.Event()
        """An Envoy has said something, or has gone."""
        self._nacks = Counter(metrics.XDS_NACKS, "Resources that an Envoy refused", ["type"], registry=registry)

    def update(self, fleet: Fleet) -> None:
        """Makes `fleet` what Envoys are told, now and when they connect. It must be complete."""
        self._snapshot = snapshot(fleet, self._settings)
        for inbox in self._streams:
            inbox.put_nowait("fleet")

    async def applied(self, limit_s: float) -> bool:
        """Waits until every connected Envoy knows the clusters and endpoints of the last `update`, or has refused them.

        A destination that Envoy does not know yet is no destination: a replica may be picked only after this.

        Args:
            limit_s: How long an Envoy that does not answer can keep the others waiting.

        Returns:
            Whether it came to that within the limit.
        """
        try:
            async with asyncio.timeout(limit_s):
                while self._snapshot is not None and not all(it.settled(self._snapshot) for it in self._streams.values()):
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            return False
        return True

    async def StreamAggregatedResources(
        self, request_iterator: AsyncIterator[DiscoveryRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[DiscoveryResponse]:
        """One Envoy's stream, until it closes it."""
        stream = AdsStream()
        inbox: _Inbox = asyncio.Queue()
        reader = asyncio.create_task(_forward(request_iterator, inbox))
        self._streams[inbox] = stream
        try:
            while (event := await inbox.get()) != "end":
                # Always by the latest fleet, however many came while this was waiting.
                if isinstance(event, DiscoveryRequest):
                    responses, refused = stream.on_request(event, self._snapshot)
                    self._progress.set()
                    if refused:
                        self._nacks.labels(type=event.type_url.rpartition(".")[2]).inc()
                else:
                    responses = stream.on_snapshot(self._snapshot)
                for response in responses:
                    yield response
        finally:
            del self._streams[inbox]
            self._progress.set()
            reader.cancel()


async def _forward(requests: AsyncIterator[DiscoveryRequest], inbox: _Inbox) -> None:
    try:
        async for request in requests:
            inbox.put_nowait(request)
    finally:
        inbox.put_nowait("end")
