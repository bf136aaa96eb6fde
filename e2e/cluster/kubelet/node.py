"""The node: registers, keeps its lease, follows the pods bound to it, sends Events."""

import json
import logging
import platform
import queue
import threading
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import network
from e2e.cluster.commands import run
from e2e.cluster.kubelet.api import CONNECTION_ERRORS, Api, ApiError, Object, micro_timestamp, timestamp
from e2e.cluster.kubelet.pod import Pod
from e2e.cluster.kubelet.sandbox import Addresses

logger = logging.getLogger(__name__)

HEARTBEAT = 5.0  # seconds
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


@dataclass(frozen=True)
class NodeConfig:
    """What a node is started with."""

    name: str
    folder: Path
    """Pods' files; its file system must suit overlayfs as an upper layer."""
    logs: Path
    netns_prefix: str
    """How the names of the pods' network namespaces begin."""
    kubernetes_version: str
    capacity: Mapping[str, str]
    labels: Mapping[str, str]
    environment: Mapping[str, str]
    """What every container's environment starts from, as an image's would."""
    programs: Path
    """A JSON file with the commands that stand in for images (`sandbox.program_of`)."""


class Node:
    """run() returns when stop() was called; the caller has entered the cluster's network namespace."""

    def __init__(self, api: Api, config: NodeConfig) -> None:
        self.api, self.config = api, config
        self.stopping = threading.Event()
        self._events: queue.Queue[tuple[str, Object]] = queue.Queue()
        self._pods: dict[str, Pod] = {}  # by UID
        self._gone: set[str] = set()  # UIDs that an old watch event may still mention
        self._started = timestamp()
        self._sweep()  # what a kubelet of that name that was killed has left
        self.addresses = Addresses(self._register())
        self.address = f"{self.addresses.prefix}.1"

    def run(self) -> None:
        try:
            run("ip", "addr", "replace", f"{self.address}/16", "dev", network.BRIDGE)
            threading.Thread(target=self._beat, daemon=True).start()
            threading.Thread(target=self._send_events, daemon=True).start()
            threading.Thread(target=self._follow, daemon=True).start()
            logger.info("node %s: pods get addresses in %s.0/24", self.config.name, self.addresses.prefix)
            self.stopping.wait()
            time.sleep(0.3)  # for pods' threads to see it, so that none starts a container that nobody would kill
        finally:
            self._sweep()

    def stop(self) -> None:
        self.stopping.set()

    def forget(self, pod: Pod) -> None:
        """A pod has ended."""
        self.addresses.give_back(pod.uid)
        self._gone.add(pod.uid)
        self._pods.pop(pod.uid, None)

    def send_event(self, reference: Object, kind: str, reason: str, message: str) -> None:
        times = {"firstTimestamp": timestamp(), "lastTimestamp": timestamp(), "count": 1}
        source = {"component": "process-kubelet", "host": self.config.name}
        event = {"metadata": {"generateName": f"{reference['name']}."}, "involvedObject": reference, "source": source, **times}
        self._events.put((reference["namespace"], event | {"type": kind, "reason": reason, "message": message}))

    def _sweep(self) -> None:
        for name in network.namespaces(self.config.netns_prefix):
            network.remove(name)

    # ---- the node itself

    def _register(self) -> str:
        """The first three numbers of the /24 that the controller manager gives this node for its pods."""
        name = self.config.name
        labels = {
            "kubernetes.io/hostname": name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            **self.config.labels,
        }
        try:
            self.api.post("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
        except ApiError as problem:
            if problem.status != 409:
                raise
            self.api.patch(f"/api/v1/nodes/{name}", {"metadata": {"labels": labels}}, "merge-patch")
        while not (cidr := self.api.get(f"/api/v1/nodes/{name}")["spec"].get("podCIDR")):
            time.sleep(0.1)
        return cidr.rsplit(".", 1)[0]

    def _beat(self) -> None:
        """Renew the lease; report the node's status every sixth time."""
        beat = 0
        while not self.stopping.is_set():
            try:
                self._renew_lease()
                if beat % 6 == 0:
                    self._report()
            except (ApiError, *CONNECTION_ERRORS) as problem:
                logger.warning("heartbeat: %r", problem)
            beat += 1
            self.stopping.wait(HEARTBEAT)

    def _renew_lease(self) -> None:
        spec = {"holderIdentity": self.config.name, "leaseDurationSeconds": 40, "renewTime": micro_timestamp()}
        lease = {"metadata": {"name": self.config.name}, "spec": spec}
        try:
            self.api.patch(f"{LEASES}/{self.config.name}", lease, "merge-patch")
        except ApiError as problem:
            if problem.status != 404:
                raise
            self.api.post(LEASES, lease)

    def _report(self) -> None:
        # More than any machine has: tests' processes are small, whatever their pods request.
        capacity = {"cpu": "1000", "memory": "4Ti", "ephemeral-storage": "20Gi", "pods": "110"}
        capacity |= self.config.capacity
        times = {"lastHeartbeatTime": timestamp(), "lastTransitionTime": self._started}
        kinds = ("Ready", "MemoryPressure", "DiskPressure", "PIDPressure")
        conditions = [{"type": kind, "status": str(kind == "Ready"), "reason": "ProcessKubelet", **times} for kind in kinds]
        identity = {"machineID": self.config.name, "systemUUID": self.config.name, "bootID": self._started}
        versions = {
            "kubeletVersion": self.config.kubernetes_version,
            "kubeProxyVersion": "",
            "containerRuntimeVersion": "process://1",
        }
        system = {
            "osImage": "processes",
            "kernelVersion": platform.release(),
            "operatingSystem": "linux",
            "architecture": "amd64",
        }
        found = [{"type": "InternalIP", "address": self.address}, {"type": "Hostname", "address": self.config.name}]
        status = {"capacity": capacity, "allocatable": capacity, "conditions": conditions, "addresses": found}
        self.api.patch(
            f"/api/v1/nodes/{self.config.name}/status", {"status": status | {"nodeInfo": identity | versions | system}}
        )

    def _send_events(self) -> None:
        while True:
            namespace, event = self._events.get()
            try:
                self.api.post(f"/api/v1/namespaces/{namespace}/events", event)
            except (ApiError, *CONNECTION_ERRORS) as problem:
                logger.warning("event: %r", problem)

    # ---- its pods

    def _follow(self) -> None:
        """List the node's pods, then watch them, again and again."""
        path = "/api/v1/pods?fieldSelector=" + urllib.parse.quote(f"spec.nodeName={self.config.name}")
        while not self.stopping.is_set():
            try:
                self._watch(path, self._list(path))
            except (ApiError, *CONNECTION_ERRORS) as problem:
                logger.warning("watch: %r", problem)
                time.sleep(1)

    def _list(self, path: str) -> str:
        """The resource version of the list."""
        listed = self.api.get(path)
        for pod in sorted(listed["items"], key=lambda pod: "podIP" not in pod["status"]):  # those that have an address keep it
            self._see("MODIFIED", pod)
        for uid in self._pods.keys() - {pod["metadata"]["uid"] for pod in listed["items"]}:
            self._see("DELETED", self._pods[uid].resource)
        return listed["metadata"]["resourceVersion"]

    def _watch(self, path: str, version: str) -> None:
        with self.api.open("GET", f"{path}&watch=1&timeoutSeconds=300&resourceVersion={version}", timeout=310) as stream:
            for line in stream:
                change = json.loads(line)
                if change["type"] == "ERROR":  # the version is too old: list anew
                    return
                self._see(change["type"], change["object"])

    def _see(self, kind: str, resource: Object) -> None:
        """Take in one change of a pod bound to this node."""
        uid = resource["metadata"]["uid"]
        if uid in self._gone:
            return
        known = self._pods.get(uid)
        if kind == "DELETED":
            if known:
                known.kill()
            return
        if not known:
            if resource["status"].get("phase") in ("Succeeded", "Failed"):
                return
            known = self._pods[uid] = Pod(self, resource)
            known.start()
        known.update(resource)
