"""A LoraAdapter from `kubectl apply` to a token and back: loaded while replicas run, again after a restart, gone when deleted."""

import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from e2e import adapters, models
from e2e.cluster.cluster import Cluster
from e2e.cluster.phases import Phases
from e2e.system import System
from e2e.traffic import answers_of, clients, expect_answers_of, expect_no_loss
from e2e.waiting import eventually
from testing import patient

Object = dict[str, Any]
MODEL, ADAPTER = "adaptable", "docs-sql"
GROWING, TERSE = "growing", "terse"
TOKENS = 12
PROMPT = "What does json.loads do?"


def answer(system: System, model: str) -> str:
    asked = system.openai().completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0)
    assert asked.model == model
    return asked.choices[0].text


def replica(cluster: Cluster, namespace: str) -> Object:
    (pod,) = models.ready_pods(cluster, namespace, MODEL, 1).values()
    return pod


@pytest.mark.req("LO-23", "LO-24")
def test_adapter_is_served_by_its_name_survives_a_restart_and_goes(
    system: System, namespace: str, tmp_path: Path, phases: Phases
) -> None:
    cluster, folder = system.cluster, adapters.make(tmp_path / "sql")
    lora = {"slots": 2, "sources": [{"prefix": f"file://{tmp_path}"}]}

    def expect_loaded() -> None:
        ready, conditions = adapters.told(cluster, namespace, ADAPTER)
        assert (ready, conditions["Ready"]["status"]) == ("1/1", "True"), conditions

    with models.applied(cluster, namespace, models.small(MODEL, lora=lora)):
        with phases("model with room for adapters → Ready"):
            models.wait_until_ready(cluster, namespace, MODEL)
        with phases("LoraAdapter applied → answers under its name"):
            cluster.apply(adapters.resource(MODEL, ADAPTER, f"file://{folder}"), namespace=namespace)
            eventually(expect_loaded, seconds=120)
            said = eventually(lambda: answer(system, ADAPTER), seconds=120)
        assert said != answer(system, MODEL)
        listed = {it["id"]: it for it in patient.get(f"{system.url}/v1/models").json()["data"]}
        assert listed[ADAPTER]["parent"] == MODEL
        public = f"http://{replica(cluster, namespace)['status']['podIP']}:8000"
        assert patient.post(f"{public}/v1/unload_lora_adapter", json={"lora_name": ADAPTER}).status_code == 404

        cluster.apply(adapters.resource(MODEL, "foreign", "file:///etc"), namespace=namespace)

        def expect_refused() -> None:
            accepted = adapters.told(cluster, namespace, "foreign")[1]["Accepted"]
            assert accepted["reason"] == "SourceNotAllowed" and str(tmp_path) in accepted["message"]

        eventually(expect_refused)

        pod = replica(cluster, namespace)
        (container,) = pod["status"]["containerStatuses"]
        with phases("engine killed → the adapter is there again"):
            os.kill(int(container["containerID"].removeprefix("process://")), signal.SIGKILL)

            def expect_again() -> None:
                (again,) = replica(cluster, namespace)["status"]["containerStatuses"]
                assert again["restartCount"] > container["restartCount"]
                assert answer(system, ADAPTER) == said

            eventually(expect_again, seconds=120)
        assert replica(cluster, namespace)["metadata"]["uid"] == pod["metadata"]["uid"]

        with phases("LoraAdapter deleted → 404, and the replica has forgotten it"):
            cluster.kubectl("delete", adapters.KIND, ADAPTER, f"--namespace={namespace}")

            def expect_gone() -> None:
                with pytest.raises(openai.NotFoundError):
                    answer(system, ADAPTER)
                there = patient.get(f"http://{pod['status']['podIP']}:8000/v1/models").json()["data"]
                assert [it["id"] for it in there] == [MODEL]

            eventually(expect_gone, seconds=120)
        assert answer(system, MODEL)
        cluster.kubectl("delete", adapters.KIND, "foreign", f"--namespace={namespace}")


@pytest.mark.req("LO-23")
def test_replicas_that_come_and_go_lose_no_request_for_an_adapter(
    system: System, namespace: str, tmp_path: Path, phases: Phases
) -> None:
    """One that has just become ready lacks the adapter until the operator has loaded it there."""
    cluster, folder = system.cluster, adapters.make(tmp_path / "terse")
    lora = {"slots": 2, "sources": [{"prefix": f"file://{tmp_path}"}]}

    def resource(replicas: int) -> Object:
        # In turn: by cost a new replica would get nothing as long as the first has the adapter in a slot.
        return models.small(GROWING, lora=lora, replicas=replicas, routing={"policy": "RoundRobin"})

    def expect_loaded(count: int) -> None:
        ready, conditions = adapters.told(cluster, namespace, TERSE)
        assert (ready, conditions["Loaded"]["status"]) == (f"{count}/{count}", "True"), conditions

    with models.applied(cluster, namespace, resource(1)):
        models.wait_until_ready(cluster, namespace, GROWING)
        (first,) = models.ready_pods(cluster, namespace, GROWING, 1)
        with phases("LoraAdapter applied under requests → the first is held and answered"):
            cluster.apply(adapters.resource(GROWING, TERSE, f"file://{folder}"), namespace=namespace)
            eventually(lambda: expect_listed(system, TERSE))
            with clients(system.url, TERSE, 4, TOKENS) as early:
                eventually(lambda: expect_loaded(1), seconds=120)
                eventually(lambda: expect_answers_of(early, {first}), seconds=120)
        expect_no_loss(answers_of(early), TOKENS)

        with clients(system.url, TERSE, 4, TOKENS) as asked:
            with phases("1 → 3 replicas under requests for the adapter"):
                cluster.apply(resource(3), namespace=namespace)
                replicas = eventually(lambda: set(models.ready_pods(cluster, namespace, GROWING, 3)), seconds=180)
                eventually(lambda: expect_loaded(3), seconds=120)
                eventually(lambda: expect_answers_of(asked, replicas), seconds=120)
            with phases("3 → 1"):
                cluster.apply(resource(1), namespace=namespace)
                eventually(lambda: models.ready_pods(cluster, namespace, GROWING, 1), seconds=120)
        answers = answers_of(asked)
        expect_no_loss(answers, TOKENS)
        print(f"0 of {len(answers)} requests for the adapter were lost")
        cluster.kubectl("delete", adapters.KIND, TERSE, f"--namespace={namespace}")


def expect_listed(system: System, name: str) -> None:
    """The gateway knows the name, whether or not any replica does."""
    listed = patient.get(f"{system.url}/v1/models").json()["data"]
    assert name in [it["id"] for it in listed]
