"""One Envoy's state-of-the-world subscription, without any transport: requests and snapshots in, responses out."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.gateway._pb.envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse
from penstock.gateway.xds.resources import CLUSTERS, ENDPOINTS, ORDER, WILDCARD, Snapshot, version_of

log = logging.getLogger(__name__)


@dataclass
class _Subscription:
    names: tuple[str, ...] | None
    """None: everything."""
    version: str = ""
    """Sent last, whether or not Envoy liked it; empty when nothing was."""
    nonce: str = ""
    answered: str = ""
    """The nonce of the response that Envoy last took or refused."""


class AdsStream:
    """What was sent to one Envoy, and what it wants."""

    def __init__(self) -> None:
        self._subscriptions: dict[str, _Subscription] = {}
        self._nonces = 0
        self._node = ""

    def on_request(self, request: DiscoveryRequest, snapshot: Snapshot | None) -> tuple[list[DiscoveryResponse], bool]:
        """Answers a request, if it asks for something.

        Returns:
            The responses, and whether the request refuses what was sent last (a NACK). Envoy then keeps what it had; it gets the
            next version, not the refused one again.
        """
        self._node = request.node.id or self._node
        kind = request.type_url
        if kind not in ORDER:
            log.warning("Envoy %s asks for %s, which is not served here", self._node, kind)
            return [], False
        names = None if kind in WILDCARD else tuple(sorted(request.resource_names))
        known = self._subscriptions.get(kind)
        if known is not None and request.response_nonce != known.nonce:
            return [], False  # about an earlier response; Envoy's word on the latest is still to come
        refused = request.HasField("error_detail")
        if refused:
            log.error("Envoy %s refuses %s: %s", self._node, kind, request.error_detail.message)
        if known is None:
            # A new stream. After a reconnection Envoy says what it has, and needs nothing if that is what we would send.
            known = self._subscriptions[kind] = _Subscription(names, version=request.version_info)
        known.names, known.answered = names, request.response_nonce
        return list(self._changed(kind, snapshot)), refused

    def on_snapshot(self, snapshot: Snapshot | None) -> Iterator[DiscoveryResponse]:
        """What changed for this Envoy, in an order that never names what does not exist yet."""
        for kind in ORDER:
            yield from self._changed(kind, snapshot)

    def settled(self, snapshot: Snapshot) -> bool:
        """Whether this Envoy has taken (or refused) all of the snapshot's clusters and endpoints."""
        for kind, names in ((CLUSTERS, None), (ENDPOINTS, tuple(sorted(snapshot.resources[CLUSTERS])))):
            subscription = self._subscriptions.get(kind)
            if subscription is None or subscription.names != names:
                # Without clusters Envoy asks for no endpoints.
                if kind == ENDPOINTS and not names:
                    continue
                return False
            current = subscription.version == version_of(snapshot.select(kind, names))
            if not current or subscription.answered != subscription.nonce:
                return False
        return True

    def _changed(self, kind: str, snapshot: Snapshot | None) -> Iterator[DiscoveryResponse]:
        subscription = self._subscriptions.get(kind)
        if subscription is None or snapshot is None:
            return
        resources = snapshot.select(kind, subscription.names)
        # A fleet without pools has no clusters: that is an answer too, and its version is not the empty string.
        version = version_of(resources)
        if version == subscription.version:
            return
        self._nonces += 1
        subscription.version, subscription.nonce = version, str(self._nonces)
        if kind == CLUSTERS and (endpoints := self._subscriptions.get(ENDPOINTS)) is not None:
            endpoints.version = ""  # a cluster that changed waits for its endpoints anew, even for the same ones
        yield DiscoveryResponse(version_info=version, resources=resources.values(), type_url=kind, nonce=subscription.nonce)
