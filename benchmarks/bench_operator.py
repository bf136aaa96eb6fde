"""What the operator costs with many models: memory, CPU, API calls, and whether it ever comes to rest.

    make bench-operator                                   1,000 models with 5 replicas each
    make bench-operator ARGS="--models 100"

A real API server (the cluster tier's, see e2e/README.md: Linux and root), without controllers and nodes: this program makes the
Deployments' pods and writes their status. The operator runs as it is installed, as its own ServiceAccount with its own Roles;
the API server's audit log counts its requests and nobody else's. Seconds depend on the machine; CPU seconds and counts hardly.
"""

import argparse
import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from benchmarks.procfs import cpu_s, memory_bytes
from benchmarks.report import write_results
from e2e.cluster import network
from e2e.cluster.cluster import REPOSITORY, Cluster
from e2e.cluster.control_plane import ETCD
from e2e.cluster.phases import Phases
from penstock.api import labels, metrics
from penstock.kube.client import connect, list_all
from penstock.operator.api import DEPLOYMENTS, MODELS, ServerApi

Object = dict[str, Any]

SYSTEM, OPERATOR, HERE = "penstock-system", "penstock-operator", "default"
MANAGER = "bench"
AT_ONCE = 8
QUIET_S = 8.0
STEADY_S = 60.0
HTTP_PORT = 9091
LOOK_S = 3.0
"""Between looks at the operator's metrics: of a thousand models they are more than a megabyte to read here."""
SCRAPES = 50
PATIENCE_S = 300.0
"""Without any work done, while some is expected."""
WRITES = ("create", "update", "patch", "delete")
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": [f"system:serviceaccount:{SYSTEM}:{OPERATOR}"]}, {"level": "None"}],
}


@dataclass(frozen=True)
class Phase:
    """What one phase cost the operator."""

    name: str
    wall_s: float
    """Until its last request."""
    cpu_s: float
    rss_mb: float
    """Afterwards."""
    calls: dict[str, int]
    """Requests by `verb resource`, without those for the Lease and those that began before."""

    @property
    def writes(self) -> int:
        """Requests that change something."""
        return sum(count for call, count in self.calls.items() if is_write(call))


def is_write(call: str) -> bool:
    """Whether it changes something; asking who one is (`selfsubjectreviews`) does not."""
    verb, _, kind = call.partition(" ")
    return verb in WRITES and kind != "selfsubjectreviews"


class Audit:
    """The operator's requests, as the API server wrote them down."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.watches: list[str] = []
        """Request URIs of all watches that it ever began."""

    def calls(self) -> list[str]:
        """`verb resource` of requests since the last look, the Lease's aside."""
        with self._path.open() as log:
            log.seek(self._read)
            text = log.read()
        whole = text[: text.rfind("\n") + 1]
        self._read += len(whole.encode())
        found: list[str] = []
        for line in whole.splitlines():
            event = json.loads(line)
            watch, started = event["verb"] == "watch", event["stage"] == "ResponseStarted"
            if watch and started:
                self.watches.append(event["requestURI"])
            if watch != started:
                continue
            about = event.get("objectRef", {})
            if about.get("resource") != "leases":
                kind = "/".join(it for it in (about.get("resource", event["requestURI"]), about.get("subresource")) if it)
                found.append(f"{event['verb']} {kind}")
        return found


class Operator:
    """The operator's process."""

    def __init__(self, kubeconfig: Path, log: Path, resync_s: float) -> None:
        command = [Path(sys.executable).with_name("penstock"), "operator", f"--kubeconfig={kubeconfig}", f"--resync={resync_s}"]
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file)
        self.is_new = True
        """Nobody has looked at it yet."""

    def stop(self) -> None:
        """By SIGTERM, as a kubelet does."""
        self._process.terminate()
        self._process.wait(timeout=60)

    async def metrics(self) -> str:
        """What it tells Prometheus."""
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{HTTP_PORT}/metrics") as answer:
            return await answer.text()

    async def reconciles(self) -> float:
        """Keys that it has looked at."""
        try:
            families = text_string_to_metric_families(await self.metrics())
        except aiohttp.ClientConnectionError:
            return 0.0  # it has just been started
        samples = [it for family in families for it in family.samples if it.name == f"{metrics.RECONCILES}_total"]
        return sum(it.value for it in samples)

    @property
    def cpu_s(self) -> float:
        """User and system time since its start."""
        return cpu_s(self._process.pid)

    def memory_mb(self, what: str = "VmRSS") -> float:
        """`VmRSS`, or the most there ever was: `VmHWM`. Megabytes of 10^6 bytes."""
        if self._process.poll() is not None:
            raise SystemExit(f"the operator ended with {self._process.returncode}")
        return memory_bytes(self._process.pid, what) / 1e6


