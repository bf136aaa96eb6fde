"""One Envoy's state-of-the-world subscription, without any transport: requests and snapshots in, responses out."""

import logging
from collections.abc import Iterator

from penstock.gateway._pb.envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse
from penstock.gateway.xds.resources import CLUSTERS, ORDER, WILDCARD, Snapshot, version_of
from penstock.gateway.xds.subscription import Subscription, Subscriptions

log = logging.getLogger(__name__)


class SotwStream:
    """What was sent to one Envoy, and what it wants.

    Clusters and listeners are told all at once, as the protocol has it; of other types only those that changed.
    """

    protocol = "state of the world"

    def __init__(self) -> None:
        self.subscriptions = Subscriptions()
        self._latest: dict[str, str] = {}
        """Type → nonce of the last response."""

    def on_request(self, request: DiscoveryRequest, snapshot: Snapshot | None) -> tuple[list[DiscoveryResponse], bool]:
        """Answers a request, if it asks for something.

        Returns:
            The responses, and whether the request refuses what was sent last (a NACK). Envoy then keeps what it had; it gets the
            next version, not the refused one again.
        """
        its, kind = self.subscriptions, request.type_url
        its.node = request.node.id or its.node
        if kind not in ORDER:
            log.warning("Envoy %s asks for %s, which is not served here", its.node, kind)
            return [], False
        known, refused = its.by_kind.get(kind), False
        if known is None:
            known = its.open(kind, request.resource_names)
            self._welcome_back(known, request.version_info, snapshot)
        else:
            message = request.error_detail.message if request.HasField("error_detail") else None
            refused = known.answered(request.response_nonce, its.node, message)
            if request.response_nonce != self._latest.get(kind, ""):
                return [], refused  # about an earlier response; Envoy's word on the latest is still to come
            known.names = set(request.resource_names)
            for name in known.sent.keys() - known.names if not known.wildcard else ():
                del known.sent[name]
        return list(self._changed(kind, snapshot)), refused

    def on_snapshot(self, snapshot: Snapshot | None) -> Iterator[DiscoveryResponse]:
        """What changed for this Envoy, in an order that never names what does not exist yet."""
        for kind in ORDER:
            yield from self._changed(kind, snapshot)

    @staticmethod
    def _welcome_back(subscription: Subscription, version: str, snapshot: Snapshot | None) -> None:
        """After a reconnection Envoy says what it has, and needs nothing if that is what it would be sent."""
        if snapshot is None or not version:
            return
        versions = {name: resource.version for name, resource in subscription.current(snapshot).items()}
        if version == version_of(versions):
            subscription.sent = versions

    def _changed(self, kind: str, snapshot: Snapshot | None) -> Iterator[DiscoveryResponse]:
        subscription = self.subscriptions.by_kind.get(kind)
        if subscription is None or snapshot is None:
            return
        current = subscription.current(snapshot)
        news = subscription.news(current)
        gone = subscription.sent.keys() - current.keys()
        subscription.gone(gone)
        for name in gone:
            del subscription.sent[name]
        all_at_once = kind in WILDCARD
        # A fleet without pools has no clusters: the first answer may be an empty one.
        begins = not subscription.begun and not subscription.sent
        subscription.begun = True
        if not (news or begins or (gone and all_at_once)):
            return
        subscription.sent.update((name, current[name].version) for name in news)
        if kind == CLUSTERS:
            self.subscriptions.clusters_sent(news)
        told = sorted(current) if all_at_once else news
        nonce = self._latest[kind] = self.subscriptions.nonce()
        subscription.awaiting[nonce] = told
        yield DiscoveryResponse(
            version_info=subscription.version, resources=[current[name].body for name in told], type_url=kind, nonce=nonce
        )
