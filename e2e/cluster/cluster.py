"""One cluster: its control plane, its nodes, and what a test asks of it."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from e2e.cluster import build, crds, network
from e2e.cluster.commands import CommandError, TestbedError, check_machine, run
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.dns import start_dns
from e2e.cluster.phases import Phases
from e2e.cluster.pki import Pki
from e2e.cluster.processes import Processes
from e2e.waiting import eventually

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = "programs.json"
KUBELET = "kubelet-"  # what the processes of nodes are called, before the node's name


class Cluster:
    """A cluster of that name: its network namespace, its state in `$TMPDIR/NAME`.

    start(), add_node() and everything that asks the cluster are called from inside its network (`network.entered(name)`),
    stop() from outside.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = Path(tempfile.gettempdir()) / name
        self.programs = build.programs_folder()
        self.processes = Processes(self.state, name)
        self._pki = Pki(self.state)

    # ---- life

    def create(self) -> None:
        """Make the network and the folders. Raises TestbedError when this machine cannot, or the name is taken."""
        check_machine(self.state)
        if missing := [*build.missing_programs(), *(source.module for source in crds.missing(self.programs))]:
            raise TestbedError(f"not built yet: {', '.join(missing)} (run: python -m e2e.cluster build)")
        if self.exists():
            raise TestbedError(f"a cluster named {self.name} is up already (python -m e2e.cluster --name {self.name} down)")
        shutil.rmtree(self.state, ignore_errors=True)  # the logs of the one before
        self.state.mkdir(mode=0o700)
        self.processes.create_folders()
        network.create_cluster_network(self.name)

    def exists(self) -> bool:
        return self.name in network.namespaces(self.name)

    def start(
        self, manifests: Sequence[Path], phases: Phases, *, controllers: bool = True, api_server_flags: Sequence[str] = ()
    ) -> None:
        """Start the control plane; without `controllers` only what answers the API. The manifests (CRDs, say) are applied before
        the controllers start: the garbage collector then knows their kinds from its first moment, where one made later is found
        only at a rediscovery, up to 40 s after."""
        if controllers:  # there will be nodes, and Python in their pods
            with phases("byte code"):
                build.compile_python(sorted(REPOSITORY.glob("*/penstock")))
        with phases("keys and certificates"):
            self._pki.create()
        plane = self._control_plane()
        with phases("etcd"):
            plane.start_etcd()
        with phases("kube-apiserver"):
            plane.start_api_server(api_server_flags)
        if manifests:
            with phases("manifests applied"):
                self.kubectl("apply", "--server-side", *(f"--filename={path}" for path in manifests))
                self.await_crds("crd", "--all")
        if not controllers:
            return
        with phases("controllers and scheduler"):
            plane.start_controllers()
        with phases("DNS"):
            start_dns(self.processes, self._pki)

    def restart_control_plane(self) -> None:
        """etcd and all that stands on it killed at once, then started anew with what etcd had written."""
        plane = self._control_plane()
        plane.kill()
        plane.start_etcd()
        plane.start_api_server()
        plane.start_controllers()

    def _control_plane(self) -> ControlPlane:
        return ControlPlane(self.state, self.programs, self.processes, self._pki)

    def stop(self) -> None:
        """Stop everything and throw the state away, but for the logs. Safe to repeat, and from any process."""
        for name in self.processes.names():
            if name.startswith(KUBELET):  # first, so that nodes end their pods
                self.processes.stop(name)
        for pod in network.namespaces(f"{self.name}@"):  # of a node that was killed
            network.remove(pod)
        if self.exists():
            network.remove(self.name)
        self.processes.reap()
        for path in self.state.glob("*"):
            if path != self.processes.logs:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    # ---- nodes

    def add_node(self, name: str, *, capacity: Mapping[str, int] | None = None, labels: Mapping[str, str] | None = None) -> None:
        """A node that runs pods as processes; `capacity` adds resources such as nvidia.com/gpu (no device is handed to a pod)."""
        kubeconfig = self._pki.kubeconfig(name)
        if not kubeconfig.exists():
            self._pki.create_client(name, f"/O=system:nodes/CN=system:node:{name}")  # what the Node authorizer wants
        command = [sys.executable, "-m", "e2e.cluster.kubelet", f"--kubeconfig={kubeconfig}", f"--node={name}"]
        command += [f"--folder={self.state / 'pods' / name}", f"--logs={self.processes.logs / 'pods'}"]
        command += [f"--netns-prefix={self.name}@{name}@", f"--kubernetes-version={build.kubernetes_version()}"]
        command += [f"--programs={self.state / PROGRAMS}"]
        command += [f"--capacity={resource}={amount}" for resource, amount in (capacity or {}).items()]
        command += [f"--label={key}={value}" for key, value in (labels or {}).items()]
        self.processes.start(KUBELET + name, command, cwd=REPOSITORY, env=self._node_environment())
        self.processes.wait_until_ready(KUBELET + name, lambda: self._is_ready(name))
        if "kube-proxy" not in self.processes.names():
            self._start_proxy(name)

    def run_for_images(self, programs: Mapping[str, Sequence[str | Path]]) -> None:
        """From now on containers of these images (named without a tag) that say no command run this instead, with their args."""
        said = {image: [str(word) for word in command] for image, command in programs.items()}
        (self.state / PROGRAMS).write_text(json.dumps(said))

    def lose_node(self, name: str) -> None:
        """As a machine without power: its pods fall silent, not even a connection is closed, and nobody tells the API server."""
        self.processes.stop(KUBELET + name, seconds=0)
        pods = network.namespaces(f"{self.name}@{name}@")
        for pod in pods:
            network.disconnect(pod)
        for pod in pods:
            network.remove(pod)

    def _is_ready(self, node: str) -> bool:
        try:
            conditions = self.get("node", node).get("status", {}).get("conditions", [])
        except CommandError:  # not registered yet
            return False
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    def _node_environment(self) -> dict[str, str]:
        """Pods inherit PATH: their commands (`penstock …`) are found in this very virtual environment."""
        keep = {key: os.environ[key] for key in ("HOME", "LANG") if key in os.environ}
        return keep | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}

    def _start_proxy(self, node: str) -> None:
        """The nodes share one network namespace, so one kube-proxy serves them all.

        Masquerading makes answers come back the way they went: pods would else reply to each other directly over the bridge.
        """
        command = [
            self.programs / "kube-proxy",
            f"--kubeconfig={self._pki.kubeconfig('kube-proxy')}",
            f"--hostname-override={node}",
        ]
        command += ["--proxy-mode=nftables", f"--cluster-cidr={network.POD_CIDR}", "--masquerade-all"]
        command += ["--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0"]
        self.processes.start("kube-proxy", command)

        def ready() -> bool:
            try:
                return httpx.get("http://127.0.0.1:10256/livez", trust_env=False, timeout=2).is_success
            except httpx.TransportError:
                return False

        self.processes.wait_until_ready("kube-proxy", ready)

    # ---- asking it

    @property
    def kubeconfig(self) -> Path:
        """The admin's."""
        return self._pki.kubeconfig("admin")

    @property
    def environment(self) -> dict[str, str]:
        """What a command needs to talk to the cluster: kubectl on PATH, the admin's kubeconfig, no proxy on the way."""
        return {
            "KUBECONFIG": str(self.kubeconfig),
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "NO_PROXY": "*",
            "no_proxy": "*",
        }

    def await_crds(self, *which: str) -> None:
        """Waits for CRDs to be established. Tried again: one without conditions, as it is at first, is an error to kubectl."""
        eventually(lambda: self.kubectl("wait", "--for=condition=Established", *which, "--timeout=120s"))

    def kubectl(self, *args: str, stdin: str | None = None, kubeconfig: Path | None = None, timeout: float = 125) -> str:
        """kubectl's standard output. Raises CommandError with what it said when it fails. `timeout` in seconds."""
        who = f"--kubeconfig={kubeconfig or self.kubeconfig}"
        return run(self.programs / "kubectl", who, *args, stdin=stdin, env=dict(os.environ) | self.environment, timeout=timeout)

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any]:
        return json.loads(self.kubectl("get", kind, name, f"--namespace={namespace}", "--output=json"))

    def list(self, kind: str, namespace: str = "default", selector: str = "") -> list[dict[str, Any]]:
        listed = self.kubectl("get", kind, f"--namespace={namespace}", f"--selector={selector}", "--output=json")
        return json.loads(listed)["items"]

    def apply(self, *resources: Mapping[str, Any], namespace: str = "default") -> None:
        self.kubectl("apply", f"--namespace={namespace}", "--filename=-", stdin=yaml.safe_dump_all(resources))

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """A kubeconfig with a token of that ServiceAccount: what RBAC does not grant it fails in the test, not at a user's."""
        token = self.kubectl("create", "token", name, f"--namespace={namespace}", "--duration=2h").strip()
        return self._pki.write_kubeconfig(f"{namespace}.{name}", {"token": token})

    def server_certificate(self, name: str) -> tuple[Path, Path, Path]:
        """Certificate, key, and the authority's certificate, for a server that the API server is to trust under that DNS name."""
        return self._pki.create_server(name)

    def log_tails(self, lines: int = 15) -> Iterator[tuple[str, str]]:
        """(name, end of the log) of each program and container that said anything."""
        for path in sorted(self.processes.logs.rglob("*.log")):
            if said := path.read_text(errors="replace").splitlines()[-lines:]:
                yield str(path.relative_to(self.processes.logs)), "\n".join(said)


@contextmanager
def running(name: str, manifests: Sequence[Path], phases: Phases) -> Iterator[Cluster]:
    """A cluster with two nodes, the first with eight GPUs; the caller is in its network meanwhile. It goes whatever happens."""
    cluster = Cluster(name)
    cluster.create()
    try:
        with network.entered(name):
            cluster.start(manifests, phases)
            add_default_nodes(cluster, phases)
            yield cluster
    finally:
        with phases("cluster stopped"):
            cluster.stop()


def add_default_nodes(cluster: Cluster, phases: Phases) -> None:
    with phases("two nodes ready"):
        cluster.add_node("node-1", capacity={"nvidia.com/gpu": 8}, labels={"penstock.dev/gpu": "h200"})
        cluster.add_node("node-2")
