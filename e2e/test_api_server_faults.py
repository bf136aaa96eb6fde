"""An API server that is slow, refuses, forgets or hangs up: operator and gateway do what is asked all the same, only later. One
that is away: they wait, and know soon what happened meanwhile. One that is silent to the operator that acts: another acts in its
place, and never both."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from e2e import faults, models
from e2e.cluster.cluster import Cluster
from e2e.cluster.phases import Phases
from e2e.cluster.pki import API_URL
from e2e.conftest import Write
from e2e.faults import Fault, Seen, Way
from e2e.system import GATEWAY, NAMESPACE, OPERATOR, System, acting, without_operators
from e2e.waiting import eventually

GATEWAY_URL = "http://127.0.0.1:19090"
FAULTS: dict[str, Callable[[], Fault]] = {
    "slow": lambda: faults.slow,
    "busy": lambda: faults.sometimes(faults.busy, 0.5),
    "failing": lambda: faults.sometimes(faults.failing, 0.1),  # of 0.2 a look at a new model may fail ten times in a row
    "conflicting": lambda: faults.sometimes(faults.conflicting, 0.2),
    "forgetful": faults.expired,
    "hanging up": lambda: faults.cut,
}
OPERATOR_PORT, SECOND_PORT = 19091, 19093
PASSED_ON = "passed-on"
"""A name that one model after the other has."""


@dataclass
class Program:
    """A part of Penstock as a process of the test's, with a way of its own to the API server."""

    way: Way
    process: subprocess.Popen[bytes]


@contextmanager
def program(cluster: Cluster, name: str, account: str, *words: str) -> Iterator[Program]:
    """Runs `penstock` with the rights of that ServiceAccount."""
    way = Way(API_URL, cluster.state / "pki/ca.crt")
    way.start()
    config = json.loads(cluster.service_account_kubeconfig(NAMESPACE, account).read_text())
    config["clusters"][0]["cluster"] = {"server": way.url}
    kubeconfig = cluster.state / f"{name}.kubeconfig"
    kubeconfig.write_text(json.dumps(config))
    with ExitStack() as ending, (cluster.processes.logs / f"{name}.log").open("wb") as log:
        ending.callback(way.stop)
        command = [Path(sys.executable).with_name("penstock"), *words]
        environment = os.environ | cluster.environment | {"KUBECONFIG": str(kubeconfig)}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        ending.callback(process.wait, timeout=60)
        ending.callback(process.terminate)
        yield Program(way, process)


@pytest.fixture(scope="module")
def alone(system: System) -> Iterator[Cluster]:
    """The cluster without its operators."""
    with without_operators(system):
        yield system.cluster


def operator(cluster: Cluster, name: str, namespace: str, port: int = OPERATOR_PORT):
    return program(cluster, name, OPERATOR, "operator", f"--namespace={namespace}", f"--http-port={port}")


def gateway(cluster: Cluster, name: str, namespace: str):
    flags = ["--host=127.0.0.1", "--grpc-port=19002", "--http-port=19090", f"--namespace={namespace}"]
    return program(cluster, name, GATEWAY, "gateway", *flags)


def change(cluster: Cluster, namespace: str, name: str, drain: int) -> None:
    """A change that must reach the model's Deployment."""
    patch = json.dumps({"spec": {"drainTimeout": f"{drain}s"}})
    cluster.kubectl("patch", models.KIND, name, f"--namespace={namespace}", "--type=merge", f"--patch={patch}")


def expect_done(cluster: Cluster, namespace: str, name: str, drain: int) -> None:
    """It has reached the Deployment, and the status is about it."""
    models.conditions(cluster, namespace, name)
    (engine,) = cluster.get("deployment", f"{name}-cpu", namespace)["spec"]["template"]["spec"]["containers"]
    assert f"--shutdown-timeout={drain}" in engine["args"]


def heir(name: str, drain: int) -> models.Object:
    """A model with the name that is passed on."""
    return models.small(name, replicas=0, drainTimeout=f"{drain}s", served={"name": name, "aliases": [PASSED_ON]})


def succeed(cluster: Cluster, namespace: str, old: str, new: str, drain: int) -> None:
    """One model goes, and another takes its name over."""
    cluster.kubectl("delete", models.KIND, old, f"--namespace={namespace}")
    cluster.apply(heir(new, drain), namespace=namespace)


def expect_heir(cluster: Cluster, namespace: str, name: str, drain: int) -> None:
    """The operator has done it, and knows that the name is free."""
    expect_done(cluster, namespace, name, drain)
    assert models.conditions(cluster, namespace, name)["Ready"]["reason"] != "NameConflict"


def expect_served(*names: str, without: str = "") -> None:
    """The gateway knows these models, in whatever state they are, and not that one."""
    try:
        known = httpx.get(f"{GATEWAY_URL}/debug/models", timeout=2).json()["names"]
    except httpx.TransportError as problem:
        raise AssertionError(str(problem)) from problem
    assert not set(names) - known.keys() and without not in known, known.keys()


