"""All checks, in the order in which they are made and listed."""

from penstock.gateway.conformance.check import Group
from penstock.gateway.conformance.checks import buffered, duplex, envoy, health, own, pick, refusals, response, streams, subset

GROUPS: tuple[Group, ...] = (
    *(duplex.GROUP, buffered.GROUP, pick.GROUP, subset.GROUP, refusals.GROUP),
    *(response.GROUP, streams.GROUP, health.GROUP, envoy.GROUP),
)
OWN: tuple[Group, ...] = (own.GROUP, own.THROUGH_ENVOY)
"""Penstock's extensions, with `--penstock` alone."""
