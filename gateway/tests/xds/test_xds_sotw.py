"""The state-of-the-world protocol, message by message."""

import pytest

from penstock.api.fleet import Fleet, Pool, Replica
from penstock.gateway._pb.envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse
from penstock.gateway.xds.listener import ListenerSettings
from penstock.gateway.xds.resources import CLUSTERS, ENDPOINTS, LISTENERS, ROUTES, Snapshot, SnapshotBuilder
from penstock.gateway.xds.sotw import SotwStream

SETTINGS = ListenerSettings(host="0.0.0.0", port=8080)


def world(pools: int = 1, replicas: int = 1) -> Snapshot:
    ids = [f"d/m/{n}" for n in range(pools)]
    members = [
        Replica(uid=f"{n}", name=f"{n}", pool=ids[0], host=f"10.0.0.{n}", port=1, events_port=2, replay_port=3, ready=True)
        for n in range(replicas)
    ]
    return SnapshotBuilder(SETTINGS).snapshot(Fleet(pools=[Pool(id=name, model="d/m") for name in ids], replicas=members))


def ask(kind: str, *names: str, after: DiscoveryResponse | None = None, refuse: str = "", version: str = "") -> DiscoveryRequest:
    request = DiscoveryRequest(type_url=kind, resource_names=names, version_info=version)
    if after is not None:
        request.version_info, request.response_nonce = after.version_info, after.nonce
    if refuse:
        request.error_detail.message = refuse
    return request


def names(response: DiscoveryResponse) -> int:
    return len(response.resources)


def subscribed(stream: SotwStream, snap: Snapshot) -> dict[str, DiscoveryResponse]:
    """A stream that has everything and has acknowledged it."""
    answers = {}
    for kind, wanted in ((CLUSTERS, ()), (ENDPOINTS, ("d/m/0",)), (LISTENERS, ()), (ROUTES, ("penstock",))):
        (answers[kind],), _ = stream.on_request(ask(kind, *wanted), snap)
        assert stream.on_request(ask(kind, *wanted, after=answers[kind]), snap) == ([], False)
    return answers


def test_nothing_before_the_first_fleet_and_everything_asked_for_after() -> None:
    stream = SotwStream()
    assert stream.on_request(ask(CLUSTERS), None) == ([], False)
    assert stream.on_request(ask(LISTENERS), None) == ([], False)
    assert [it.type_url for it in stream.on_snapshot(world())] == [CLUSTERS, LISTENERS]


def test_an_empty_fleet_is_an_answer() -> None:
    (answer,), _ = SotwStream().on_request(ask(CLUSTERS), world(pools=0, replicas=0))
    assert names(answer) == 0 and answer.version_info


def test_only_what_changed_is_sent_and_in_an_order_that_makes_before_it_breaks() -> None:
    stream = SotwStream()
    subscribed(stream, world())
    assert list(stream.on_snapshot(world())) == []
    assert [it.type_url for it in stream.on_snapshot(world(replicas=2))] == [ENDPOINTS]
    (clusters,) = stream.on_snapshot(world(pools=2, replicas=2))
    assert (clusters.type_url, names(clusters)) == (CLUSTERS, 2), "all of them, as the protocol has it"


def changed_cluster(snap: Snapshot, name: str) -> Snapshot:
    """The same snapshot after a change to one cluster, as by another CA for its replicas."""
    clusters = dict(snap.resources[CLUSTERS])
    clusters[name] = clusters[name]._replace(version="changed")
    return Snapshot({**snap.resources, CLUSTERS: clusters})


def test_a_changed_cluster_gets_its_endpoints_again() -> None:
    """Envoy warms a changed cluster, and uses it only once its endpoints have come."""
    stream, snap, both = SotwStream(), world(pools=2), ("d/m/0", "d/m/1")
    ((clusters,), _), ((endpoints,), _) = stream.on_request(ask(CLUSTERS), snap), stream.on_request(ask(ENDPOINTS, *both), snap)
    stream.on_request(ask(CLUSTERS, after=clusters), snap)
    stream.on_request(ask(ENDPOINTS, *both, after=endpoints), snap)
    changed = changed_cluster(snap, "d/m/1")
    clusters, endpoints = stream.on_snapshot(changed)
    assert (clusters.type_url, endpoints.type_url) == (CLUSTERS, ENDPOINTS)
    assert list(endpoints.resources) == [changed.resources[ENDPOINTS]["d/m/1"].body]
    assert list(stream.on_snapshot(changed)) == []


