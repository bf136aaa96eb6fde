"""Subset hints: the endpoints to which a gateway restricts one pick. A hint never fails open: what cannot be read allows
nothing."""

import ipaddress
from collections.abc import Iterable
from typing import cast

import msgspec

from penstock.api.fleet import Replica


class Subset(msgspec.Struct, frozen=True):
    """Allowed addresses: any port of `hosts`, and exact `endpoints`. Empty allows nothing."""

    hosts: frozenset[str]
    endpoints: frozenset[tuple[str, int]]

    def allows(self, replica: Replica) -> bool:
        """Whether the gateway lets this request go to `replica`."""
        host = canonical(replica.host)
        return host in self.hosts or (host, replica.port) in self.endpoints


def only(replicas: Iterable[Replica], within: Subset | None) -> Subset:
    """These replicas, as far as `within` allows them."""
    kept = (replica for replica in replicas if within is None or within.allows(replica))
    return Subset(frozenset(), frozenset((canonical(replica.host), replica.port) for replica in kept))


def parse_subset(value: object) -> Subset:
    """The subset that a metadata value states.

    Args:
        value: A list of strings or one string; each string holds addresses separated by commas: `ip`, `ip:port`, `[ipv6]`,
            `[ipv6]:port`. Entries of any other type or form allow nothing.
    """
    texts = cast("list[object]", value) if isinstance(value, list) else [value]
    hosts: set[str] = set()
    endpoints: set[tuple[str, int]] = set()
    for text in texts:
        for item in text.split(",") if isinstance(text, str) else ():
            host, port = _split(item.strip())
            if host and port is None:
                hosts.add(host)
            elif host and port is not None:
                endpoints.add((host, port))
    return Subset(frozenset(hosts), frozenset(endpoints))


def _split(item: str) -> tuple[str, int | None]:
    """(address, port or None for any); an empty address where `item` is none."""
    if item.startswith("["):
        host, closed, rest = item[1:].partition("]")
        separator, port = rest[:1], rest[1:]
        if not closed:
            return "", None
    elif item.count(":") == 1:
        host, separator, port = item.partition(":")
    else:  # a bare address, IPv6 without brackets included
        host, separator, port = item, "", ""
    if not separator:
        return canonical(host), None
    if separator != ":" or not (port.isascii() and port.isdigit() and len(port) <= 5):
        return "", None
    return canonical(host), int(port)


def canonical(text: str) -> str:
    """The canonical spelling of an IP address; empty where `text` is none."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""


def spelled(endpoint: str) -> str:
    """Return an `ip:port` in its canonical spelling, with IPv6 in brackets. Other strings are returned unchanged."""
    host, port = _split(endpoint)
    if not host or port is None:
        return endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
