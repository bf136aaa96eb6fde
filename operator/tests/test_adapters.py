"""LoraAdapters: each ready replica is brought to what they say, and they say what came of it."""

from typing import Any

import pytest
from operator_world import World

from penstock.api.resources import InferenceModel, LoraAdapter
from penstock.operator.adapters.plan import Action, Origin, Report, accepted, actions, judged
from penstock.operator.adapters.sync import AGAIN_FAILED_S, AGAIN_LOADING_S, adapters_key
from penstock.operator.conditions.verdict import Verdict
from penstock.operator.desired.arguments import engine_args
from penstock.operator.store import Key

LORA = {"slots": 2, "sources": [{"prefix": "/adapters"}]}
HERE, THERE = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


def adapter(
    name: str = "sql", uri: str = "/adapters/sql", model: str = "tiny", created: str = "2026-02-01", **more: Any
) -> dict[str, Any]:
    meta = {
        "name": name,
        "namespace": "default",
        "uid": f"uid-{name}",
        "generation": 1,
        "resourceVersion": "1",
        "creationTimestamp": f"{created}T00:00:00Z",
    }
    spec = {"modelRef": {"name": model}, "served": {"name": name}, "source": {"uri": uri}, **more}
    return {"apiVersion": "penstock.dev/v1alpha1", "kind": "LoraAdapter", "metadata": meta, "spec": spec}


@pytest.fixture
def world(api: Any, make: Any) -> World:
    return World(api, make)


@pytest.fixture
async def served(world: World, key: Key) -> World:
    """The model with two ready replicas."""
    await world.apply(world.make.resource(lora=LORA, replicas=2))
    await world.settle(key)
    for name, ip in (("a", "10.0.0.1"), ("b", "10.0.0.2")):
        world.api.put(world.make.ready_pod(name, podIP=ip))
    return world


async def look(world: World, *keys: Key) -> None:
    """As the queue would: the keys, and what they put on it."""
    for one in keys or (Key("LoraAdapter", "default", "sql"),):
        await world.settle(one)
    soon = {one for one, delay in world.looks if delay == 0}
    world.looks.clear()
    for one in soon:
        await world.settle(one)


def told(world: World, name: str = "sql") -> tuple[str, dict[str, tuple[str, str]]]:
    status = world.live("LoraAdapter", name)["status"]
    return status["ready"], {it["type"]: (it["status"], it["reason"]) for it in status["conditions"]}


def message(world: World, kind: str, name: str = "sql") -> str:
    return next(it["message"] for it in world.live("LoraAdapter", name)["status"]["conditions"] if it["type"] == kind)


async def test_one_whose_deletion_a_finalizer_puts_off_is_unloaded_and_says_so(served: World) -> None:
    await served.apply(adapter())
    await look(served)
    assert told(served)[1]["Ready"][0] == "True"
    going = adapter()
    going["metadata"] |= {"deletionTimestamp": "2026-03-01T00:00:00Z", "finalizers": ["example.com/audit"]}
    await served.apply(going)
    await look(served)
    assert served.replicas.there == {HERE: {}, THERE: {}}
    assert told(served) == ("0/2", dict.fromkeys(("Ready", "Accepted", "Loaded"), ("False", "Terminating")))
    assert "example.com/audit" in message(served, "Ready")


@pytest.mark.req("LO-23")
async def test_an_adapter_is_loaded_on_every_ready_replica_and_again_on_one_that_has_restarted(served: World) -> None:
    await served.apply(adapter())
    await look(served)
    assert served.replicas.there == {HERE: {"sql": Origin("/adapters/sql", None)}, THERE: {"sql": Origin("/adapters/sql", None)}}
    assert told(served)[0] == "2/2"
    assert told(served)[1] == {"Ready": ("True", "Loaded"), "Accepted": ("True", "Accepted"), "Loaded": ("True", "Loaded")}
    served.replicas.told.clear()
    served.replicas.there[HERE].clear()
    served.queued.clear()
    pod = served.live("Pod", "a")
    served.api.put({**pod, "status": {**pod["status"], "conditions": [{"type": "Ready", "status": "False"}]}})
    await look(served, *served.queued)
    assert told(served)[0] == "1/1" and served.replicas.told == []
    served.api.put(pod)
    await look(served, Key("InferenceModel", "default", "tiny"))
    assert served.replicas.told == [("load", "sql", HERE)] and told(served)[0] == "2/2"


def routed(world: World) -> list[list[str]]:
    """The names that each rule of the model's HTTPRoute matches."""
    rules = world.live("HTTPRoute", "tiny")["spec"]["rules"]
    return [[match["headers"][0]["value"] for match in rule["matches"]] for rule in rules]


