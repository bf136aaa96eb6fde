"""Resources as a pure function of the fleet."""

import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.fleet import Fleet, Model, Pool, Replica, open_id
from penstock.gateway._pb.envoy.config.core.v3.health_check_pb2 import HealthStatus
from penstock.gateway._pb.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from penstock.gateway._pb.envoy.config.route.v3.route_pb2 import RouteConfiguration
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.ext_proc_pb2 import ExternalProcessor
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.gateway.extproc.call import READ
from penstock.gateway.xds.asking import REQUEST_FILTER, RESPONSE_FILTER, filters, turned_on
from penstock.gateway.xds.clusters import cluster, load_assignment
from penstock.gateway.xds.listener import ListenerSettings
from penstock.gateway.xds.resources import CLUSTERS, ENDPOINTS, LISTENERS, ROUTES, SnapshotBuilder, version_of
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
    resources = SnapshotBuilder(SETTINGS).snapshot(fleet).resources
    assert set(resources[CLUSTERS]) == set(resources[ENDPOINTS]) == {POOL.id, other.id}
    addresses = {}
    for name, packed in resources[ENDPOINTS].items():
        group = ClusterLoadAssignment.FromString(packed.body.value).endpoints[0]
        addresses[name] = [it.endpoint.address.socket_address.address for it in group.lb_endpoints]
    assert addresses == {POOL.id: ["10.0.0.1", "10.0.0.2"], other.id: []}
    assert (len(resources[LISTENERS]), len(resources[ROUTES])) == (1, 1)


def test_pools_without_an_inference_model_are_not_for_our_own_envoy() -> None:
    strange = open_id("d", "vllm")
    fleet = Fleet(
        models=[Model(id="d/m", served_names=["m"]), Model(id=strange, served_names=[])],
        pools=[POOL, Pool(id=strange, model=strange), Pool(id=f"{strange}/Prefill", model=strange, role="Prefill")],
        replicas=[replica("10.0.0.1"), replica("10.0.0.2", strange)],
    )
    resources = SnapshotBuilder(SETTINGS).snapshot(fleet).resources
    assert set(resources[CLUSTERS]) == set(resources[ENDPOINTS]) == {POOL.id}


def test_what_must_not_be_picked_stays_a_member_but_is_kept_from_the_fallback() -> None:
    replicas = [replica("1"), replica("2", ready=False), replica("3", terminating=True), replica("4", cordoned=True)]
    healths = [it.health_status for it in load_assignment(POOL, replicas).endpoints[0].lb_endpoints]
    assert healths == [HealthStatus.HEALTHY, HealthStatus.UNHEALTHY, HealthStatus.DRAINING, HealthStatus.DRAINING]


def test_the_ranks_of_a_process_are_one_endpoint() -> None:
    ranks = [msgspec.structs.replace(replica(host), rank=rank) for host in ("1", "2") for rank in range(2)]
    made = load_assignment(POOL, ranks).endpoints[0].lb_endpoints
    assert [it.endpoint.address.socket_address.address for it in made] == ["1", "2"]