def test_of_many_pools_only_the_endpoints_that_changed_are_sent() -> None:
    stream, many = SotwStream(), tuple(f"d/m/{n}" for n in range(50))
    ((first,), _) = stream.on_request(ask(ENDPOINTS, *many), world(pools=50))
    assert names(first) == 50
    (second,) = stream.on_snapshot(world(pools=50, replicas=2))
    assert names(second) == 1
    # The version is that of all of them: after a reconnection it says everything.
    again = SotwStream()
    assert again.on_request(ask(ENDPOINTS, *many, version=second.version_info), world(pools=50, replicas=2)) == ([], False)


def test_more_names_get_more_endpoints() -> None:
    stream = SotwStream()
    answers = subscribed(stream, world(pools=2))
    (answer,), _ = stream.on_request(ask(ENDPOINTS, "d/m/0", "d/m/1", after=answers[ENDPOINTS]), world(pools=2))
    assert names(answer) == 1, "the other it has"


def test_a_refused_version_is_counted_logged_and_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    stream = SotwStream()
    answers = subscribed(stream, world())
    (changed,) = stream.on_snapshot(world(replicas=2))
    refusal = ask(ENDPOINTS, "d/m/0", after=answers[ENDPOINTS], refuse="no such port")
    refusal.response_nonce = changed.nonce
    assert stream.on_request(refusal, world(replicas=2)) == ([], True)
    assert "no such port" in caplog.text
    assert list(stream.on_snapshot(world(replicas=2))) == []
    assert [it.type_url for it in stream.on_snapshot(world(replicas=3))] == [ENDPOINTS]


def test_word_about_an_earlier_response_is_ignored() -> None:
    stream = SotwStream()
    answers = subscribed(stream, world())
    list(stream.on_snapshot(world(replicas=2)))
    assert stream.on_request(ask(ENDPOINTS, after=answers[ENDPOINTS]), world(replicas=2)) == ([], False)
    assert list(stream.on_snapshot(world(replicas=2))) == [], "the names are still those of before"


def test_after_a_reconnection_only_news_is_sent() -> None:
    before = subscribed(SotwStream(), world())
    stream = SotwStream()
    assert stream.on_request(ask(CLUSTERS, version=before[CLUSTERS].version_info), world()) == ([], False)
    (news,), _ = stream.on_request(ask(ENDPOINTS, "d/m/0", version=before[ENDPOINTS].version_info), world(replicas=2))
    assert names(news) == 1


def test_an_unknown_type_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert SotwStream().on_request(ask("type.googleapis.com/x.Y"), world()) == ([], False)
    assert "type.googleapis.com/x.Y" in caplog.text


def test_settled_means_that_every_endpoint_was_answered() -> None:
    stream, snap = SotwStream(), world(pools=2)
    assert not stream.subscriptions.settled(snap), "it has not even asked"
    (clusters,), _ = stream.on_request(ask(CLUSTERS), snap)
    stream.on_request(ask(CLUSTERS, after=clusters), snap)
    (endpoints,), _ = stream.on_request(ask(ENDPOINTS, "d/m/0"), snap)
    stream.on_request(ask(ENDPOINTS, "d/m/0", after=endpoints), snap)
    assert not stream.subscriptions.settled(snap), "the endpoints of the second pool are not even asked for"
    (endpoints,), _ = stream.on_request(ask(ENDPOINTS, "d/m/0", "d/m/1", after=endpoints), snap)
    assert not stream.subscriptions.settled(snap), "sent, not yet taken"
    stream.on_request(ask(ENDPOINTS, "d/m/0", "d/m/1", after=endpoints), snap)
    assert stream.subscriptions.settled(snap)
    grown = world(pools=2, replicas=2)
    assert not stream.subscriptions.settled(grown)
    (endpoints,) = stream.on_snapshot(grown)
    stream.on_request(ask(ENDPOINTS, "d/m/0", "d/m/1", after=endpoints, refuse="no"), grown)
    assert stream.subscriptions.settled(grown), "a refusal is an answer"


def test_without_clusters_no_endpoints_are_waited_for() -> None:
    stream, snap = SotwStream(), world(pools=0, replicas=0)
    (clusters,), _ = stream.on_request(ask(CLUSTERS), snap)
    stream.on_request(ask(CLUSTERS, after=clusters), snap)
    assert stream.subscriptions.settled(snap)