async def test_the_route_of_a_model_names_its_adapters(world: World, key: Key) -> None:
    exposed = {"inferencePool": {"picker": {"name": "penstock-picker"}, "gateway": {"name": "web"}}}
    await world.apply(world.make.resource(lora=LORA, routing=exposed))
    await world.settle(key)
    assert routed(world) == [["tiny"]]
    world.queued.clear()
    await world.apply(adapter("sql", served={"name": "sql", "aliases": ["tsql"]}))
    await world.apply(adapter("later", created="2026-03-01", served={"name": "late", "aliases": ["sql"]}))
    await world.apply(adapter("theirs", model="other"))
    assert key in world.queued, "the model is looked at when an adapter comes"
    await world.settle(key)
    assert routed(world) == [["tiny", "late", "sql", "tsql"]]
    for number in range(150):
        await world.apply(adapter(f"a{number:03}"))
    await world.settle(key)
    assert [len(rule) for rule in routed(world)] == [64, 64], "as many as the Gateway API allows"
    for number in range(150):
        world.watch.heard("DELETED", world.live("LoraAdapter", f"a{number:03}"))
    await world.settle(key)
    assert routed(world) == [["tiny", "late", "sql", "tsql"]]


async def test_an_adapter_that_is_deleted_goes_and_one_that_changes_is_replaced(served: World) -> None:
    await served.apply(adapter())
    await look(served)
    changed = adapter(source={"uri": "/adapters/sql-2", "revision": "v2"})
    await served.apply(changed)
    await look(served)
    assert served.replicas.there[THERE] == {"sql": Origin("/adapters/sql-2", "v2")}
    served.queued.clear()
    served.watch.heard("DELETED", served.live("LoraAdapter", "sql"))
    assert Key("InferenceModel", "default", "tiny") in served.queued
    await look(served, Key("InferenceModel", "default", "tiny"))
    assert served.replicas.there == {HERE: {}, THERE: {}}


async def test_what_a_replica_says_is_quoted_and_tried_again(served: World) -> None:
    await served.apply(adapter())
    served.replicas.refuse["sql"] = "rank 64 is above --max-lora-rank 16"
    await look(served)
    ready, conditions = told(served)
    assert (ready, conditions["Loaded"], conditions["Ready"]) == ("0/2", ("False", "LoadFailed"), ("False", "LoadFailed"))
    assert "pod a: rank 64 is above --max-lora-rank 16" in message(served, "Loaded")
    await served.reconciler.reconcile(adapters_key(Key("InferenceModel", "default", "tiny")))
    assert served.looks[-1] == (adapters_key(Key("InferenceModel", "default", "tiny")), AGAIN_FAILED_S)
    served.replicas.refuse.clear()
    served.replicas.down.add(THERE)
    await look(served)
    ready, conditions = told(served)
    assert (ready, conditions["Loaded"], conditions["Ready"]) == ("1/2", ("False", "LoadFailed"), ("True", "Serving"))
    assert "pod b: no answer" in message(served, "Ready")
    served.replicas.down.clear()
    served.replicas.slow.add(THERE)
    await served.reconciler.reconcile(adapters_key(Key("InferenceModel", "default", "tiny")))
    assert told(served)[1]["Loaded"] == ("False", "Loading") and served.looks[-1][1] == AGAIN_LOADING_S


@pytest.mark.parametrize(
    ("changes", "lora", "reason", "words"),
    [
        ({"model": "none"}, LORA, "ModelNotFound", "no InferenceModel 'none'"),
        ({}, None, "NoRoomForAdapters", "set spec.lora"),
        ({"uri": "/elsewhere/sql"}, LORA, "SourceNotAllowed", "(/adapters)"),
        ({"uri": "/adapters-of-others/sql"}, LORA, "SourceNotAllowed", "/adapters-of-others"),
        ({"uri": "/adapters/sql"}, {"slots": 1}, "SourceNotAllowed", "(none)"),
        ({"uri": "s3://team/sql"}, LORA, "UnsupportedSource", "s3://"),
        ({"served": {"name": "tiny"}}, LORA, "NameConflict", "is served by InferenceModel default/tiny"),
    ],
)
async def test_what_is_not_to_be_served_says_why(
    world: World, key: Key, changes: dict[str, Any], lora: dict[str, Any] | None, reason: str, words: str
) -> None:
    await world.apply(world.make.resource(**({"lora": lora} if lora else {})))
    await world.settle(key)
    world.api.put(world.make.ready_pod("a", podIP="10.0.0.1"))
    await world.apply(adapter(**changes))
    await look(world)
    ready, conditions = told(world)
    assert ready.startswith("0/") and conditions["Ready"] == conditions["Accepted"] == ("False", reason)
    assert words in message(world, "Accepted")
    assert world.replicas.told == []


