"""The address of a replica as a person writes it: `10.0.0.1:8000`, `[fd00::1]:8000`, `10.0.0.1:8000=vllm`."""

from ipaddress import ip_address
from typing import NamedTuple, cast, get_args

from penstock.api.fleet import Engine

ENGINES: tuple[Engine, ...] = get_args(Engine)


class Address(NamedTuple):
    """A replica's address, and its engine."""

    host: str
    port: int
    engine: Engine = "auto"

    @property
    def text(self) -> str:
        """`host:port`, IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address_of(text: str) -> Address:
    """Reads `IP:PORT[=ENGINE]`; raises ValueError that says what is wrong."""
    endpoint, equals, engine = text.partition("=")
    host, _, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ValueError(f"{text!r} is not IP:PORT or IP:PORT=ENGINE")
    try:
        ip_address(host)
    except ValueError:  # Envoy takes no names here
        raise ValueError(f"{text!r}: {host!r} is not an IP address") from None
    if not equals:
        return Address(host, int(port))
    if engine not in ENGINES:
        raise ValueError(f"{text!r}: {engine!r} is not an engine; there are {', '.join(ENGINES)}")
    return Address(host, int(port), cast("Engine", engine))
