"""All xDS resources of a fleet, as a pure function of it."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message

from penstock.api.fleet import Fleet, Pool, Replica
from penstock.gateway._pb.envoy.config.cluster.v3.cluster_pb2 import Cluster
from penstock.gateway._pb.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from penstock.gateway._pb.envoy.config.listener.v3.listener_pb2 import Listener
from penstock.gateway._pb.envoy.config.route.v3.route_pb2 import RouteConfiguration
from penstock.gateway._pb.envoy.extensions.transport_sockets.tls.v3.secret_pb2 import Secret
from penstock.gateway.xds.anys import pack, type_url
from penstock.gateway.xds.clusters import cluster, load_assignment
from penstock.gateway.xds.listener import LISTENER_NAME, ListenerSettings, certificate, listener
from penstock.gateway.xds.replica_tls import secrets
from penstock.gateway.xds.routes import ROUTE_NAME, route_configuration
from penstock.gateway.xds.tracing import CLUSTER as COLLECTOR
from penstock.gateway.xds.tracing import collector_cluster
from penstock.http.replica_tls import ReplicaTls

CLUSTERS = type_url(Cluster)
ENDPOINTS = type_url(ClusterLoadAssignment)
LISTENERS = type_url(Listener)
ROUTES = type_url(RouteConfiguration)

SECRETS = type_url(Secret)

ORDER = (CLUSTERS, ENDPOINTS, SECRETS, LISTENERS, ROUTES)
"""Make before break: nothing is named before it exists."""
WILDCARD = frozenset({CLUSTERS, LISTENERS})
"""Types of which Envoy subscribes to all resources."""


class Resource(NamedTuple):
    """One resource. Its version is a hash of its content: the same from every gateway process, before and after a restart."""

    body: Any
    version: str


@dataclass(frozen=True)
class Snapshot:
    """All resources of one moment: type URL → name → resource."""

    resources: Mapping[str, Mapping[str, Resource]]


def version_of(versions: Mapping[str, str]) -> str:
    """The version of a set of resources (name → version), whatever their order."""
    digest = hashlib.sha256("\0".join(f"{name}\0{version}" for name, version in sorted(versions.items())).encode())
    return digest.hexdigest()[:16]


class SnapshotBuilder:
    """Builds snapshots. Rebuilds only the resources whose source has changed."""

    def __init__(self, settings: ListenerSettings, replica_tls: ReplicaTls | None = None) -> None:
        self._settings = settings
        self._replica_tls = replica_tls
        self._secrets = [] if settings.tls is None else [certificate(settings.tls)]
        self._secrets += [] if replica_tls is None else secrets(replica_tls)
        self._made: dict[tuple[str, str], tuple[object, Resource]] = {}

    def snapshot(self, fleet: Fleet) -> Snapshot:
        """What Envoy has to know to serve `fleet`."""
        members: dict[str, list[Replica]] = defaultdict(list)
        for replica in sorted(fleet.replicas, key=lambda replica: (replica.host, replica.port)):
            members[replica.pool].append(replica)
        pools = [pool for pool in fleet.pools if not pool.open]
        before, self._made = self._made, {}

        def resource(kind: str, name: str, source: object, make: Callable[[], Message]) -> Resource:
            known = before.get((kind, name))
            made = known if known is not None and known[0] == source else (source, _resource(make()))
            self._made[kind, name] = made
            return made[1]

        clusters = {
            pool.id: resource(CLUSTERS, pool.id, pool, lambda pool=pool: cluster(pool, self._replica_tls)) for pool in pools
        }
        if (traces := self._settings.traces) is not None:
            clusters[COLLECTOR] = resource(CLUSTERS, COLLECTOR, traces, lambda: collector_cluster(traces))
        endpoints = {
            pool.id: resource(ENDPOINTS, pool.id, its, lambda pool=pool, its=its: load_assignment(pool, its))
            for pool in pools
            for its in [members[pool.id]]
        }
        hold_s = max((model.hold_timeout_s for model in fleet.models), default=0.0)
        open_to = _only(pools) if self._settings.fail_open else None
        route = resource(
            ROUTES,
            ROUTE_NAME,
            (hold_s, open_to),
            lambda: route_configuration(hold_s, open_to=open_to),
        )
        its_listener = resource(LISTENERS, LISTENER_NAME, self._settings, lambda: listener(self._settings))
        files = {secret.name: resource(SECRETS, secret.name, None, lambda secret=secret: secret) for secret in self._secrets}
        return Snapshot(
            {
                SECRETS: files,
                CLUSTERS: clusters,
                ENDPOINTS: endpoints,
                LISTENERS: {LISTENER_NAME: its_listener},
                ROUTES: {ROUTE_NAME: route},
            }
        )


def _only(pools: Sequence[Pool]) -> str | None:
    """Return the pool of requests that bypass the picker: the first pool of the only model. None if there are more models, since
    Envoy does not know which one a request means."""
    serving = [pool for pool in pools if pool.role != "Prefill"]
    return serving[0].id if len({pool.model for pool in serving}) == 1 else None


def _resource(message: Message) -> Resource:
    body = pack(message)
    return Resource(body, hashlib.sha256(body.value).hexdigest()[:16])