def test_a_vanished_node_is_noticed_whether_or_not_something_was_sent() -> None:
    made = cluster(POOL)
    keepalive = made.upstream_connection_options.tcp_keepalive
    silent_s = keepalive.keepalive_time.value + keepalive.keepalive_interval.value * keepalive.keepalive_probes.value
    assert 0 < silent_s <= 60
    (option,) = made.upstream_bind_config.socket_options  # keepalive probes nothing while something sent is unacknowledged
    assert (option.level, option.name) == (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert 0 < option.int_value <= 30_000


def test_a_long_hold_is_not_cut_by_the_idle_timeout() -> None:
    def idle_s(config: RouteConfiguration) -> float:
        return config.virtual_hosts[0].routes[0].route.idle_timeout.ToTimedelta().total_seconds()

    assert idle_s(route_configuration(0)) == 3600
    builder = SnapshotBuilder(SETTINGS)
    models = [Model(id=f"d/{hold}", served_names=[], hold_timeout_s=hold) for hold in (10, 7200)]
    (route,) = builder.snapshot(Fleet(models=models)).resources[ROUTES].values()
    assert idle_s(RouteConfiguration.FromString(route.body.value)) == 7260


def test_only_what_fails_open_is_buffered_and_then_for_as_long_as_it_may_be_held() -> None:
    def picker(fail_open: bool) -> ExternalProcessor:
        its = next(it for it in filters(fail_open) if it.name == REQUEST_FILTER)
        return ExternalProcessor.FromString(its.typed_config.value)

    for fail_open, mode, timeout_s in ((False, ProcessingMode.FULL_DUPLEX_STREAMED, 10), (True, ProcessingMode.BUFFERED, 3600)):
        assert picker(fail_open).processing_mode.request_body_mode == mode
        assert picker(fail_open).message_timeout.ToTimedelta().total_seconds() == timeout_s
        assert picker(fail_open).failure_mode_allow == fail_open


@pytest.mark.parametrize("fail_open", [False, True])
def test_no_answer_waits_for_the_picker_or_fails_with_it(fail_open: bool) -> None:
    its = {it.name: it.typed_config.value for it in filters(fail_open)}
    request, response = (ExternalProcessor.FromString(its[name]) for name in (REQUEST_FILTER, RESPONSE_FILTER))
    assert request.processing_mode.response_header_mode == ProcessingMode.SKIP
    assert response.processing_mode.response_header_mode == ProcessingMode.SEND
    assert response.observability_mode and response.failure_mode_allow
    assert set(turned_on()) == {REQUEST_FILTER, RESPONSE_FILTER}
    for asked in (request, response):
        assert {it.exact for it in asked.forward_rules.allowed_headers.patterns} == READ


def test_where_open_requests_go_is_known_of_a_single_model_alone() -> None:
    def opens(models: int, fail_open: bool) -> set[str]:
        settings = ListenerSettings(host="0.0.0.0", port=8080, fail_open=fail_open)
        pools = [Pool(id=f"d/{n}/{role}", model=f"d/{n}", role=role) for n in range(models) for role in ("Prefill", "Decode")]
        route = SnapshotBuilder(settings).snapshot(Fleet(pools=pools)).resources[ROUTES]["penstock"]
        config = RouteConfiguration.FromString(route.body.value)
        return {it.route.cluster for it in config.virtual_hosts[0].routes if it.route.cluster}

    assert opens(1, True) == {"d/0/Decode"}
    assert opens(0, True) == opens(2, True) == opens(1, False) == set()


@given(st.permutations([replica(f"10.0.0.{n}") for n in range(5)]))
def test_a_version_is_the_contents_and_not_its_order(replicas: list[Replica]) -> None:
    def version(members: list[Replica]) -> str:
        return SnapshotBuilder(SETTINGS).snapshot(Fleet(pools=[POOL], replicas=members)).resources[ENDPOINTS][POOL.id].version

    assert version(replicas) == version(sorted(replicas, key=lambda it: it.uid))
    assert version(replicas) != version(replicas[1:])


def test_a_set_of_versions_has_a_version_whatever_its_order() -> None:
    assert version_of({"a": "1", "b": "2"}) == version_of({"b": "2", "a": "1"})
    assert len({version_of(it) for it in ({}, {"a": "1"}, {"a": "2"}, {"a": "1", "b": "2"})}) == 4


def test_only_what_changed_is_made_anew() -> None:
    builder = SnapshotBuilder(SETTINGS)
    pools = [Pool(id=f"d/m/{n}", model="d/m") for n in range(3)]
    before = builder.snapshot(Fleet(pools=pools, replicas=[replica("10.0.0.1", "d/m/0")])).resources
    after = builder.snapshot(Fleet(pools=pools, replicas=[replica("10.0.0.1", "d/m/0", ready=False)])).resources
    changed = {(kind, name) for kind, its in after.items() for name in its if its[name] is not before[kind][name]}
    assert changed == {(ENDPOINTS, "d/m/0")}
    fewer = builder.snapshot(Fleet(pools=pools[1:])).resources
    assert set(fewer[CLUSTERS]) == set(fewer[ENDPOINTS]) == {"d/m/1", "d/m/2"}