def ready(pod: Object, value: bool) -> Object:
    """The pod with its kubelet's word."""
    status = "True" if value else "False"
    conditions = [{"type": it, "status": status} for it in ("Initialized", "Ready", "ContainersReady", "PodScheduled")]
    container = {
        "name": "engine",
        "image": "penstock/engine",
        "imageID": "sha256:0",
        "ready": value,
        "restartCount": 0,
        "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
    }
    return {
        **pod,
        "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": conditions, "containerStatuses": [container]},
    }


class Bench:
    """The world around the operator."""

    def __init__(
        self, client: Any, etcd: aiohttp.ClientSession, audit: Audit, options: argparse.Namespace, console: Console
    ) -> None:
        self.api = ServerApi(client)
        self._client, self._etcd, self._audit, self._options, self._console = client, etcd, audit, options, console
        self.phases: list[Phase] = []
        self._pods: list[Object] = []

    @property
    def watches(self) -> list[str]:
        """Request URIs of all watches that the operator began."""
        return self._audit.watches

    async def phase(self, name: str, operator: Operator, work: Awaitable[None] | None = None, least: float = 0.0) -> Phase:
        """Does `work`, waits until the operator has looked at `least` keys and then done nothing for a while, and says what that
        cost it."""
        began, last, cpu = time.monotonic(), time.monotonic(), operator.cpu_s
        done_before = seen = 0.0 if operator.is_new else await operator.reconciles()
        operator.is_new = False
        calls: Counter[str] = Counter()
        working = asyncio.ensure_future(work) if work is not None else None
        while (working and not working.done()) or time.monotonic() - last < QUIET_S or seen - done_before < least:
            await asyncio.sleep(LOOK_S)
            more, now = Counter(self._audit.calls()), await operator.reconciles()
            calls.update(more)
            if now != seen or any(map(is_write, more)):
                last, seen = time.monotonic(), now
            elif time.monotonic() - last > PATIENCE_S:
                raise SystemExit(f"{name}: after {seen - done_before:g} keys the operator looked at nothing for {PATIENCE_S:g} s")
        if working:
            await working
        return self._took(name, last - began, operator.cpu_s - cpu, operator, calls)

    async def rest(self, operator: Operator) -> Phase:
        """Nothing happens for a while."""
        self._audit.calls()  # what was before
        cpu = operator.cpu_s
        await asyncio.sleep(STEADY_S)
        name = f"{STEADY_S:g} s of nothing, two looks at everything"
        return self._took(name, STEADY_S, operator.cpu_s - cpu, operator, Counter(self._audit.calls()))

    async def scrape_ms(self, operator: Operator) -> float:
        """CPU milliseconds of one scrape while nothing happens."""
        await operator.metrics()
        cpu = operator.cpu_s
        for _ in range(SCRAPES):
            await operator.metrics()
        return round(1000 * (operator.cpu_s - cpu) / SCRAPES, 2)

    def _took(self, name: str, wall: float, cpu: float, operator: Operator, calls: Counter[str]) -> Phase:
        done = Phase(name, round(wall, 1), round(cpu, 2), round(operator.memory_mb(), 1), dict(calls.most_common()))
        self.phases.append(done)
        self._console.print(f"{name}: {done.wall_s} s, CPU {done.cpu_s} s, {done.rss_mb} MB, {done.writes} writes")
        return done

    async def each(self, items: Iterable[Any], do: Callable[[Any], Awaitable[Any]]) -> None:
        """Does it for all, a few at a time."""
        waiting = iter(items)

        async def work() -> None:
            for item in waiting:
                await do(item)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))

    async def apply_models(self, **limits: int) -> None:
        """All models, as their users write them."""
        await self.each(range(self._options.models), lambda number: self.api.apply(self._model(number, limits), MANAGER))

    def _model(self, number: int, limits: dict[str, int]) -> Object:
        name = f"model-{number:04}"
        spec = {
            "served": {"name": name},
            "source": {"uri": f"hf://org/{name}"},
            "replicas": self._options.replicas,
            "pools": [{"name": "main"}],
            "engine": {"limits": limits},
        }
        head = {"apiVersion": f"{labels.GROUP}/{labels.VERSION}", "kind": "InferenceModel"}
        return head | {"metadata": {"name": name, "namespace": HERE}, "spec": spec}

    async def make_pods(self) -> None:
        """What the Deployment and ReplicaSet controllers, the scheduler and kubelets would do."""
        deployments, _ = await list_all(self._client, DEPLOYMENTS.path(HERE), {"labelSelector": labels.MODEL})
        await self.each(deployments, self._replicas_of)

    async def _replicas_of(self, deployment: Object) -> None:
        meta, spec = deployment["metadata"], deployment["spec"]
        template = spec["template"]
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": meta["name"], "uid": meta["uid"], "controller": True}
        pods: list[Object] = []
        for number in range(spec["replicas"]):
            head = {
                **template["metadata"],
                "name": f"{meta['name']}-{number}",
                "namespace": HERE,
                "uid": str(uuid4()),
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "ownerReferences": [owner],
            }
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": head,
                "spec": {**template["spec"], "nodeName": f"node-{number}"},
            }
            pods.append(pod)
            await self._store(ready(pod, True))
        self._pods += pods
        counts = dict.fromkeys(("replicas", "readyReplicas", "updatedReplicas", "availableReplicas"), spec["replicas"])
        await self._write_status(deployment, {"observedGeneration": meta["generation"], **counts})

    async def set_all_ready(self, value: bool) -> None:
        """All kubelets at once."""
        await self.each(self._pods, lambda pod: self._store(ready(pod, value)))

    async def _store(self, pod: Object) -> None:
        """Past the API server, straight into its etcd: it would spend more on 10,000 writes than the operator on everything.
        Each is a revision of its own, as all that the API server writes: a watch that is resumed within a revision of many loses
        the rest of it."""

        def coded(text: str) -> str:
            return base64.b64encode(text.encode()).decode()

        put = {"key": coded(f"/registry/pods/{HERE}/{pod['metadata']['name']}"), "value": coded(json.dumps(pod))}
        async with self._etcd.post(f"{ETCD}/v3/kv/put", json=put) as answer:
            answer.raise_for_status()

    async def _write_status(self, item: Object, status: Object) -> None:
        head = {"name": item["metadata"]["name"], "namespace": HERE}
        await self.api.apply(
            {"apiVersion": item["apiVersion"], "kind": item["kind"], "metadata": head, "status": status}, MANAGER, "status"
        )

    async def judged(self) -> Counter[str]:
        """Models by the reason of Ready, and by whether the status is about the present spec."""
        models, _ = await list_all(self._client, MODELS.path(HERE), {})
        found: Counter[str] = Counter()
        for model in models:
            status = model.get("status", {})
            reasons = [it["reason"] for it in status.get("conditions", []) if it["type"] == "Ready"]
            current = status.get("observedGeneration") == model["metadata"]["generation"]
            found[reasons[0] if reasons and current else "stale"] += 1
        return found


