"""Resources as a pure function of the fleet."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.gateway._pb.envoy.config.core.v3.health_check_pb2 import HealthStatus
from penstock.gateway._pb.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from penstock.gateway._pb.envoy.config.route.v3.route_pb2 import RouteConfiguration
from penstock.gateway.xds.clusters import load_assignment
from penstock.gateway.xds.listener import ListenerSettings
from penstock.gateway.xds.resources import CLUSTERS, ENDPOINTS, LISTENERS, ROUTES, snapshot, version_of
from penstock.gateway.xds.routes import route_configuration

SETTINGS = ListenerSettings(host="0.0.0.0", port=8080)
POOL = Pool(id="d/m/p", model="d/m")


def replica(name: str, pool: str = POOL.id, *, ready: bool = True, terminating: bool = False, cordoned: bool = False) -> Replica:
    state = {"ready": ready, "terminating": terminating, "cordoned": cordoned}
    return Replica(uid=name, name=name, pool=pool, host=name, port=8000, events_port=1, replay_port=2, **state)


def test_every_pool_is_a_cluster_with_its_replicas_and_no_others() -> None:
    other = Pool(id="d/m/other", model="d/m")
    fleet = Fleet(
        models=[Model(id="d/m", served_names=["m"])], pools=[POOL, other], replicas=[replica("10.0.0.2"), replica("10.0.0.1")]
    )
    resources = snapshot(fleet, SETTINGS).resources
    assert set(resources[CLUSTERS]) == set(resources[ENDPOINTS]) == {POOL.id, other.id}
    addresses = {}
    for name, packed in resources[ENDPOINTS].items():
        group = ClusterLoadAssignment.FromString(packed.value).endpoints[0]
        addresses[name] = [it.endpoint.address.socket_address.address for it in group.lb_endpoints]
    assert addresses == {POOL.id: ["10.0.0.1", "10.0.0.2"], other.id: []}
    assert (len(resources[LISTENERS]), len(resources[ROUTES])) == (1, 1)


def test_what_must_not_be_picked_stays_a_member_but_is_kept_from_the_fallback() -> None:
    replicas = [replica("1"), replica("2", ready=False), replica("3", terminating=True), replica("4", cordoned=True)]
    healths = [it.health_status for it in load_assignment(POOL, replicas).endpoints[0].lb_endpoints]
    assert healths == [HealthStatus.HEALTHY, HealthStatus.UNHEALTHY, HealthStatus.DRAINING, HealthStatus.DRAINING]


def test_a_long_hold_is_not_cut_by_the_idle_timeout() -> None:
    def idle_s(config: RouteConfiguration) -> float:
        return config.virtual_hosts[0].routes[0].route.idle_timeout.ToTimedelta().total_seconds()

    assert idle_s(route_configuration([])) == 3600
    assert idle_s(route_configuration([Model(id="d/m", served_names=["m"], hold_timeout_s=7200)])) == 7260


@given(st.permutations([replica(f"10.0.0.{n}") for n in range(5)]))
def test_a_version_is_the_contents_and_not_its_order(replicas: list[Replica]) -> None:
    fleet = Fleet(pools=[POOL], replicas=replicas)
    sorted_fleet = Fleet(pools=[POOL], replicas=sorted(replicas, key=lambda it: it.uid))
    assert version_of(snapshot(fleet, SETTINGS).resources[ENDPOINTS]) == version_of(
        snapshot(sorted_fleet, SETTINGS).resources[ENDPOINTS]
    )
    fewer = Fleet(pools=[POOL], replicas=replicas[1:])
    assert version_of(snapshot(fleet, SETTINGS).resources[ENDPOINTS]) != version_of(
        snapshot(fewer, SETTINGS).resources[ENDPOINTS]
    )
