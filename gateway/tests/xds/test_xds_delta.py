"""The incremental protocol, message by message, and against a client that keeps what it is told."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api.fleet import Fleet, Pool, Replica
from penstock.gateway._pb.envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryRequest, DeltaDiscoveryResponse
from penstock.gateway.xds.delta import DeltaStream
from penstock.gateway.xds.listener import ListenerSettings
from penstock.gateway.xds.resources import CLUSTERS, ENDPOINTS, LISTENERS, ORDER, ROUTES, Snapshot, SnapshotBuilder

SETTINGS = ListenerSettings(host="0.0.0.0", port=8080)


def world(pools: dict[str, int]) -> Snapshot:
    """Pool id → number of replicas."""
    members = [
        Replica(uid=f"{pool}{n}", name="r", pool=pool, host=f"10.0.0.{n}", port=1, events_port=2, replay_port=3, ready=True)
        for pool, count in pools.items()
        for n in range(count)
    ]
    return SnapshotBuilder(SETTINGS).snapshot(Fleet(pools=[Pool(id=name, model="d/m") for name in pools], replicas=members))


def ask(kind: str, *subscribe: str, drop: tuple[str, ...] = (), have: dict[str, str] | None = None) -> DeltaDiscoveryRequest:
    request = DeltaDiscoveryRequest(
        type_url=kind,
        resource_names_subscribe=subscribe,
        resource_names_unsubscribe=drop,
        initial_resource_versions=have or {},
    )
    request.node.id = "its-node"
    return request


def word_on(response: DeltaDiscoveryResponse, refuse: str = "") -> DeltaDiscoveryRequest:
    request = DeltaDiscoveryRequest(type_url=response.type_url, response_nonce=response.nonce)
    if refuse:
        request.error_detail.message = refuse
    return request


def sent(response: DeltaDiscoveryResponse) -> list[str]:
    return [it.name for it in response.resources]


def versions(response: DeltaDiscoveryResponse) -> dict[str, str]:
    return {it.name: it.version for it in response.resources}


def subscribed(stream: DeltaStream, snap: Snapshot) -> dict[str, DeltaDiscoveryResponse]:
    """A stream that has everything and has acknowledged it."""
    answers = {}
    wanted = {CLUSTERS: (), ENDPOINTS: tuple(snap.resources[CLUSTERS]), LISTENERS: (), ROUTES: ("penstock",)}
    for kind, names in wanted.items():
        (answers[kind],), _ = stream.on_request(ask(kind, *names), snap)
        assert stream.on_request(word_on(answers[kind]), snap) == ([], False)
    return answers


def test_nothing_before_the_first_fleet_and_everything_asked_for_after() -> None:
    stream = DeltaStream()
    assert stream.on_request(ask(CLUSTERS), None) == ([], False)
    assert stream.on_request(ask(LISTENERS), None) == ([], False)
    assert [it.type_url for it in stream.on_snapshot(world({"a": 1}))] == [CLUSTERS, LISTENERS]


def test_an_empty_fleet_is_an_answer_once() -> None:
    stream = DeltaStream()
    (answer,), _ = stream.on_request(ask(CLUSTERS), world({}))
    assert sent(answer) == [] and not answer.removed_resources
    assert stream.on_request(word_on(answer), world({})) == ([], False)
    assert list(stream.on_snapshot(world({}))) == []


def test_one_endpoint_of_many_pools_is_one_resource() -> None:
    pools = {f"pool-{n}": 1 for n in range(100)}
    stream = DeltaStream()
    subscribed(stream, world(pools))
    (response,) = stream.on_snapshot(world(pools | {"pool-7": 2}))
    assert (response.type_url, sent(response), list(response.removed_resources)) == (ENDPOINTS, ["pool-7"], [])


def test_a_changed_cluster_gets_its_endpoints_again() -> None:
    """Envoy warms a changed cluster, and uses it only once its endpoints have come."""
    stream, snap = DeltaStream(), world({"a": 1, "b": 1})
    subscribed(stream, snap)
    clusters = dict(snap.resources[CLUSTERS])
    clusters["b"] = clusters["b"]._replace(version="changed")
    changed = Snapshot({**snap.resources, CLUSTERS: clusters})
    responses = list(stream.on_snapshot(changed))
    assert [(it.type_url, sent(it)) for it in responses] == [(CLUSTERS, ["b"]), (ENDPOINTS, ["b"])]
    assert list(stream.on_snapshot(changed)) == []


def test_what_has_gone_is_removed_and_what_comes_back_is_sent() -> None:
    stream = DeltaStream()
    subscribed(stream, world({"a": 1, "b": 1}))
    responses = list(stream.on_snapshot(world({"a": 1})))
    assert [(it.type_url, sent(it), list(it.removed_resources)) for it in responses] == [
        (CLUSTERS, [], ["b"]),
        (ENDPOINTS, [], ["b"]),
    ]
    stream.on_request(ask(ENDPOINTS, drop=("b",)), world({"a": 1}))
    responses = list(stream.on_snapshot(world({"a": 1, "b": 1})))
    assert [(it.type_url, sent(it)) for it in responses] == [(CLUSTERS, ["b"])], "its endpoints nobody has asked for"


def test_what_is_asked_for_and_does_not_exist_is_said_to_be_gone_and_sent_when_it_exists() -> None:
    stream = DeltaStream()
    (answer,), _ = stream.on_request(ask(ENDPOINTS, "a", "b"), world({"a": 1}))
    assert (sent(answer), list(answer.removed_resources)) == (["a"], ["b"])
    assert list(stream.on_snapshot(world({"a": 1}))) == []
    (answer,) = stream.on_snapshot(world({"a": 1, "b": 1}))
    assert sent(answer) == ["b"]


def test_who_asks_again_is_sent_it_again() -> None:
    stream, snap = DeltaStream(), world({"a": 1, "b": 1})
    subscribed(stream, snap)
    ((answer,), _) = stream.on_request(ask(ENDPOINTS, "a"), snap)
    assert sent(answer) == ["a"]


def test_a_star_is_a_wildcard_and_can_be_taken_back() -> None:
    stream, snap = DeltaStream(), world({"a": 1, "b": 1})
    ((answer,), _) = stream.on_request(ask(ENDPOINTS, "*"), snap)
    assert sent(answer) == ["a", "b"]
    assert stream.on_request(ask(ENDPOINTS, "a", drop=("*",)), snap)[0][0].resources[0].name == "a"
    assert list(stream.on_snapshot(world({"a": 1, "b": 2}))) == []
    ((again,), _) = stream.on_request(ask(ENDPOINTS, "*"), world({"a": 1, "b": 2}))
    assert sent(again) == ["b"]
    ((more,), _) = stream.on_request(ask(ENDPOINTS, drop=("a",)), world({"a": 1, "b": 2}))
    assert sent(more) == ["a"], "still one of all"


def test_after_a_reconnection_only_news_is_sent_and_what_went_meanwhile_is_removed() -> None:
    before = subscribed(DeltaStream(), world({"a": 1, "b": 1, "c": 1}))
    stream, now = DeltaStream(), world({"a": 1, "b": 2, "d": 0})
    ((news,), _) = stream.on_request(ask(CLUSTERS, have=versions(before[CLUSTERS])), now)
    assert (sent(news), list(news.removed_resources)) == (["d"], ["c"])
    ((news,), _) = stream.on_request(ask(ENDPOINTS, "a", "b", "c", have=versions(before[ENDPOINTS])), now)
    assert (sent(news), list(news.removed_resources)) == (["b"], ["c"])
    stream = DeltaStream()
    same = world({"a": 1, "b": 1, "c": 1})
    assert stream.on_request(ask(LISTENERS, have=versions(before[LISTENERS])), same) == ([], False)


def test_a_refusal_names_its_resource_and_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    stream = DeltaStream()
    subscribed(stream, world({"a-1": 1, "b-2": 1}))
    now = world({"a-1": 2, "b-2": 2})
    (response,) = stream.on_snapshot(now)
    assert stream.on_request(word_on(response, refuse="b-2: no such port"), now) == ([], True)
    assert "its-node" in caplog.text and "refuses b-2 of" in caplog.text and "no such port" in caplog.text
    ((_, name), refusal), *others = stream.subscriptions.refusals().items()
    assert (name, refusal.message, refusal.resources, others) == ("b-2", "b-2: no such port", ["b-2"], [])
    assert list(stream.on_snapshot(now)) == []
    (better,) = stream.on_snapshot(world({"a-1": 2, "b-2": 3}))
    assert sent(better) == ["b-2"]
    stream.on_request(word_on(better), world({"a-1": 2, "b-2": 3}))
    assert not stream.subscriptions.refusals()


def test_a_refusal_that_names_nothing_is_of_all_that_was_sent() -> None:
    stream = DeltaStream()
    subscribed(stream, world({"a-1": 1, "b-2": 1}))
    (response,) = stream.on_snapshot(world({"a-1": 2, "b-2": 2}))
    stream.on_request(word_on(response, refuse="bad"), world({"a-1": 2, "b-2": 2}))
    assert {name for _, name in stream.subscriptions.refusals()} == {"a-1", "b-2"}


def test_an_unknown_type_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert DeltaStream().on_request(ask("type.googleapis.com/x.Y"), world({})) == ([], False)
    assert "type.googleapis.com/x.Y" in caplog.text


def test_settled_means_that_every_endpoint_was_answered() -> None:
    stream, snap = DeltaStream(), world({"a": 1, "b": 1})
    assert not stream.subscriptions.settled(snap), "it has not even asked"
    ((clusters,), _) = stream.on_request(ask(CLUSTERS), snap)
    stream.on_request(word_on(clusters), snap)
    ((endpoints,), _) = stream.on_request(ask(ENDPOINTS, "a"), snap)
    stream.on_request(word_on(endpoints), snap)
    assert not stream.subscriptions.settled(snap), "the endpoints of the second pool are not even asked for"
    ((endpoints,), _) = stream.on_request(ask(ENDPOINTS, "b"), snap)
    assert not stream.subscriptions.settled(snap), "sent, not yet taken"
    stream.on_request(word_on(endpoints), snap)
    assert stream.subscriptions.settled(snap)
    fewer = world({"a": 1})
    assert not stream.subscriptions.settled(fewer), "what has gone was not taken back"
    for response in stream.on_snapshot(fewer):
        stream.on_request(word_on(response), fewer)
    stream.on_request(ask(ENDPOINTS, drop=("b",)), fewer)
    assert stream.subscriptions.settled(fewer)


class Client:
    """Keeps what it is told, as Envoy does: asks for the endpoints of its clusters, and may refuse, lag or reconnect."""

    def __init__(self) -> None:
        self.have: dict[str, dict[str, str]] = {kind: {} for kind in ORDER}
        self.wants: set[str] = set()
        self.refused: set[tuple[str, str]] = set()
        self.inbox: list[DeltaDiscoveryResponse] = []

    def connect(self, snap: Snapshot) -> None:
        self.stream, self.inbox = DeltaStream(), []
        self.wants = set(self.have[CLUSTERS])
        for kind, names in ((CLUSTERS, ()), (LISTENERS, ()), (ROUTES, ("penstock",)), (ENDPOINTS, tuple(sorted(self.wants)))):
            self.say(ask(kind, *names, have=self.wanted(kind)), snap)

    def wanted(self, kind: str) -> dict[str, str]:
        """What it has, less the endpoints of clusters that are gone."""
        return {name: it for name, it in self.have[kind].items() if kind != ENDPOINTS or name in self.wants}

    def say(self, request: DeltaDiscoveryRequest, snap: Snapshot) -> None:
        self.hear(self.stream.on_request(request, snap)[0])

    def hear(self, responses: Iterable[DeltaDiscoveryResponse]) -> None:
        for its in responses:
            assert its.resources or its.removed_resources or not self.wanted(its.type_url), "nothing is not worth a word"
            self.inbox.append(its)

    def read(self, snap: Snapshot, refuse: bool) -> None:
        response = self.inbox.pop(0)
        if refuse:
            named = {*versions(response), *response.removed_resources}
            self.refused.update((response.type_url, name) for name in named)
            self.say(word_on(response, refuse="no"), snap)
            return
        its = self.have[response.type_url]
        for name, version in versions(response).items():
            # What takes the place of what it refused may be what it had before.
            again = response.type_url == ENDPOINTS or (response.type_url, name) in self.refused
            assert its.get(name) != version or again, "it had this already"
            its[name] = version
        for name in response.removed_resources:
            its.pop(name, None)
        self.say(word_on(response), snap)
        if response.type_url == CLUSTERS:
            wants = set(its)
            add, drop = sorted(wants - self.wants), tuple(sorted(self.wants - wants))
            self.wants = wants
            if add or drop:
                self.say(ask(ENDPOINTS, *add, drop=drop), snap)


_POOLS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2))
_STEPS = st.lists(st.one_of(_POOLS, st.sampled_from(["read", "refuse", "reconnect"])), max_size=30)


@given(_STEPS, _POOLS)
@settings(max_examples=200)
def test_whatever_happens_the_client_ends_with_what_there_is(steps: list[Any], last: dict[str, int]) -> None:
    client, snap = Client(), world({})
    client.connect(snap)
    for step in [*steps, "reconnect", last]:  # what it refused it gets again when it changes, or when it connects anew
        if step == "reconnect":
            client.connect(snap)
        elif isinstance(step, dict):
            snap = world(step)
            client.hear(client.stream.on_snapshot(snap))
        elif client.inbox:
            client.read(snap, refuse=step == "refuse")
    while client.inbox:
        client.read(snap, refuse=False)
    for kind in (CLUSTERS, LISTENERS, ROUTES):
        assert client.have[kind] == {name: it.version for name, it in snap.resources[kind].items()}
    wanted = {name: it.version for name, it in snap.resources[ENDPOINTS].items()}
    assert {name: it for name, it in client.have[ENDPOINTS].items() if name in client.wants} == wanted
    assert client.stream.subscriptions.settled(snap)


def test_a_refusal_is_of_what_it_names_and_not_of_what_begins_alike() -> None:
    stream = DeltaStream()
    subscribed(stream, world({"m-1": 1, "m-10": 1}))
    (response,) = stream.on_snapshot(world({"m-1": 2, "m-10": 2}))
    stream.on_request(
        word_on(response, refuse="Error adding/updating cluster(s) m-10: no such port."), world({"m-1": 2, "m-10": 2})
    )
    assert [name for _, name in stream.subscriptions.refusals()] == ["m-10"]
    (better,) = stream.on_snapshot(world({"m-1": 2, "m-10": 3}))
    stream.on_request(word_on(better), world({"m-1": 2, "m-10": 3}))
    assert not stream.subscriptions.refusals()


def test_nothing_is_refused_of_what_is_gone() -> None:
    stream = DeltaStream()
    subscribed(stream, world({"a": 1, "b": 1}))
    (response,) = stream.on_snapshot(world({"a": 1, "b": 2}))
    stream.on_request(word_on(response, refuse="b: bad"), world({"a": 1, "b": 2}))
    assert stream.subscriptions.refusals()
    for removal in stream.on_snapshot(world({"a": 1})):
        stream.on_request(word_on(removal), world({"a": 1}))
    assert not stream.subscriptions.refusals()