@contextmanager
def api_server(console: Console) -> Iterator[tuple[Cluster, Path]]:
    """An API server with our CRDs and Roles, and its audit log of the operator."""
    cluster = Cluster(f"penstock-bench-{os.getpid()}")
    cluster.create()
    policy, log = cluster.state / "audit-policy.json", cluster.state / "audit.log"
    policy.write_text(json.dumps(POLICY))
    try:
        with network.entered(cluster.name):
            flags = [f"--audit-policy-file={policy}", f"--audit-log-path={log}"]
            crds = sorted(REPOSITORY.glob("manifests/crds/*.yaml"))
            cluster.start(crds, Phases(console.print), controllers=False, api_server_flags=flags)
            cluster.kubectl("create", "namespace", SYSTEM)
            cluster.kubectl("create", "serviceaccount", "default", f"--namespace={HERE}")
            cluster.kubectl("apply", "--server-side", f"--kustomize={REPOSITORY / 'manifests/rbac'}")
            yield cluster, log
    finally:
        cluster.stop()
        shutil.rmtree(cluster.state, ignore_errors=True)


@asynccontextmanager
async def bench(cluster: Cluster, log: Path, options: argparse.Namespace, console: Console) -> AsyncIterator[Bench]:
    client = await connect(str(cluster.kubeconfig))
    try:
        async with aiohttp.ClientSession() as etcd:
            yield Bench(client, etcd, Audit(log), options, console)
    finally:
        await client.close()