@pytest.mark.req("XC-07", "RT-36")
def test_faults_of_the_api_server_delay_and_nothing_else(alone: Cluster, namespace: str, phases: Phases, report: Write) -> None:
    cluster, name, last = alone, "steady", "first"
    cluster.apply(models.small(name, replicas=0), heir(last, 30), namespace=namespace)
    with (
        operator(cluster, "operator-behind-faults", namespace) as operates,
        gateway(cluster, "gateway-behind-faults", namespace) as picks,
    ):
        for model in (name, last):
            eventually(lambda model=model: expect_done(cluster, namespace, model, 30), seconds=120)
        eventually(lambda: expect_served(name, last, PASSED_ON), seconds=120)
        for drain, (fault, how) in enumerate(FAULTS.items(), start=31):
            before, new = (len(operates.way.seen), len(picks.way.seen)), fault.replace(" ", "-")
            with phases(f"the API server {fault}: a change, a model gone and a new one → done, and known"):
                for way in (operates.way, picks.way):
                    way.turn(faults.away)  # so that no watch tells of what comes now
                change(cluster, namespace, name, drain)
                succeed(cluster, namespace, last, new, drain)
                for way in (operates.way, picks.way):
                    way.turn(how())
                eventually(lambda drain=drain: expect_done(cluster, namespace, name, drain), seconds=120)
                eventually(lambda new=new, drain=drain: expect_heir(cluster, namespace, new, drain), seconds=120)
                eventually(lambda new=new, last=last: expect_served(name, new, PASSED_ON, without=last), seconds=120)
            asked = len(operates.way.seen) - before[0], len(picks.way.seen) - before[1]
            report(f"         {asked[0]} requests by the operator, {asked[1]} by the gateway")
            last = new
        assert operates.process.poll() is None
        assert picks.process.poll() is None


@pytest.mark.req("XC-07", "RT-36")
def test_an_api_server_that_is_away_is_waited_for(alone: Cluster, namespace: str, phases: Phases, report: Write) -> None:
    cluster, name = alone, "steady"
    cluster.apply(models.small(name, replicas=0), heir("first", 30), namespace=namespace)
    with (
        operator(cluster, "operator-alone", namespace) as operates,
        gateway(cluster, "gateway-alone", namespace) as picks,
    ):
        for model in (name, "first"):
            eventually(lambda model=model: expect_done(cluster, namespace, model, 30), seconds=120)
        eventually(lambda: expect_served(name, PASSED_ON), seconds=120)
        expect_acting(OPERATOR_PORT)
        for way in (operates.way, picks.way):
            way.turn(faults.away)
        began, before = time.monotonic(), (len(operates.way.seen), len(picks.way.seen))
        change(cluster, namespace, name, 31)
        succeed(cluster, namespace, "first", "second", 31)
        with phases("the API server away → the operator does nothing more, and waits"):
            eventually(lambda: expect_idle(OPERATOR_PORT), seconds=120)
            expect_served(name, "first", PASSED_ON)
        lasted = time.monotonic() - began
        asked = len(operates.way.seen) - before[0], len(picks.way.seen) - before[1]
        report(f"         {asked[0]} tries by the operator, {asked[1]} by the gateway in {lasted:.0f} s")
        assert max(asked) < 300 + 30 * lasted, "a hot loop"
        with phases("it is back → what happened meanwhile is done, and known"):
            for way in (operates.way, picks.way):
                way.turn(faults.healthy)
            eventually(lambda: expect_done(cluster, namespace, name, 31), seconds=120)
            eventually(lambda: expect_heir(cluster, namespace, "second", 31), seconds=120)
            eventually(lambda: expect_served(name, "second", PASSED_ON, without="first"), seconds=120)
        assert operates.process.poll() is None
        assert picks.process.poll() is None


def expect_acting(port: int) -> None:
    assert acting(f"127.0.0.1:{port}")


def expect_idle(port: int) -> None:
    assert not acting(f"127.0.0.1:{port}")


def holder(cluster: Cluster) -> str:
    """Who may act; fails while nobody may."""
    found = cluster.get("lease", OPERATOR, NAMESPACE)["spec"]["holderIdentity"]
    assert found
    return found


def expect_another_holder(cluster: Cluster, before: str) -> str:
    found = holder(cluster)
    assert found != before
    return found


def changes(way: Way) -> list[Seen]:
    """What was written by that way, but for Leases."""
    return [it for it in way.seen if it.method in faults.WRITES and "/leases" not in it.path and it.status < 300]


@pytest.mark.req("XC-07")
def test_an_operator_that_is_cut_off_stops_before_another_acts(alone: Cluster, namespace: str, phases: Phases) -> None:
    cluster, name = alone, "handed-over"
    cluster.apply(models.small(name, replicas=0), namespace=namespace)
    with operator(cluster, "operator-cut-off", namespace) as first:
        eventually(lambda: expect_done(cluster, namespace, name, 30), seconds=120)
        leader = holder(cluster)
        with operator(cluster, "operator-waiting", namespace, SECOND_PORT) as second:
            eventually(lambda: expect_asking(second), seconds=120)
            first.way.turn(faults.silent)
            written = len(changes(first.way))
            change(cluster, namespace, name, 31)
            with phases("the API server silent to the operator that acts → it acts no more"):
                eventually(lambda: expect_idle(OPERATOR_PORT), seconds=120)
            assert holder(cluster) == leader, "the lease is still its own, so nobody else has acted"
            assert not changes(second.way)
            with phases("the lease run out → the other one does what was asked"):
                eventually(lambda: expect_another_holder(cluster, leader), seconds=120)
                eventually(lambda: expect_done(cluster, namespace, name, 31), seconds=120)
            assert len(changes(first.way)) == written
            assert changes(second.way)
            asked = len(first.way.seen)
            first.way.turn(faults.healthy)
            eventually(lambda: expect_asking(first, asked), seconds=120)
            assert len(changes(first.way)) == written, "it waits for its turn"
        with phases("the other one stopped → the first one's turn again"):
            eventually(lambda: expect_acting(OPERATOR_PORT), seconds=120)
        assert holder(cluster) == leader


def expect_asking(program: Program, since: int = 0) -> None:
    """Fails until it has asked for the lease after so many requests."""
    assert any("/leases" in it.path for it in program.way.seen[since:])
