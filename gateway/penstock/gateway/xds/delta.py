"""One Envoy's incremental subscription, without any transport: requests and snapshots in, responses out."""

import logging
from collections.abc import Iterator

from penstock.gateway._pb.envoy.service.discovery.v3.discovery_pb2 import (
    DeltaDiscoveryRequest,
    DeltaDiscoveryResponse,
    Resource,
)
from penstock.gateway.xds.resources import CLUSTERS, ORDER, WILDCARD, Snapshot
from penstock.gateway.xds.subscription import Subscription, Subscriptions

log = logging.getLogger(__name__)

ALL = "*"
GONE = ""
"""The version of what Envoy was told does not exist."""


class DeltaStream:
    """What was sent to one Envoy, and what it wants."""

    def __init__(self) -> None:
        self.subscriptions = Subscriptions()

    def on_request(self, request: DeltaDiscoveryRequest, snapshot: Snapshot | None) -> tuple[list[DeltaDiscoveryResponse], bool]:
        """Answers a request, if it asks for something.

        Returns:
            The responses, and whether the request refuses an earlier one (a NACK). Envoy then keeps what it had; it gets the next
            version of what it refused, not the refused one again.
        """
        its, kind = self.subscriptions, request.type_url
        its.node = request.node.id or its.node
        if kind not in ORDER:
            log.warning("Envoy %s asks for %s, which is not served here", its.node, kind)
            return [], False
        known = its.by_kind.get(kind)
        first = known is None
        refused = False
        if known is None:
            names = request.resource_names_subscribe
            known = its.open(kind, wildcard=ALL in names or (not names and kind in WILDCARD))
            # After a reconnection Envoy says what it has, and needs only what differs from it.
            known.sent = dict(request.initial_resource_versions)
        else:
            message = request.error_detail.message if request.HasField("error_detail") else None
            refused = known.answered(request.response_nonce, its.node, message)
        _subscribe(known, request, first)
        return list(self._changed(kind, snapshot)), refused

    def on_snapshot(self, snapshot: Snapshot | None) -> Iterator[DeltaDiscoveryResponse]:
        """What changed for this Envoy, in an order that never names what does not exist yet."""
        for kind in ORDER:
            yield from self._changed(kind, snapshot)

    def _changed(self, kind: str, snapshot: Snapshot | None) -> Iterator[DeltaDiscoveryResponse]:
        subscription = self.subscriptions.by_kind.get(kind)
        if subscription is None or snapshot is None:
            return
        current = subscription.current(snapshot)
        news = subscription.news(current)
        gone = sorted(name for name, version in subscription.sent.items() if version != GONE and name not in current)
        gone += sorted(name for name in subscription.names if name not in current and name not in subscription.sent)
        subscription.gone(gone)
        begins = not subscription.begun and not subscription.sent  # who gets nothing is told so, or it would wait
        subscription.begun = True
        if not (news or gone or begins):
            return
        subscription.sent.update((name, current[name].version) for name in news)
        for name in gone:
            subscription.sent.pop(name, None)
            if name in subscription.names:
                subscription.sent[name] = GONE
        if kind == CLUSTERS:
            self.subscriptions.clusters_sent(news)
        nonce = self.subscriptions.nonce()
        subscription.awaiting[nonce] = news
        yield DeltaDiscoveryResponse(
            system_version_info=subscription.version,
            resources=[Resource(name=name, version=current[name].version, resource=current[name].body) for name in news],
            removed_resources=gone,
            type_url=kind,
            nonce=nonce,
        )


def _subscribe(subscription: Subscription, request: DeltaDiscoveryRequest, first: bool) -> None:
    """Takes in what Envoy wants from now on, and wants no more."""
    for name in request.resource_names_unsubscribe:
        if name == ALL:
            subscription.wildcard = False
        subscription.names.discard(name)
    for name in request.resource_names_subscribe:
        if name == ALL:
            subscription.wildcard = True
            continue
        subscription.names.add(name)
        if not first:  # asked for anew, it is sent anew: Envoy has forgotten it
            subscription.sent.pop(name, None)
    if subscription.wildcard:
        for name in request.resource_names_unsubscribe:  # it stays wanted as one of all: the protocol has it said once more
            subscription.sent.pop(name, None)
    else:
        subscription.sent = {name: version for name, version in subscription.sent.items() if name in subscription.names}
