"""Every HTTP header and Envoy metadata key that Penstock reads or writes, named once (lower case, as HTTP/2 sends them)."""

from typing import Final

# --- the endpoint-picker protocol (Gateway API Inference Extension, proposal 004) ---
DESTINATION: Final = "x-gateway-destination-endpoint"
"""Request header and `envoy.lb` metadata key: `ip:port`, or an ordered list `ip:port,ip:port` tried in turn."""
DESTINATION_SERVED: Final = "x-gateway-destination-endpoint-served"
"""`envoy.lb` metadata key in the response phase: the `ip:port` that really answered."""
PREFILLER: Final = "x-prefiller-host-port"
"""Request header, by the name that llm-d's engines read: the `ip:port` of the replica that computes the prompt for the one that
answers."""
SUBSET: Final = "x-gateway-destination-endpoint-subset"
"""Key under `envoy.lb.subset_hint`: the endpoints that the gateway allows."""
DESTINATION_FALLBACK: Final = "x-gateway-destination-endpoint-fallback"
"""Obsolete: the list of destinations says it. Removed from what clients send."""
METADATA_NAMESPACE: Final = "envoy.lb"
LOG_NAMESPACE: Final = "penstock"
"""Envoy metadata of the picker's, for the access log and the response."""
BOOKING: Final = "booking"
"""Key in that namespace: the name by which Envoy tells the picker of a request's response and end."""
NAME: Final = "name"
"""Key in that namespace: what answers, as the response header `MODEL` says it."""
REASONS: Final = "reasons"
"""Key in that namespace: why, where the client has asked, as the response header `DECISION` says it."""
UID: Final = "uid"
"""Key in that namespace, of the metadata of Envoy's endpoints: the UID of the replica there."""
PHASE: Final = "x-penstock-phase"
"""gRPC metadata on an exchange with the picker: `REQUEST_PHASE` where another exchange has the response."""
REQUEST_PHASE: Final = "request"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"

# --- Penstock's own ---
POOL: Final = "x-penstock-pool"
"""Set by the picker, read by Envoy's `cluster_header` route; removed from what clients send."""
REPLICA: Final = "x-penstock-replica"
"""Response header: the UID of the replica that answered."""
MODEL: Final = "x-penstock-model"
"""Response header: what answered, by its served name: the model, the canary that took its place, or the adapter."""
DECISION: Final = "x-penstock-decision"
"""Request header `x-penstock-decision: explain` asks for a response header of the same name that says why this replica was
chosen."""
TIMELINE: Final = "x-penstock-timeline"
"""Request header `x-penstock-timeline: true`: the answer has a `timeline`, of every turn in the request's life."""
RETRIABLE: Final = "x-penstock-retriable"
"""On an engine's 503: nothing was done for this request, so another replica may be tried (Envoy's `retriable_headers`)."""
REASON: Final = "x-penstock-reason"
"""On an error that the gateway made: a word for machines, such as `no_ready_replica`."""
REQUEST_ID: Final = "x-request-id"
TENANT: Final = "x-penstock-tenant"
"""Set by the gateway from the client's credentials; removed from what clients send."""
PRIORITY: Final = "x-penstock-priority"
"""Set by the gateway where it knows tenants: what the request goes by, in place of the body's `priority`; smaller goes first.
Removed from what clients send."""
API_KEYS: Final = ("x-api-key", "api-key")
"""Request headers that may carry a client's key, besides `authorization`; the gateway removes them."""
TIMEOUT: Final = "x-penstock-timeout-ms"
"""Request header: milliseconds after its arrival at the engine at which the client gives up. A request that has not run by then
ends with a retriable 503, one that runs with 504."""

DATA_PARALLEL_RANK: Final = "x-data-parallel-rank"
"""Request header, by vLLM's name: which of a replica's data-parallel ranks is to run the request. The answer has the rank that
has run it. The load report beside it is that rank's own where the request named it, and else that of all ranks together. The
picker sets it; it is removed from what clients send."""

# --- ORCA load reports ---
LOAD_FORMAT: Final = "endpoint-load-metrics-format"
"""Request header that asks for a load report on the response: `TEXT`, `JSON` or `BIN`."""
LOAD: Final = "endpoint-load-metrics"
"""Response header with the report; the picker strips it before the client."""
LOAD_BIN: Final = "endpoint-load-metrics-bin"
"""The same as bare base64 of the protobuf message, as gRPC's servers have it. Where both came, Envoy reads this one."""
LOADS: Final = (LOAD, LOAD_BIN)

# --- other pickers' ---
PEER_HEADERS: Final = (
    PREFILLER,
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-kv-cache-source-host-port",
)
"""llm-d's sidecars connect to whatever these name."""

CONTROL_HEADERS: Final = (
    *(DESTINATION, POOL, TENANT, PRIORITY, LOAD_FORMAT, DATA_PARALLEL_RANK),
    *(DESTINATION_SERVED, DESTINATION_FALLBACK, SUBSET),
    *PEER_HEADERS,
)
"""What a client must never decide: removed from every request that enters the gateway."""
