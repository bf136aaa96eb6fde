"""The local system under some traffic, and a Prometheus that scrapes it every second."""

import asyncio
import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import httpx
import pytest
import yaml

from penstock.operator.cluster import Cluster
from penstock.operator.desired import Rendering
from penstock.operator.observe import Reports
from penstock.operator.reconciler import Reconciler
from penstock.operator.routes import Routing
from penstock.operator.store import Children, Resources, key_of
from penstock.operator.telemetry import Exposition, ModelSeries, serve_metrics
from testing.ports import free_ports

if TYPE_CHECKING:
    from penstock.operator.observe import Reports
from penstock.operator.reconciler import ReplicaClient

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
START_S = 180.0
SCRAPED = {"penstock-engine", "penstock-gateway", "penstock-envoy", "penstock-autoscaler", "penstock-operator"}


class System:
    """What runs.

    Args:
        prometheus: Its address.
        targets: What it scrapes, by job.
    """

    def __init__(self, prometheus: str, targets: dict[str, str]) -> None:
        self.targets = targets
        self._client = httpx.Client(base_url=prometheus, timeout=10.0)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an instant query that are numbers; raises `RuntimeError` with Prometheus' words where it is wrong."""
        answer = self._client.get("/api/v1/query", params={"query": expr}).json()
        if answer["status"] != "success":
            raise RuntimeError(f"{expr}: {answer['error']}")
        return [it for it in answer["data"]["result"] if not math.isnan(float(it["value"][1]))]

    def values(self, label: str, series: str) -> list[str]:
        """The values of a label in these series."""
        answer = self._client.get(f"/api/v1/label/{label}/values", params={"match[]": series}).json()
        return answer["data"]

    def until(self, found: Callable[[], bool], within_s: float) -> bool:
        """Whether it came to be found."""
        deadline = time.monotonic() + within_s
        while not (now := found()) and time.monotonic() < deadline:
            time.sleep(1.0)
        return now


@contextlib.contextmanager
def live_system(folder: Path) -> Iterator[System]:
    """Everything, until the block ends."""
    with _penstock_up(folder) as url, _operator() as (operator, reconcile):
        (run,) = folder.glob("penstock-*")
        fleet = json.loads((run / "fleet.json").read_text())
        (replica,) = fleet["replicas"]
        own = replica["host"].rsplit(".", 2)[0] + ".0.1"
        targets = {
            "penstock-engine": f"{replica['host']}:{replica['port']}",
            "penstock-gateway": f"{own}:9090",
            "penstock-envoy": f"{own}:9902",
            "penstock-autoscaler": f"{own}:9091",
            "penstock-operator": operator,
        }
        namespace, model, pool = replica["pool"].split("/")
        whose = {"namespace": namespace, "model": model, "pool": pool, "pod": replica["name"]}
        with _prometheus(folder, targets, whose) as address, _traffic(url, reconcile):
            yield System(address, targets)


@contextlib.contextmanager
def _penstock_up(folder: Path) -> Iterator[str]:
    resource = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    resource["spec"]["pools"] = [{"name": "cpu", "scaling": {"min": 1, "max": 1}}]
    (folder / "tiny.yaml").write_text(yaml.safe_dump(resource))
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "penstock.cli", "up", "-f", str(folder / "tiny.yaml"), "--port", str(port)]
    with _process(command, folder / "up.log", cwd=ROOT, env={"XDG_RUNTIME_DIR": str(folder)}) as up:
        log, deadline = folder / "up.log", time.monotonic() + START_S
        while "ready in" not in log.read_text():
            assert up.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def _operator() -> Iterator[tuple[str, Callable[[], None]]]:
    """The operator's reconciler on an API server in memory: `penstock up` has none. Gives its target, and a reconcile."""
    tests = ROOT / "operator" / "tests"
    spec = importlib.util.spec_from_file_location("operator_fakes", tests / "conftest.py")
    assert spec is not None and spec.loader is not None
    fakes = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tests))  # for the modules beside it
        spec.loader.exec_module(fakes)
    api, resources, children, exposition = fakes.FakeApi(), Resources(), Children(lambda key: None), Exposition()
    api.children = children
    reconciler = Reconciler(
        cluster=Cluster(api, resources, children),
        rendering=Rendering(image="penstock/engine:test"),
        reports=Reports(
            scaling=lambda pool: None,
            routing=lambda key, pools: Routing(asked=1, answered=1),
            canary=lambda model, course, last: None,
            others=lambda target: "",
        ),
        later=lambda key, delay: None,
        replicas=cast("ReplicaClient", None),  # it would ask them for adapters, of which there are none
        registry=exposition.registry,
    )
    exposition.texts.append(ModelSeries(resources).render)
    resource = fakes.Factory().resource()
    api.put(resource)
    resources.put(api.objects[key_of(resource)])
    (port,) = free_ports(1)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        server = _in(loop, serve_metrics("127.0.0.1", port, exposition.render))
        yield f"127.0.0.1:{port}", lambda: _in(loop, reconciler.reconcile(key_of(resource)))
        _in(loop, server.cleanup())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _in(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """What it returns, done in the thread of that loop."""
    return asyncio.run_coroutine_threadsafe(work, loop).result(timeout=60)


@contextlib.contextmanager
def _prometheus(folder: Path, targets: dict[str, str], engine_labels: dict[str, str]) -> Iterator[str]:
    jobs = [
        {
            "job_name": job,
            "honor_labels": True,
            "static_configs": [{"targets": [target], "labels": engine_labels if job == "penstock-engine" else {}}],
        }
        for job, target in targets.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / "manifests" / "monitoring" / "rules" / "penstock.yaml")],
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    with _process([*command, f"--web.listen-address={address}"], folder / "prometheus.log") as process:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "prometheus.log").read_text()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://{address}/-/ready", timeout=2.0).is_success:
                    break
            time.sleep(0.2)
        yield f"http://{address}"


@contextlib.contextmanager
def _traffic(url: str, reconcile: Callable[[], None]) -> Iterator[None]:
    """One conversation after the other, each a longer prompt with the same beginning, and a reconcile."""
    stop, failures = threading.Event(), list[BaseException]()

    def ask() -> None:
        turn = 0
        try:
            with httpx.Client(base_url=url, timeout=60.0) as client:
                while not stop.wait(0.3):
                    turn += 1
                    body = {"model": "tiny", "prompt": "def json_loads(text): " * (2 + turn % 8), "max_tokens": 8, "stream": True}
                    client.post("/v1/completions", json=body).raise_for_status()
                    client.post("/v1/completions", json={**body, "model": "nobody"})
                    reconcile()
        except BaseException as error:  # noqa: BLE001 (raised in the test's thread)
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


@contextlib.contextmanager
def _process(
    command: list[str], log: Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """In a session of its own, all of which is gone at the end."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=cwd, env={**os.environ, **(env or {})}, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
