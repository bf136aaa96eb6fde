"""`--kv-events-config`, in vLLM's form."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from penstock.engine.config import ConfigError
from penstock.plain_errors import explained
from penstock.suggest import suggestion

_FLAG: Final = "--kv-events-config"
_Count = Annotated[int, Meta(ge=1)]


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the core publishes KV events as vLLM does, besides its own stream."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    """With `*` or `::`, and on ipc and inproc, the core listens there; else it connects there, to a reader that listens."""
    replay_endpoint: str | None = None
    """Where it answers requests for what is buffered; None: nowhere."""
    buffer_steps: _Count = 10_000
    """Batches that a replay reaches back."""
    hwm: _Count = 100_000
    """Messages that wait for a slow reader at most."""
    topic: str = ""
    """First frame of each message. Readers of llm-d's expect `kv@IP:PORT@MODEL`."""

    def of_rank(self, rank: int) -> "KVEventsConfig":
        """That of a data-parallel rank: where it listens by TCP, the port is higher by its number."""
        endpoint = _offset(self.endpoint, rank) if listens(self.endpoint) else self.endpoint
        replay = None if self.replay_endpoint is None else _offset(self.replay_endpoint, rank)
        return msgspec.structs.replace(self, endpoint=endpoint, replay_endpoint=replay)


def kv_events_config(keys: dict[str, Any] | None) -> KVEventsConfig | None:
    """What the keys say, None where nothing is to be published; `ConfigError` names the one that is wrong."""
    if keys is None:
        return None
    for name in keys:
        if name not in KVEventsConfig.__struct_fields__:
            raise ConfigError(f"{_FLAG}: there is no key {name!r}{suggestion(name, KVEventsConfig.__struct_fields__)}")
    try:
        config = msgspec.convert(keys, KVEventsConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_FLAG}: {explained(error, KVEventsConfig)}") from None
    return config if config.enable_kv_cache_events and config.publisher == "zmq" else None


def listens(endpoint: str) -> bool:
    """Whether a publisher is reached at this endpoint, and does not go there itself: vLLM's rule."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _offset(endpoint: str, rank: int) -> str:
    address, colon, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://"):
        return endpoint if not rank else f"{endpoint}_dp{rank}"
    if not port.isdecimal():
        raise ConfigError(f"{_FLAG}: {endpoint!r} has no port")
    return f"{address}{colon}{int(port) + rank}"