async def test_an_adapter_follows_its_model_as_it_comes_and_goes(world: World, key: Key) -> None:
    await world.apply(adapter())
    await look(world)
    assert told(world)[1]["Accepted"] == ("False", "ModelNotFound")
    await world.apply(world.make.resource(lora=LORA))
    await look(world, key)
    assert told(world)[1]["Accepted"] == ("True", "Accepted") and told(world)[1]["Loaded"] == ("False", "NoReadyReplica")
    world.watch.heard("DELETED", world.live("InferenceModel"))
    await look(world, key)
    assert told(world)[1]["Accepted"] == ("False", "ModelNotFound")


async def test_of_two_adapters_with_one_name_the_older_is_served(served: World) -> None:
    await served.apply(adapter("old", "/adapters/old", served={"name": "sql"}))
    await served.apply(adapter("new", "/adapters/new", created="2026-03-01", served={"name": "sql"}))
    await look(served, Key("LoraAdapter", "default", "new"))
    assert served.replicas.there[HERE] == {"sql": Origin("/adapters/old", None)}
    assert told(served, "new")[1]["Accepted"] == ("False", "NameConflict") and told(served, "old")[0] == "2/2"


async def test_one_that_cannot_be_read_says_what_is_wrong(world: World) -> None:
    await world.apply(adapter(uri="../x"))
    await look(world)
    assert told(world)[1] == dict.fromkeys(("Ready", "Accepted", "Loaded"), ("False", "InvalidSpec"))


async def test_replicas_that_speak_https_are_asked_so_where_the_operator_knows_whom_to_believe(served: World) -> None:
    pod = served.live("Pod", "a")
    served.api.put({**pod, "spec": {"containers": [{"name": "engine", "args": ["--ssl-certfile=/tls/tls.crt"]}]}})
    await served.apply(adapter())
    await look(served)
    assert told(served)[0] == "1/2" and "--replica-tls" in message(served, "Loaded")
    assert {address for _, _, address in served.replicas.told} == {THERE}
    served.replicas.scheme = "https"
    await look(served)
    assert told(served)[0] == "2/2"
    assert set(served.replicas.there) == {THERE, HERE.replace("http", "https"), THERE.replace("http", "https")}


async def test_adapters_are_loaded_over_the_administrative_port_where_a_replica_has_one(served: World) -> None:
    pod = served.live("Pod", "a")
    proxy = {"name": "proxy", "args": ["--admin-port=9"]}
    engine = {"name": "engine", "args": ["/m", "--port=8000", "--admin-port=8003"]}
    served.api.put({**pod, "spec": {"containers": [proxy, engine]}})
    served.replicas.there = {address: {"old": Origin("/adapters/old", None)} for address in (HERE, THERE)}
    served.replicas.there["http://10.0.0.1:8003"] = served.replicas.there[HERE]
    await served.apply(adapter())
    await look(served)
    assert told(served)[0] == "2/2"
    asked = {(verb, address) for verb, _, address in served.replicas.told}
    assert asked == {(verb, address) for verb in ("load", "unload") for address in ("http://10.0.0.1:8003", THERE)}


def test_room_for_adapters_becomes_flags(make: Any) -> None:
    assert not any("lora" in argument for argument in engine_args(make.model()))
    arguments = engine_args(make.model(lora={"slots": 3, "cpuSlots": 9, "maxRank": 64}))
    assert {"--enable-lora", "--max-loras=3", "--max-cpu-loras=9", "--max-lora-rank=64"} <= set(arguments)
    assert "--allow-runtime-lora-updating" in arguments


def test_what_goes_makes_room_for_what_comes() -> None:
    there = {"a": Origin("/a", None), "b": Origin("/b", None), "c": Origin("/c", "v1")}
    wanted = {"b": Origin("/b", None), "c": Origin("/c", "v2"), "d": Origin("/d", None)}
    assert actions(wanted, there) == [
        Action("unload", "a", None),
        Action("load", "c", Origin("/c", "v2")),
        Action("load", "d", Origin("/d", None)),
    ]
    assert actions(wanted, wanted) == []


def test_ready_is_never_true_where_nothing_serves_it(make: Any) -> None:
    verdict = Verdict(True, "Accepted", "")
    for reports in ([], [Report("a", {"x": "no"})], [Report("a", {}, frozenset({"x"}))]):
        ready, conditions = judged(verdict, "x", reports)
        assert conditions["Ready"].status is False and ready == f"0/{len(reports)}"
    model = InferenceModel.parse(make.resource(lora=LORA))
    assert accepted(LoraAdapter.parse(adapter()), model, "it is wrong", "").reason == "ModelNotAccepted"


async def test_a_replica_with_an_ipv6_address_is_asked_and_one_without_any_harms_nobody(served: World) -> None:
    served.api.put(served.make.ready_pod("a", podIP="fd00::1"))
    served.api.put(served.make.ready_pod("b"))
    await served.apply(adapter())
    await look(served)
    assert set(served.replicas.there) == {"http://[fd00::1]:8000"}
    assert told(served)[0] == "1/2"
