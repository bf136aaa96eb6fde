"""The part of LMCache's gRPC protocol that a store of pages needs (LMCache 0.5, `multiprocess/transport/grpc_impl/protos`).

The messages are made from their fields at the first use: the engine works without gRPC, and has no generator of code.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

_PACKAGE: Final = "lmcache.mp"
_KEY: Final = "IpcCacheServerKey"
_Field = tuple[str, int, str]
"""Name, number and type, which is a scalar's, that of a message, or `repeated` before it."""
_ONE_KEY: Final[Sequence[_Field]] = (("key", 1, _KEY), ("instance_id", 2, "int64"))

_MESSAGES: Final[Mapping[str, Sequence[_Field]]] = {
    _KEY: (
        ("model_name", 1, "string"),
        ("world_size", 2, "int64"),
        ("worker_id", 3, "optional int64"),
        ("token_ids", 4, "repeated int64"),
        ("start", 5, "int64"),
        ("end", 6, "int64"),
        ("request_id", 7, "string"),
        ("num_kv_readers", 10, "int64"),
    ),
    "RegisterKvCacheEngineDrivenContextRequest": (
        ("instance_id", 1, "int64"),
        ("model_name", 2, "string"),
        ("world_size", 3, "int64"),
        ("block_size", 4, "int64"),
        ("num_layers", 5, "int64"),
        ("hidden_dim_size", 6, "int64"),
        ("dtype_str", 7, "string"),
        ("use_mla", 8, "bool"),
        ("num_physical_slots", 9, "optional int64"),
    ),
    "RegisterKvCacheEngineDrivenContextResponse": (("shm_name", 1, "string"), ("pool_size", 2, "int64")),
    "UnregisterKvCacheEngineDrivenContextRequest": (("instance_id", 1, "int64"),),
    "UnregisterKvCacheEngineDrivenContextResponse": (),
    "PrepareStoreRequest": _ONE_KEY,
    "PrepareStoreResponse": (("encoded_context", 1, "bytes"),),
    "CommitStoreRequest": (*_ONE_KEY, ("data", 3, "bytes")),
    "CommitStoreResponse": (("success", 1, "bool"),),
    "PrepareRetrieveRequest": _ONE_KEY,
    "PrepareRetrieveResponse": (("success", 1, "bool"), ("data", 2, "bytes"), ("encoded_context", 3, "bytes")),
    "CommitRetrieveRequest": _ONE_KEY,
    "CommitRetrieveResponse": (("success", 1, "bool"),),
    "LookupRequest": (("key", 1, _KEY), ("tp_size", 2, "int64")),
    "LookupResponse": (),
    "WaitPrefetchStatusRequest": (("request_id", 1, "string"), ("timeout", 2, "double")),
    "WaitPrefetchStatusResponse": (("chunk_count", 1, "optional int64"),),
    "FreeLookupLocksRequest": (("key", 1, _KEY), ("tp_size", 2, "int64")),
    "FreeLookupLocksResponse": (),
    "EndSessionRequest": (("request_id", 1, "string"),),
    "EndSessionResponse": (),
    "GetChunkSizeRequest": (),
    "GetChunkSizeResponse": (("chunk_size", 1, "int64"),),
    "PingRequest": (("instance_id", 1, "optional int64"),),
    "PingResponse": (("ok", 1, "bool"),),
}
_SERVICES: Final[Mapping[str, Sequence[str]]] = {
    "EngineDrivenService": (
        "RegisterKvCacheEngineDrivenContext",
        "UnregisterKvCacheEngineDrivenContext",
        "PrepareStore",
        "CommitStore",
        "PrepareRetrieve",
        "CommitRetrieve",
    ),
    "LookupService": ("Lookup", "WaitPrefetchStatus", "FreeLookupLocks", "EndSession"),
    "ControllerService": ("GetChunkSize", "Ping"),
}


def message_classes() -> dict[str, Callable[..., Any]]:
    """Return the classes of the messages by name. Raises ImportError where protobuf is not installed."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="penstock_lmcache.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind in fields:
            label, _, scalar = kind.rpartition(" ")
            field = message.field.add(name=field_name, number=number)
            field.label = field.LABEL_REPEATED if label == "repeated" else field.LABEL_OPTIONAL
            if label == "optional":  # in proto3, a choice between one: so absence is told
                field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field_name}")
            if scalar in _MESSAGES:
                field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{scalar}"
            else:
                field.type = getattr(field, f"TYPE_{scalar.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _MESSAGES}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found.items()}


def methods(channel: Any, messages: Mapping[str, Any]) -> dict[str, Any]:
    """Return the methods of a server by name: gRPC's callables for one message each.

    Args:
        channel: gRPC's, to the server.
        messages: What `message_classes` has returned.
    """
    return {
        method: channel.unary_unary(
            f"/{_PACKAGE}.{service}/{method}",
            request_serializer=messages[f"{method}Request"].SerializeToString,
            response_deserializer=messages[f"{method}Response"].FromString,
        )
        for service, names in _SERVICES.items()
        for method in names
    }
