"""Envoy's aggregated discovery service (ADS), incremental (delta xDS), on grpc.aio."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Literal

import grpc
import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.api import metrics
from penstock.api.fleet import Fleet
from penstock.gateway._pb.envoy.service.discovery.v3.ads_pb2_grpc import AggregatedDiscoveryServiceServicer
from penstock.gateway._pb.envoy.service.discovery.v3.discovery_pb2 import (
    DeltaDiscoveryRequest,
    DeltaDiscoveryResponse,
)
from penstock.gateway.xds.delta import DeltaStream
from penstock.gateway.xds.listener import ListenerSettings
from penstock.gateway.xds.resources import CLUSTERS, ENDPOINTS, LISTENERS, ROUTES, SECRETS, Snapshot, SnapshotBuilder
from penstock.gateway.xds.subscription import Refusal, Subscription
from penstock.http.replica_tls import ReplicaTls

_Inbox = asyncio.Queue[DeltaDiscoveryRequest | Literal["fleet", "end"]]
"""What happened to a stream: Envoy said something, there is a newer fleet, Envoy hung up."""


class TypeView(msgspec.Struct, frozen=True, kw_only=True):
    """One type of resource at one Envoy."""

    resources: int
    """How many it was sent."""
    version: str
    """Version of all resources together. The same version means the same content."""
    acknowledged: bool
    """Envoy has answered all that it was sent."""
    refusals: list[Refusal]


class EnvoyView(msgspec.Struct, frozen=True, kw_only=True):
    """One connected Envoy, as `/debug/xds` shows it."""

    node: str
    connected_s: float
    types: dict[str, TypeView]


class AdsServicer(AggregatedDiscoveryServiceServicer):
    """Tells every connected Envoy about the latest fleet; nothing before there is one. Register it with
    `add_AggregatedDiscoveryServiceServicer_to_server`."""

    def __init__(self, settings: ListenerSettings, registry: CollectorRegistry, replica_tls: ReplicaTls | None = None) -> None:
        self._builder = SnapshotBuilder(settings, replica_tls)
        self._snapshot: Snapshot | None = None
        self._streams: dict[_Inbox, DeltaStream] = {}
        self._since: dict[_Inbox, float] = {}
        self._progress = asyncio.Event()
        """An Envoy has said something, or has gone."""
        self._nacks = Counter(
            metrics.XDS_NACKS, "Configuration responses that an Envoy refused, by resource type", ["type"], registry=registry
        )
        for kind in (CLUSTERS, ENDPOINTS, LISTENERS, ROUTES, SECRETS):
            self._refused(kind)  # from the start, since what begins at 1 has no increase that an alert could see
        self._envoys = Gauge(metrics.XDS_ENVOYS, "Connected Envoys", registry=registry)

    def _refused(self, kind: str) -> Counter:
        return self._nacks.labels(type=kind.rpartition(".")[2])

    def update(self, fleet: Fleet) -> None:
        """Send `fleet`, which must be complete, to all Envoys, now and when they connect."""
        self._snapshot = self._builder.snapshot(fleet)
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
                while (snapshot := self._snapshot) is not None and not all(
                    its.subscriptions.settled(snapshot) for its in self._streams.values()
                ):
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            return False
        return True

    def refused_pools(self) -> dict[str, str]:
        """What Envoys say of the pools whose cluster or endpoints they refuse, by pool."""
        words: dict[str, str] = {}
        for stream in self._streams.values():
            for (kind, name), refusal in stream.subscriptions.refusals().items():
                if kind in (CLUSTERS, ENDPOINTS):
                    words[name] = f"Envoy {stream.subscriptions.node}: {refusal.message}"
        return words

    def view(self) -> list[EnvoyView]:
        """The connected Envoys, the one that came first first."""
        now = time.monotonic()
        return [
            EnvoyView(
                node=stream.subscriptions.node,
                connected_s=round(now - self._since[inbox], 3),
                types={kind.rpartition(".")[2]: _type_view(its) for kind, its in stream.subscriptions.by_kind.items()},
            )
            for inbox, stream in self._streams.items()
        ]

    async def DeltaAggregatedResources(
        self, request_iterator: AsyncIterator[DeltaDiscoveryRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[DeltaDiscoveryResponse]:
        """Serve one Envoy's stream until it closes it."""
        stream, inbox = DeltaStream(), _Inbox()
        reader = asyncio.create_task(_forward(request_iterator, inbox))
        self._streams[inbox], self._since[inbox] = stream, time.monotonic()
        self._envoys.inc()
        try:
            while (event := await inbox.get()) != "end":
                # Always by the latest fleet, however many came while this was waiting.
                if isinstance(event, str):
                    responses = stream.on_snapshot(self._snapshot)
                else:
                    responses, refused = stream.on_request(event, self._snapshot)
                    self._progress.set()
                    if refused:
                        self._refused(event.type_url).inc()
                for response in responses:
                    yield response
        finally:
            del self._streams[inbox], self._since[inbox]
            self._envoys.dec()
            self._progress.set()
            reader.cancel()


def _type_view(subscription: Subscription) -> TypeView:
    refusals = {id(it): it for it in subscription.refusals.values()}
    return TypeView(
        resources=sum(bool(version) for version in subscription.sent.values()),
        version=subscription.version,
        acknowledged=not subscription.awaiting,
        refusals=list(refusals.values()),
    )


async def _forward(requests: AsyncIterator[DeltaDiscoveryRequest], inbox: _Inbox) -> None:
    try:
        async for request in requests:
            inbox.put_nowait(request)
    finally:
        inbox.put_nowait("end")
