"""A Deployment as processes: keeps as many pods of the newest template as asked for, replacing old ones one at a time."""

import asyncio
import hashlib
import json
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.operator.local.pod import Phase, Pod


class LocalDeployment:
    """The pods of one Deployment.

    Args:
        manifest: The Deployment as it would be applied to Kubernetes.
        addresses: Addresses for its pods, each handed out once.
        logs: Folder for the pods' logs.
    """

    def __init__(self, manifest: dict[str, Any], addresses: Iterator[str], logs: Path) -> None:
        self.manifest = manifest
        self.name: str = manifest["metadata"]["name"]
        self.replicas: int = manifest["spec"].get("replicas", 1)
        self.pods: list[Pod] = []
        self._addresses = addresses
        self._logs = logs
        self.leaving: dict[Pod, asyncio.Task[None]] = {}
        """Pods that finish what they run, with the task that waits for their end."""

    @property
    def ready(self) -> int:
        """Pods that are ready, of any template."""
        return sum(pod.phase is Phase.READY for pod in self.pods)

    def template_hash(self) -> str:
        """Names the present template."""
        template = json.dumps(self.manifest["spec"]["template"], sort_keys=True)
        return hashlib.sha256(template.encode()).hexdigest()[:10]

    def step(self) -> None:
        """Starts and stops what brings the pods closer to the manifest; call it again after every change."""
        wanted = self.template_hash()
        new = [pod for pod in self.pods if pod.template_hash == wanted]
        old = [pod for pod in self.pods if pod.template_hash != wanted]
        # A surge of one: an old pod goes only when a new one is ready in its place.
        while len(new) < self.replicas and len(new) + len(old) < self.replicas + bool(old):
            new.append(self._start(wanted))
        spare = sum(pod.phase is Phase.READY for pod in new) + len(old) - self.replicas
        for pod in old[: max(spare, 0)]:
            self.remove(pod)
        for pod in sorted(new, key=lambda pod: pod.phase is Phase.READY)[: max(len(new) - self.replicas, 0)]:
            self.remove(pod)

    def scale(self, replicas: int, victims: Sequence[str]) -> None:
        """Sets the size; the pods with the UIDs `victims` go first."""
        self.replicas = replicas
        excess = len(self.pods) - replicas
        for pod in [pod for pod in self.pods if pod.uid in victims][: max(excess, 0)]:
            self.remove(pod)
        self.step()

    def spare(self) -> None:
        """Lets cordoned pods have requests again where none is to go any more."""
        if len(self.pods) <= self.replicas:
            for pod in self.pods:
                pod.cordoned = False

    def remove(self, pod: Pod) -> None:
        """Lets a pod finish what it runs and end; it is no member from now on."""
        self.pods.remove(pod)
        pod.cordoned = True
        task = self.leaving[pod] = asyncio.create_task(pod.stop(), name=f"stop {pod.name}")
        task.add_done_callback(lambda _: self.leaving.pop(pod))

    async def close(self) -> None:
        """Stops every pod and returns when all are gone."""
        for pod in list(self.pods):
            self.remove(pod)
        await asyncio.gather(*self.leaving.values())

    def _start(self, template_hash: str) -> Pod:
        name = f"{self.name}-{secrets.token_hex(3)}"
        pod = Pod(name, next(self._addresses), self.manifest["spec"]["template"], template_hash, self._logs / f"{name}.log")
        self.pods.append(pod)
        pod.start()
        return pod