async def measure(cluster: Cluster, log: Path, options: argparse.Namespace, console: Console) -> Object:
    kubeconfig = cluster.service_account_kubeconfig(SYSTEM, OPERATOR)
    said, models = Path(options.log), options.models
    async with bench(cluster, log, options, console) as world:
        with ExitStack() as ending:
            operator = Operator(kubeconfig, said, resync_s=3600)
            ending.callback(lambda: operator.stop())
            await world.phase("all models applied", operator, world.apply_models(), least=models)
            await world.phase("all replicas ready", operator, world.make_pods(), least=models)
            console.print(f"Ready: {dict(await world.judged())}")
            operator.stop()
            operator = Operator(kubeconfig, said, resync_s=STEADY_S / 2)
            start = await world.phase("operator restarted", operator, least=models)
            start_peak = operator.memory_mb("VmHWM")
            steady = await world.rest(operator)
            scrape_ms = await world.scrape_ms(operator)
            change = await world.phase("all specs changed", operator, world.apply_models(maxNumSeqs=16), least=models)
            console.print(f"Ready: {dict(await world.judged())}")
            outage = await world.phase("all replicas not ready", operator, world.set_all_ready(False), least=models)
            console.print(f"Ready: {dict(await world.judged())}")
            peak = operator.memory_mb("VmHWM")
        unselected = [uri for uri in world.watches if "labelSelector" not in parse_qs(urlsplit(uri).query)]
        return {
            "models": models,
            "pods": models * options.replicas,
            "phases": [asdict(it) | {"writes": it.writes} for it in world.phases],
            "start_peak_mb": round(start_peak, 1),
            "peak_mb": round(peak, 1),
            "start_writes": start.writes,
            "steady_writes": steady.writes,
            "steady_cpu_share": round(steady.cpu_s / STEADY_S, 4),
            "scrape_cpu_ms": scrape_ms,
            "writes_per_changed_spec": round(change.writes / models, 2),
            "writes_per_model_of_an_outage": round(outage.writes / models, 2),
            "watches_without_a_label_selector": sorted({urlsplit(uri).path for uri in unselected}),
        }


def show(result: Object, console: Console) -> None:
    table = Table(
        "phase", "seconds", "CPU s", "MB", "writes", "requests", title=f"{result['models']} models, {result['pods']} pods"
    )
    for phase in result["phases"]:
        calls = ", ".join(f"{count} {call}" for call, count in list(phase["calls"].items())[:6])
        table.add_row(
            phase["name"], f"{phase['wall_s']:g}", f"{phase['cpu_s']:g}", f"{phase['rss_mb']:g}", str(phase["writes"]), calls
        )
    console.print(table)
    for name, value in result.items():
        if name != "phases":
            console.print(f"{name}: {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=5, help="of each (default: %(default)s)")
    parser.add_argument("--log", default=os.devnull, help="the operator's; default: nowhere")
    options = parser.parse_args()
    console = Console(highlight=False, width=160)
    with api_server(console) as (cluster, log):
        result = asyncio.run(measure(cluster, log, options, console))
    show(result, console)
    path = write_results("operator", result)
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
