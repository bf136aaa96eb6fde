"""What tenants use, for people: what `/debug/tenants` shows."""

import msgspec

from penstock.gateway.flow.control import FlowControl
from penstock.gateway.tenants.registry import Registry
from penstock.gateway.tenants.tenant import Limits


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant; no keys."""

    name: str
    running: int
    """Requests that wait at the gateway or are at a replica."""
    queued: int
    """Requests of them that wait at the gateway."""
    limits: Limits


def tenants_view(registry: Registry | None, control: FlowControl) -> list[TenantView]:
    """All tenants by name; none where there is no tenants file."""
    queued: dict[str, int] = {}
    for queue in control.queues.values():
        for band in queue.bands.values():
            for name, tickets in band.tenants().items():
                queued[name] = queued.get(name, 0) + len(tickets)
    return [
        TenantView(name=name, running=account.running, queued=queued.get(name, 0), limits=account.limits)
        for name, account in sorted(registry.accounts() if registry is not None else ())
    ]
