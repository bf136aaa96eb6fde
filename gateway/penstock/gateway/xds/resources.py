"""Everything Envoy is told about a fleet, as a pure function of it."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from google.protobuf.any_pb2 import Any

from penstock.api.fleet import Fleet, Replica
from penstock.gateway._pb.envoy.config.cluster.v3.cluster_pb2 import Cluster
from penstock.gateway._pb.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from penstock.gateway._pb.envoy.config.listener.v3.listener_pb2 import Listener
from penstock.gateway._pb.envoy.config.route.v3.route_pb2 import RouteConfiguration
from penstock.gateway.xds.anys import pack, type_url
from penstock.gateway.xds.clusters import cluster, load_assignment
from penstock.gateway.xds.listener import LISTENER_NAME, ListenerSettings, listener
from penstock.gateway.xds.routes import ROUTE_NAME, route_configuration

CLUSTERS = type_url(Cluster)
ENDPOINTS = type_url(ClusterLoadAssignment)
LISTENERS = type_url(Listener)
ROUTES = type_url(RouteConfiguration)

ORDER = (CLUSTERS, ENDPOINTS, LISTENERS, ROUTES)
"""Make before break: nothing is named before it exists."""
WILDCARD = frozenset({CLUSTERS, LISTENERS})
"""The types of which Envoy wants all that there are."""


@dataclass(frozen=True)
class Snapshot:
    """All resources of one moment: type URL → name → resource."""

    resources: Mapping[str, Mapping[str, Any]]

    def select(self, kind: str, names: Iterable[str] | None) -> dict[str, Any]:
        """The named resources of a type that exist (None: all), by name."""
        have = self.resources[kind]
        wanted = have if names is None else set(names)
        return {name: have[name] for name in sorted(wanted) if name in have}


def version_of(resources: Mapping[str, Any]) -> str:
    """A hash of the content: the same from every gateway process, before and after a restart."""
    digest = hashlib.sha256()
    for name, resource in sorted(resources.items()):
        for part in (name.encode(), resource.value):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()[:16]


def snapshot(fleet: Fleet, settings: ListenerSettings) -> Snapshot:
    """What Envoy has to know to serve `fleet`."""
    members: dict[str, list[Replica]] = defaultdict(list)
    for replica in fleet.replicas:
        members[replica.pool].append(replica)
    return Snapshot(
        {
            CLUSTERS: {pool.id: pack(cluster(pool)) for pool in fleet.pools},
            ENDPOINTS: {pool.id: pack(load_assignment(pool, members[pool.id])) for pool in fleet.pools},
            LISTENERS: {LISTENER_NAME: pack(listener(settings))},
            ROUTES: {ROUTE_NAME: pack(route_configuration(fleet.models))},
        }
    )
