"""A LoraAdapter from `kubectl apply` to a token and back: loaded while replicas run, again after a restart, gone when deleted."""

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from e2e import adapters, models
from e2e.cluster.cluster import Cluster
from e2e.cluster.phases import Phases
from e2e.system import System
from e2e.waiting import eventually

Object = dict[str, Any]
MODEL, ADAPTER = "adaptable", "docs-sql"
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
        listed = {it["id"]: it for it in httpx.get(f"{system.url}/v1/models").json()["data"]}
        assert listed[ADAPTER]["parent"] == MODEL
        public = f"http://{replica(cluster, namespace)['status']['podIP']}:8000"
        assert httpx.post(f"{public}/v1/unload_lora_adapter", json={"lora_name": ADAPTER}).status_code == 404

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
                there = httpx.get(f"http://{pod['status']['podIP']}:8000/v1/models").json()["data"]
                assert [it["id"] for it in there] == [MODEL]

            eventually(expect_gone, seconds=120)
        assert answer(system, MODEL)
        cluster.kubectl("delete", adapters.KIND, "foreign", f"--namespace={namespace}")
