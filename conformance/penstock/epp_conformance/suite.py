"""All checks, in the order in which they are made and listed."""

from penstock.epp_conformance.check import Group
from penstock.epp_conformance.checks import buffered, duplex, envoy, health, pick, refusals, response, streams, subset

GROUPS: tuple[Group, ...] = (
    *(duplex.GROUP, buffered.GROUP, pick.GROUP, subset.GROUP, refusals.GROUP),
    *(response.GROUP, streams.GROUP, health.GROUP, envoy.GROUP),
)
