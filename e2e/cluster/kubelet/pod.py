"""One pod: a thread that starts and restarts its containers and reports their state."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from e2e.cluster import network
from e2e.cluster.commands import CommandError
from e2e.cluster.kubelet.api import CONNECTION_ERRORS, ApiError, Object, timestamp
from e2e.cluster.kubelet.container import DEFAULT_GRACE, Container
from e2e.cluster.kubelet.inputs import Inputs
from e2e.cluster.kubelet.sandbox import Volumes

if TYPE_CHECKING:
    from e2e.cluster.kubelet.node import Node

logger = logging.getLogger(__name__)


class Pod(threading.Thread):
    """Ends when the pod is deleted or the node stops; `ending` is the grace period in seconds once it is to go."""

    def __init__(self, node: Node, resource: Object) -> None:
        super().__init__(daemon=True)
        metadata = resource["metadata"]
        self.node, self.resource, self.spec, self.uid = node, resource, resource["spec"], metadata["uid"]
        self.namespace, self.pod_name = metadata["namespace"], metadata["name"]
        self.id = f"{self.namespace}/{self.pod_name}"
        self.path = f"/api/v1/namespaces/{self.namespace}/pods/{self.pod_name}"
        directory = f"{self.namespace}_{self.pod_name}_{self.uid[:8]}"
        self.folder, self.logs = node.config.folder / directory, node.config.logs / directory
        self.netns = node.config.netns_prefix + self.uid[:12]
        self.volumes = Volumes(self.folder / "volumes")
        self.ending: float | None = None
        self.done = False
        self.grace: float = self.spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE)
        self.address = node.addresses.take(self.uid, resource["status"].get("podIP"))
        self.inputs = Inputs(node.api, resource, self.address, node.config.name, node.address, node.config.environment)
        self._sent: Object | None = None
        self._since: dict[str, tuple[bool, str]] = {}  # condition: its value, and since when
        self._start_time = timestamp()
        reported = [*resource["status"].get("initContainerStatuses", []), *resource["status"].get("containerStatuses", [])]
        previous = {status["name"]: status for status in reported}
        self.containers = [
            Container(self, spec, init=init, previous=previous.get(spec["name"]))
            for init, key in ((True, "initContainers"), (False, "containers"))
            for spec in self.spec.get(key, [])
        ]
        self.main = [container for container in self.containers if not container.init]

    # ---- life

    def run(self) -> None:
        try:
            network.create_pod_network(self.netns, f"v{self.uid[:12].replace('-', '')}", self.address)
        except CommandError as problem:
            self.event("Warning", "FailedCreatePodSandBox", str(problem))
            logger.error("%s: %s", self.id, problem)
            self.ending = 0
        self.logs.mkdir(parents=True, exist_ok=True)
        while self.ending is None and not self._guarded(lambda: self.volumes.create(self.spec, self.inputs)):
            time.sleep(2)
        while self.ending is None and not self.node.stopping.is_set():
            self._step()
            self._guarded(self._report)
            time.sleep(0.1)
        if not self.node.stopping.is_set():  # a node that stops kills everything itself, and reports nothing, as a dead machine
            self._end()

    def _end(self) -> None:
        for container in self.main:
            self.event("Normal", "Killing", f"Stopping container {container.name}")
            container.terminate(self.ending or 0)
        while any(container.process for container in self.containers):
            self._step()
            self._guarded(self._report)
            time.sleep(0.05)
        if network.namespaces(self.netns):
            network.remove(self.netns)  # with processes that had left their container's process group
        for container in self.containers:
            container.give_up()
        self._guarded(self._report)
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        self._guarded(lambda: self.node.api.delete(self.path, options))
        shutil.rmtree(self.folder, ignore_errors=True)
        self.node.forget(self)
        logger.info("%s: gone", self.id)

    def kill(self) -> None:
        """It was deleted with force: no grace."""
        self.ending = 0 if self.ending is None else self.ending
        for container in self.containers:
            container.kill()

    def update(self, resource: Object) -> None:
        """Take in a change of the resource."""
        self.resource = self.inputs.pod = resource
        if "deletionTimestamp" in resource["metadata"] and self.ending is None:
            self.ending = resource["metadata"].get("deletionGracePeriodSeconds", DEFAULT_GRACE)

    def _step(self) -> None:
        """Reap what ended, start what is to run."""
        for container in self.containers:
            container.reap()
        failed_init = any(container.init and container.finished and not container.succeeded for container in self.containers)
        self.done = failed_init or all(container.finished for container in self.main)
        if self.done or self.ending is not None:
            if not any(container.process for container in self.main):  # sidecars end after the others
                for container in self.containers:
                    container.terminate(self.grace if self.ending is None else self.ending)
            return
        for container in self.containers:
            if not container.process and not container.finished and time.monotonic() >= container.not_before:
                container.launch()
            if container.init and not (container.started if container.sidecar else container.succeeded):
                break  # the next ones wait for it

    # ---- what it tells

    def event(self, kind: str, reason: str, message: str) -> None:
        reference = {"apiVersion": "v1", "kind": "Pod", "namespace": self.namespace, "name": self.pod_name, "uid": self.uid}
        self.node.send_event(reference, kind, reason, message)

    def _report(self) -> None:
        status = self._status()
        if status != self._sent:
            self.node.api.patch(f"{self.path}/status", {"metadata": {"uid": self.uid}, "status": status})
            self._sent = status

    def _status(self) -> Object:
        init = [container.status() for container in self.containers if container.init]
        status = {
            "phase": self._phase(),
            "conditions": self._conditions(),
            "hostIP": self.node.address,
            "hostIPs": [{"ip": self.node.address}],
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "startTime": self._start_time,
            "containerStatuses": [container.status() for container in self.main],
        }
        return status | ({"initContainerStatuses": init} if init else {})

    def _phase(self) -> str:
        if self.done:
            failed = any(container.finished and not container.succeeded for container in self.containers if not container.sidecar)
            return "Failed" if failed else "Succeeded"
        begun = any(container.process or container.finished or container.last_state for container in self.main)
        return "Running" if begun else "Pending"

    def _conditions(self) -> list[Object]:
        ready = all(container.ready for container in self.main)
        gates = {condition["type"]: condition["status"] for condition in self.resource["status"].get("conditions", [])}
        open_gates = all(gates.get(gate["conditionType"]) == "True" for gate in self.spec.get("readinessGates", []))
        initialized = all(
            bool(container.started or container.last_state) if container.sidecar else container.succeeded
            for container in self.containers
            if container.init
        )
        not_ready = "PodCompleted" if self.done else "ContainersNotReady"
        return [
            self._condition("PodReadyToStartContainers", True, None),
            self._condition("Initialized", initialized, "ContainersNotInitialized"),
            self._condition("ContainersReady", ready, not_ready),
            self._condition("Ready", ready and open_gates, "ReadinessGatesNotReady" if ready else not_ready),
        ]

    def _condition(self, kind: str, value: bool, reason_if_false: str | None) -> Object:
        if kind not in self._since or self._since[kind][0] != value:
            self._since[kind] = (value, timestamp())
        reason = None if value else reason_if_false
        return {"type": kind, "status": str(value), "lastTransitionTime": self._since[kind][1], "reason": reason}

    def _guarded(self, action: Callable[[], object]) -> bool:
        """Do what talks to the API server; whether it was done. A pod that is gone (404) or replaced (409) ends at once."""
        try:
            action()
            return True
        except ApiError as problem:
            if problem.status in (404, 409):
                self.ending = 0 if self.ending is None else self.ending
            else:
                logger.warning("%s: %s", self.id, problem)
        except ValueError as problem:
            self.event("Warning", "FailedMount", str(problem))
        except CONNECTION_ERRORS as problem:
            logger.warning("%s: %r", self.id, problem)
        return False
