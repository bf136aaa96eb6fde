"""The names of the endpoint-picker protocol, from proposal 004.

They are not `penstock.api.headers`: a mistake there must fail checks, and the suite is used without it.
"""

from typing import Final

DESTINATION: Final = "x-gateway-destination-endpoint"
"""Request header and `envoy.lb` metadata key: `ip:port`, or an ordered list of them."""
DESTINATION_SERVED: Final = "x-gateway-destination-endpoint-served"
"""`envoy.lb` metadata key in the response phase: the `ip:port` that really answered."""
SUBSET: Final = "x-gateway-destination-endpoint-subset"
"""Key under `envoy.lb.subset_hint`: the endpoints that the gateway allows."""
METADATA_NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
