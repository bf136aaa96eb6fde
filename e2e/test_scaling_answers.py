"""What the autoscaler answers to loads that are told to it, in a real cluster: by engines that say what the test has them say."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e import models
from e2e.cluster.commands import run
from e2e.cluster.network import namespaces
from e2e.cluster.phases import Phases
from e2e.scripted_fleet import HALF, IDLE, OVERLOAD, Fleet, scripted, steadily
from e2e.system import GATEWAY, NAMESPACE, OPERATOR, System
from e2e.waiting import eventually

Object = dict[str, Any]
LORA_THRASH: Object = HALF | {"num_requests_waiting": {"lora": 20}, "lora_slots": 2, "lora_running": {"a": 2, "b": 2}}
GRAMMARS: Object = HALF | {"num_requests_waiting": {"grammar": 30}}


@contextmanager
def cut_off(system: System, pods: list[Object]) -> Iterator[None]:
    """What the pods send to gateways and operators is lost meanwhile; kubelets still reach them."""
    asking = [pod["status"]["podIP"] for component in (GATEWAY, OPERATOR) for pod in system.pods(component)]
    marks = [pod["metadata"]["uid"][:12] for pod in pods]
    places = [name for name in namespaces(f"{system.cluster.name}@") if name.endswith(tuple(marks))]
    assert len(places) == len(pods), places
    for place in places:
        for address in asking:
            run("ip", "-n", place, "route", "add", "blackhole", f"{address}/32")
    try:
        yield
    finally:
        for place in set(places).intersection(namespaces(system.cluster.name)):  # a pod that has gone took its routes along
            for address in asking:
                run("ip", "-n", place, "route", "del", "blackhole", f"{address}/32")


@pytest.mark.req("SC-11", "SC-12")
def test_what_waits_decides_what_the_autoscaler_does(system: System, namespace: str, phases: Phases) -> None:
    """LoRA slots and grammars buy no replica, overload does; a gateway that hears nothing shrinks nothing; all of it is told."""
    cluster, fleet, dry = system.cluster, Fleet(system.cluster, namespace, "told"), Fleet(system.cluster, namespace, "dry")
    assert not [it for it in cluster.list("services", NAMESPACE) if "prometheus" in it["metadata"]["name"]]
    resources = (scripted("told", min=2, max=4, downWindow="1s"), scripted("dry", mode="DryRun", max=4, downWindow="1s"))
    with models.applied(cluster, namespace, *resources):
        with phases("two models of scripted engines applied → ready"):
            eventually(lambda: fleet.ready(2), seconds=120)
            eventually(lambda: dry.ready(1), seconds=120)
        _only_capacity_buys_replicas(fleet, phases)
        _a_dry_run_only_tells(dry, phases)
        _explain_tells_the_same(fleet)
        _what_was_learned_survives(system, fleet, phases)
        _without_reports_nothing_shrinks(system, fleet, phases)


def _only_capacity_buys_replicas(fleet: Fleet, phases: Phases) -> None:
    """Each of the three is told, and only overload is answered with replicas."""

    def says(words: str) -> None:
        assert words in fleet.status["reason"], fleet.status

    for what, load in (("lora", LORA_THRASH), ("grammar", GRAMMARS)):
        with phases(f"{what} waits → the status says so, no replica comes"):
            fleet.say(load)
            waits = 2 * load["num_requests_waiting"][what]
            fleet_waits = f"{waits} wait for {what}, which no replica more would help"
            eventually(lambda words=fleet_waits: says(words), seconds=120)
            assert (fleet.status["desired"], fleet.status["constraint"]) == (2, "Min"), fleet.status
            fleet.ready(2)
    with phases("overload → two more replicas are ready"):
        fleet.say(OVERLOAD)
        eventually(lambda: fleet.ready(4), seconds=120)
    assert fleet.status["desired"] == 4
    assert "wait for" not in fleet.status["reason"]


def _a_dry_run_only_tells(dry: Fleet, phases: Phases) -> None:
    def would_grow() -> None:
        assert dry.status["desired"] > 1, dry.status
        active = dry.active()
        assert (active["status"], active["reason"]) == ("False", "DryRun"), active

    with phases("overload in DryRun → told, not done; kubectl scale is done"):
        dry.say(OVERLOAD)
        eventually(would_grow, seconds=120)
        dry.ready(1)
        deployment = dry.deployment()["metadata"]["name"]
        dry.cluster.kubectl("scale", "deployment", deployment, "--replicas=2", f"--namespace={dry.namespace}")
        eventually(lambda: dry.ready(2), seconds=120)
        steadily(lambda: (dry.ready(2), None)[1], seconds=6)  # more than one look of the autoscaler
    assert dry.status.get("decisions", []) == []


def _explain_tells_the_same(fleet: Fleet) -> None:
    """By way of the API server's proxy to the gateways."""
    story = json.loads(fleet.explain("--output=json"))
    (pool,) = story["pools"]
    assert (story["gateway"], pool["replicas"], pool["settles"]["replicas"]) == (True, 4, 4), story
    assert pool["settles"]["constraint"] == "Max"
    assert pool["signals"]["requests"] >= 96, pool
    assert pool["autoscaler"]["decisions"][0] == fleet.status["decisions"][0]
    (relaxed,) = json.loads(fleet.explain("--output=json", "--load=0.01x"))["pools"]
    assert relaxed["settles"]["replicas"] == 2, relaxed
    table = fleet.explain()
    for words in (f"{fleet.namespace}/told", "would be another size: max above 4", "prefill_tokens_per_s 4321"):
        assert words in table, table


