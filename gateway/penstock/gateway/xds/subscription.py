"""What one Envoy wants of one type of resource, what it was sent, and what it said about that."""

import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.gateway.xds.resources import CLUSTERS, ENDPOINTS, Resource, Snapshot, version_of

log = logging.getLogger(__name__)

NAMED = 10
"""Most resources of a refusal that are named in the log."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A response that Envoy did not take (a NACK)."""

    resources: list[str]
    """The resources that Envoy names, or if it names none, all in the response."""
    message: str
    """Envoy's."""
    time: float
    """Unix time in seconds."""


@dataclass
class Subscription:
    """One type of resource on one stream."""

    kind: str
    wildcard: bool
    """Wants all that there are, besides `names`."""
    names: set[str] = field(default_factory=set)
    sent: dict[str, str] = field(default_factory=dict)
    """Versions sent last, by name, whether or not Envoy liked them; an empty one: Envoy was told that there is no such thing."""
    awaiting: dict[str, list[str]] = field(default_factory=dict)
    """Responses that Envoy has not answered: nonce → names of what was in them."""
    begun: bool = False
    """Envoy has had an answer, or has said what it had."""
    refusals: dict[str, Refusal] = field(default_factory=dict)
    """The last word on each resource that was refused and not taken since."""

    def current(self, snapshot: Snapshot) -> Mapping[str, Resource]:
        """What of the snapshot this Envoy wants."""
        have = snapshot.resources[self.kind]
        return have if self.wildcard else {name: have[name] for name in self.names if name in have}

    def news(self, current: Mapping[str, Resource]) -> list[str]:
        """Return the names of resources that changed since they were sent, sorted."""
        return sorted(name for name, resource in current.items() if self.sent.get(name) != resource.version)

    def answered(self, nonce: str, node: str, refusal: str | None) -> bool:
        """Takes in Envoy's answer to a response, with its message where it refuses it; returns whether it does."""
        names = self.awaiting.pop(nonce, None)
        if names is None:
            return False
        if refusal is None:
            for name in names:
                self.refusals.pop(name, None)
            return False
        guilty = [name for name in names if _names(refusal, name)] or names
        refused = Refusal(resources=guilty, message=refusal, time=time.time())
        self.refusals.update(dict.fromkeys(guilty, refused))
        shown = ", ".join(guilty[:NAMED]) + (f" and {len(guilty) - NAMED} more" if len(guilty) > NAMED else "")
        log.error("Envoy %s refuses %s of %s: %s", node, shown or "nothing", self.kind, refusal)
        return True

    def gone(self, names: Iterable[str]) -> None:
        """These do not exist any more, and nothing that was wrong with them."""
        for name in names:
            self.refusals.pop(name, None)

    @property
    def version(self) -> str:
        """Version of all that was sent."""
        return version_of({name: version for name, version in self.sent.items() if version})


def _names(message: str, name: str) -> bool:
    """Whether it names it, and not another one whose name is longer: `m-1` is not in `m-10`."""
    return re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w/-]|\.\w)", message) is not None


class Subscriptions:
    """All types on one stream."""

    def __init__(self) -> None:
        self.node = ""
        self.by_kind: dict[str, Subscription] = {}
        self._nonces = 0

    def nonce(self) -> str:
        """One that was not used before."""
        self._nonces += 1
        return str(self._nonces)

    def open(self, kind: str, *, wildcard: bool) -> Subscription:
        """Begin a subscription to a type."""
        subscription = Subscription(kind, wildcard)
        self.by_kind[kind] = subscription
        return subscription

    def clusters_sent(self, names: Sequence[str]) -> None:
        """Mark endpoints to be sent again: a new or changed cluster waits for its endpoints, also for those that it had."""
        if (endpoints := self.by_kind.get(ENDPOINTS)) is not None:
            for name in names:
                endpoints.sent.pop(name, None)

    def settled(self, snapshot: Snapshot) -> bool:
        """Whether this Envoy has taken (or refused) all of the snapshot's clusters and endpoints."""
        for kind in (CLUSTERS, ENDPOINTS):
            wanted = snapshot.resources[kind].keys()
            subscription = self.by_kind.get(kind)
            if subscription is None:
                if kind == ENDPOINTS and not wanted:  # without clusters Envoy asks for no endpoints
                    continue
                return False
            current = subscription.current(snapshot)
            if current.keys() != wanted or subscription.awaiting or subscription.news(current):
                return False
            if any(version and name not in current for name, version in subscription.sent.items()):
                return False  # what has gone was not taken back yet
        return True

    def refusals(self) -> dict[tuple[str, str], Refusal]:
        """What this Envoy refuses, by type and name."""
        return {(kind, name): it for kind, its in self.by_kind.items() for name, it in its.refusals.items()}
