"""A pod as a process on this machine: the part of a kubelet that a Deployment's pod template needs.

The process gets an address of its own in 127.0.0.0/8, so that every pod may listen on the same port and the container spec is
the very one that runs on Kubernetes.
"""

import asyncio
import re
import time
import uuid
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import httpx

from penstock.api.labels import HTTP_PORT
from penstock.operator.local.process import cause_of_end, kill_group, restart_forever, spawn, terminate

PROBE_PERIOD_S = 0.2
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


class Phase(Enum):
    """What a person wants to know of a pod."""

    STARTING = "Starting"
    READY = "Ready"
    NOT_READY = "NotReady"
    TERMINATING = "Terminating"
    CRASHED = "CrashLoopBackOff"


@dataclass(eq=False)
class Pod:
    """One process that is restarted when it ends, probed for readiness, and stopped with grace.

    Args:
        name: As on Kubernetes: the workload's name and a suffix.
        address: Its own address in 127.0.0.0/8.
        template: The Deployment's `spec.template`.
        template_hash: Tells pods of an old template from those of the new one.
        log: Where its output goes.
    """

    name: str
    address: str
    template: dict[str, Any]
    template_hash: str
    log: Path
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    created: float = field(default_factory=time.monotonic)
    phase: Phase = Phase.STARTING
    cordoned: bool = False
    message: str = ""
    """Why it is not ready: the last words of the process."""
    restarts: int = 0
    started_s: float | None = None
    """Seconds from its creation until it was first ready."""
    _process: asyncio.subprocess.Process | None = None
    _task: asyncio.Task[None] | None = None

    @property
    def container(self) -> dict[str, Any]:
        """The container that is run: the pod's first."""
        return self.template["spec"]["containers"][0]

    @property
    def labels(self) -> dict[str, str]:
        """The pod's labels."""
        return self.template["metadata"]["labels"]

    @property
    def url(self) -> str:
        """URL of the engine."""
        return f"http://{self.address}:{self.port(HTTP_PORT)}"

    def port(self, name: str) -> int:
        """The number of a named container port."""
        return self.ports[name]

    @property
    def ports(self) -> dict[str, int]:
        """The numbers of the named container ports."""
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    def command(self) -> tuple[list[str], dict[str, str]]:
        """The command line and the environment, `$(VAR)` and field references resolved; ValueError for what means nothing
        here."""
        fields = {"status.podIP": self.address, "metadata.name": self.name, "metadata.uid": self.uid}
        env: dict[str, str] = {}
        for entry in self.container.get("env", []):
            if "value" in entry:
                env[entry["name"]] = _VARIABLE.sub(lambda match: env.get(match[1], match[0]), entry["value"])
                continue
            path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            if path not in fields:
                raise ValueError(f"env {entry['name']} of {self.name}: only values and fieldRefs {sorted(fields)} work locally")
            env[entry["name"]] = fields[path]
        words = [*self.container.get("command", []), *self.container.get("args", [])]
        return [_VARIABLE.sub(lambda match: env.get(match[1], match[0]), word) for word in words], env

    def start(self) -> None:
        """Begins to run and supervise the process."""
        self._task = asyncio.create_task(restart_forever(self._run), name=f"pod {self.name}")

    async def stop(self) -> None:
        """Lets the process end by itself within its grace period, then ends it."""
        self.phase = Phase.TERMINATING
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None:
            await terminate(self._process, float(self.template["spec"].get("terminationGracePeriodSeconds", 30)))

    def kill(self) -> None:
        """Ends the process at once; a `stop` under way then returns."""
        if self._process is not None:
            kill_group(self._process)

    async def _run(self) -> str:
        self.phase = Phase.STARTING
        try:
            reason = cause_of_end(await self._run_process(), self.log)
        except (OSError, ValueError) as error:  # nothing that could be run
            reason = str(error)
        self.phase, self.message, self.restarts = Phase.CRASHED, reason, self.restarts + 1
        return f"{self.name} ended: {reason}"

    async def _run_process(self) -> int:
        command, env = self.command()
        self._process = await spawn(command, self.log, env)
        probing = asyncio.create_task(self._probe())
        try:
            return await self._process.wait()
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
            if self._process.returncode is not None:
                kill_group(self._process)  # as a container ends whole, so that the next finds its ports free

    def _become_ready(self) -> None:
        self.phase, self.message = Phase.READY, ""
        if self.started_s is None:
            self.started_s = time.monotonic() - self.created

    async def _probe(self) -> None:
        """Follows the readiness probe; a pod without one is ready once it runs."""
        probe = self.container.get("readinessProbe", {}).get("httpGet")
        if probe is None:
            self._become_ready()
            return
        port = probe["port"] if isinstance(probe["port"], int) else self.port(probe["port"])
        url = f"http://{self.address}:{port}{probe['path']}"
        async with httpx.AsyncClient(timeout=2.0) as client:
            while True:
                try:
                    ready = (await client.get(url)).status_code < 400
                except httpx.HTTPError:
                    ready = False
                if ready:
                    self._become_ready()
                elif self.phase is Phase.READY:
                    self.phase, self.message = Phase.NOT_READY, "the readiness probe fails"
                await asyncio.sleep(PROBE_PERIOD_S)