def _what_was_learned_survives(system: System, fleet: Fleet, phases: Phases) -> None:
    """Engines that say nothing of their speed any more teach a new operator nothing: what it knows, it has read."""

    def learned() -> Object:
        found = fleet.status["learned"]
        assert found["prefillTokensPerSecond"] == 4321, found
        return found

    before, changes = eventually(learned, seconds=120), fleet.status["decisions"]
    assert changes
    fleet.say(IDLE)
    with phases("both operators replaced → a decision by what was learned before"):
        old = {pod["metadata"]["name"] for pod in system.pods(OPERATOR)}
        fleet.cluster.kubectl("delete", "pod", *old, f"--namespace={NAMESPACE}")
        eventually(lambda: _acts(system, old), seconds=120)
        eventually(lambda: _shrunk(fleet), seconds=120)
    after = fleet.status["learned"]
    assert after["prefillTokensPerSecond"] == before["prefillTokensPerSecond"], after
    assert fleet.status["decisions"][-len(changes) :] == changes


def _acts(system: System, old: set[str]) -> None:
    holder = system.cluster.get("lease", OPERATOR, NAMESPACE)["spec"].get("holderIdentity", "")
    assert holder and not holder.startswith(tuple(old)), holder


def _shrunk(fleet: Fleet) -> None:
    fleet.ready(2)
    assert fleet.status["desired"] == 2, fleet.status


def _without_reports_nothing_shrinks(system: System, fleet: Fleet, phases: Phases) -> None:
    def blind() -> None:
        active = fleet.active()
        assert (active["status"], active["reason"]) == ("False", "NoData"), active

    def blind_and_idle() -> None:
        blind()
        assert "2 ready replicas is unknown; nothing shrinks" in fleet.active()["message"], fleet.active()

    def sees() -> None:
        assert fleet.active()["status"] == "True", fleet.active()

    eventually(sees, seconds=120)
    with cut_off(system, fleet.ready(2)), phases("reports blocked → ScalingActive is False, nothing shrinks"):
        eventually(blind, seconds=120)
        fleet.patch({"min": 1})  # no load needs more
        eventually(blind_and_idle, seconds=120)
        steadily(lambda: (fleet.ready(2), None)[1], seconds=6)
    with phases("reports come again → one replica goes"):
        eventually(sees, seconds=120)
        eventually(lambda: fleet.ready(1), seconds=120)
