"""Every HTTP header and Envoy metadata key that Penstock reads or writes, named once (lower case, as HTTP/2 sends them)."""

from typing import Final

# --- the endpoint-picker protocol (Gateway API Inference Extension, proposal 004) ---
DESTINATION: Final = "x-gateway-destination-endpoint"
"""Request header and `envoy.lb` metadata key: `ip:port`, or an ordered list `ip:port,ip:port` tried in turn."""
DESTINATION_SERVED: Final = "x-gateway-destination-endpoint-served"
"""`envoy.lb` metadata key in the response phase: the `ip:port` that really answered."""
SUBSET: Final = "x-gateway-destination-endpoint-subset"
"""Key under `envoy.lb.subset_hint`: the endpoints that the gateway allows."""
METADATA_NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"

# --- Penstock's own ---
POOL: Final = "x-penstock-pool"
"""Set by the picker, read by Envoy's `cluster_header` route; removed from what clients send."""
REPLICA: Final = "x-penstock-replica"
"""Response header: the UID of the replica that answered (set by the picker in the response phase)."""
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
TIMEOUT: Final = "x-penstock-timeout-ms"
"""Request header: milliseconds after its arrival at the engine at which the client gives up. A request that has not run by then
ends with a retriable 503, one that runs with 504."""

# --- ORCA load reports ---
LOAD_FORMAT: Final = "endpoint-load-metrics-format"
"""Request header that asks for a load report on the response: `TEXT`, `JSON` or `BIN`."""
LOAD: Final = "endpoint-load-metrics"
"""Response header with the report; the picker strips it before the client."""

CONTROL_HEADERS: Final = (DESTINATION, POOL, TENANT, LOAD_FORMAT, DESTINATION_SERVED, SUBSET)
"""What a client must never decide: removed from every request that enters the gateway."""
