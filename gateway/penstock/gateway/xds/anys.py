"""`google.protobuf.Any` for the generated package, whose protobuf packages have a private prefix that must not reach Envoy."""

from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message

_PRIVATE = "penstock_pb."


def type_url(kind: type[Message] | Message) -> str:
    """The public type URL, such as `type.googleapis.com/envoy.config.listener.v3.Listener`."""
    return f"type.googleapis.com/{kind.DESCRIPTOR.full_name.removeprefix(_PRIVATE)}"


def pack(message: Message) -> Any:
    """The message with its public type URL; equal messages give equal bytes (maps sorted), so a hash can be a version."""
    return Any(type_url=type_url(message), value=message.SerializeToString(deterministic=True))
