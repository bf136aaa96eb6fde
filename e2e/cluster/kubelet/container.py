"""One container: a process that is started, probed, stopped, and started again when its policy says so."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from e2e.cluster.kubelet import probes
from e2e.cluster.kubelet.api import CONNECTION_ERRORS, ApiError, Object, timestamp
from e2e.cluster.kubelet.sandbox import MESSAGE, container_command

if TYPE_CHECKING:
    from e2e.cluster.kubelet.pod import Pod

logger = logging.getLogger(__name__)
Process = subprocess.Popen[bytes]

DEFAULT_GRACE = 30  # seconds
# The first restart is at once; the next after FIRST_BACKOFF seconds, doubling. A kubelet has 10 s and 300 s: tests need not wait.
FIRST_BACKOFF = 1.0
LONGEST_BACKOFF = 30.0
LAST_WORDS_BYTES = 2048  # a kubelet's limit, together with 80 lines
LAST_WORDS_LINES = 80
LONGEST_MESSAGE = 4096  # bytes


class Container:
    """Its pod's thread calls launch() and reap(); probes and termination run in threads that end with their process."""

    def __init__(self, pod: Pod, spec: Object, *, init: bool, previous: Object | None) -> None:
        """`previous` is the status that a former kubelet process reported for it."""
        self.pod, self.spec, self.name, self.init = pod, spec, spec["name"], init
        self.sidecar = init and spec.get("restartPolicy") == "Always"
        self.process: Process | None = None
        self.started = self.ready = self.finished = False
        self.not_before = 0.0  # when it may be launched, as time.monotonic()
        self.state: Object = {"waiting": {"reason": "ContainerCreating"}}
        self.last_state: Object = {}
        self.restarts: int = (previous or {}).get("restartCount", 0)
        if "running" in (previous or {}).get("state", {}):
            self.last_state = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}
        self._stopping: Process | None = None
        self._delay = 0.0
        self._launched_at = 0.0
        self._log = pod.logs / f"{self.name}.log"  # of all its processes, one after the other
        self._base = pod.folder  # of the present process: its root and what belongs to it
        self._log_start = 0  # where the present process's part of it begins
        self._environment: dict[str, str] = {}

    @property
    def succeeded(self) -> bool:
        return self.finished and self.state["terminated"]["exitCode"] == 0

    # ---- start

    def launch(self) -> None:
        try:
            process = self._start_process()
        except (ApiError, KeyError, ValueError, *CONNECTION_ERRORS) as problem:
            self.state = {"waiting": {"reason": "CreateContainerConfigError", "message": str(problem)[:300]}}
            self.not_before = time.monotonic() + 2
            return
        if "terminated" in self.state:
            self.last_state = self.state
        if self.last_state:
            self.restarts += 1
        self.state, self._launched_at = {"running": {"startedAt": timestamp()}}, time.monotonic()
        self.started, self.ready = "startupProbe" not in self.spec, False
        self.process = process
        self.pod.event("Normal", "Started", f"Started container {self.name}")
        self._in_thread(self._after_start, process)

    def _start_process(self) -> Process:
        self._environment = self.pod.inputs.environment(self.spec)
        self._base = self.pod.folder / "roots" / f"{self.name}-{self.restarts}-{time.time_ns()}"
        where, programs = (self.pod.netns, self._base), self.pod.node.config.programs
        command = container_command(*where, self.spec, self.pod.volumes, self.pod.inputs, self._environment, programs)
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            return subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _after_start(self, process: Process) -> None:
        if hook := self.spec.get("lifecycle", {}).get("postStart"):
            self._run_hook(process, hook, DEFAULT_GRACE)
        kinds = [kind for kind in ("startup", "readiness", "liveness") if f"{kind}Probe" in self.spec]
        if "startup" not in kinds and "readiness" not in kinds:
            self.ready = self.process is process
        for kind in kinds:
            self._in_thread(self._watch, process, kind, self.spec[f"{kind}Probe"])

    # ---- probes

    def _watch(self, process: Process, kind: str, probe: Object) -> None:
        """Run one probe until the process ends; every second until the container is ready: tests need not wait a period."""
        good = bad = 0
        period = probe.get("periodSeconds", 10)
        while kind != "startup" and not self.started and self.process is process:
            time.sleep(0.1)
        time.sleep(probe.get("initialDelaySeconds", 0))
        since = time.monotonic()
        while self.process is process and not self.pod.node.stopping.is_set():
            passed = self._attempt(process, probe, probe.get("timeoutSeconds", 1))
            good, bad = (good + 1, 0) if passed else (0, bad + 1)
            if self.process is not process or self._judge(kind, probe, good, bad, time.monotonic() - since):
                return
            time.sleep(period if kind == "liveness" or self.ready else min(1, period))

    def _judge(self, kind: str, probe: Object, good: int, bad: int, elapsed: float) -> bool:
        """Act on a probe's last results, so many in a row, `elapsed` seconds after its start; whether it was the last attempt."""
        tries = probe.get("failureThreshold", 3)
        enough = good >= probe.get("successThreshold", 1)
        if kind == "startup" and enough:
            self.started = True
            self.ready = "readinessProbe" not in self.spec
            return True
        if (kind == "startup" and elapsed > tries * probe.get("periodSeconds", 10)) or (kind == "liveness" and bad >= tries):
            self._fail(kind, probe)
            return True
        if kind == "readiness" and enough:
            self.ready = True
        elif kind == "readiness" and bad >= tries and self.ready:
            self.ready = False
            self.pod.event("Warning", "Unhealthy", f"Readiness probe of {self.name} failed")
        return False

    def _fail(self, kind: str, probe: Object) -> None:
        self.pod.event("Warning", "Unhealthy", f"{kind.capitalize()} probe of {self.name} failed")
        self.pod.event("Normal", "Killing", f"Container {self.name} failed {kind} probe, will be restarted")
        self.terminate(probe.get("terminationGracePeriodSeconds", self.pod.grace))

    def _attempt(self, process: Process, handler: Object, timeout: float) -> bool:
        ports = self.spec.get("ports", [])
        return probes.attempt(handler, self.pod.address, ports, process.pid, self._environment, timeout)

    def _run_hook(self, process: Process, hook: Object, seconds: float) -> None:
        if "sleep" in hook:
            time.sleep(min(hook["sleep"]["seconds"], seconds))
        elif not self._attempt(process, hook, seconds):
            self.pod.event("Warning", "FailedLifecycleHook", f"a hook of {self.name} failed")

    # ---- end

    def terminate(self, grace: float) -> None:
        """preStop, then TERM, then KILL when the grace period of that many seconds is over. Returns at once; safe to repeat."""
        process = self.process
        if process is None or self._stopping is process:
            return
        self._stopping = process
        self._in_thread(self._end, process, grace)

    def _end(self, process: Process, grace: float) -> None:
        deadline = time.monotonic() + grace
        hook = self.spec.get("lifecycle", {}).get("preStop")
        if hook and grace > 1:
            self._run_hook(process, hook, grace)
            deadline = max(deadline, time.monotonic() + 2)  # as a kubelet: 2 s for TERM even if the hook took all
        process.terminate()  # the first process only, as in a container
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        kill_group(process)

    def kill(self) -> None:
        if self.process:
            kill_group(self.process)

    def reap(self) -> None:
        """Note the end of the process, and decide whether and when it starts again."""
        process = self.process
        if process is None or process.poll() is None:
            return
        self.process, self.started, self.ready = None, False, False
        kill_group(process)  # its children end with it, as in a container
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        logger.info("%s: %s ended with %d", self.pod.id, self.name, code)
        started = self.state["running"]["startedAt"]
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "startedAt": started, "finishedAt": timestamp()}
        self.state = {"terminated": ended | {"containerID": f"process://{process.pid}"} | self._last_words(code)}
        if self.pod.ending is not None or not self._starts_again(code):
            self.finished = True
        else:
            self._back_off()

    def _last_words(self, code: int) -> Object:
        """The termination message: what it wrote, or the end of its log where the policy says so."""
        if written := (self._base / MESSAGE).read_bytes()[:LONGEST_MESSAGE].decode(errors="replace"):
            return {"message": written}
        if code == 0 or self.spec.get("terminationMessagePolicy") != "FallbackToLogsOnError":
            return {}
        with self._log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, 2) - LAST_WORDS_BYTES))
            lines = log.read().decode(errors="replace").splitlines(keepends=True)
        return {"message": "".join(lines[-LAST_WORDS_LINES:])}

    def _starts_again(self, code: int) -> bool:
        if self.sidecar:
            return not self.pod.done
        policy = self.pod.spec.get("restartPolicy", "Always")
        if code == 0:
            return policy == "Always" and not self.init
        return policy != "Never"

    def _back_off(self) -> None:
        if time.monotonic() - self._launched_at > 2 * LONGEST_BACKOFF:
            self._delay = 0
        if self._delay:
            self.last_state = self.state
            message = f"back-off {self._delay:g}s restarting failed container {self.name}"
            self.state = {"waiting": {"reason": "CrashLoopBackOff", "message": message}}
            self.pod.event("Warning", "BackOff", f"Back-off restarting failed container {self.name}")
        self.not_before = time.monotonic() + self._delay
        self._delay = min(self._delay * 2 or FIRST_BACKOFF, LONGEST_BACKOFF)

    def give_up(self) -> None:
        """Its pod ends: what never ran has ended too."""
        if "terminated" not in self.state:
            never = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": "was not running"}
            self.state = {"terminated": never}

    def status(self) -> Object:
        status = {
            "name": self.name,
            "image": self.spec.get("image", ""),
            "imageID": "",
            "ready": self.ready or (self.init and self.succeeded),
            "started": self.started and self.process is not None,
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last_state,
        }
        process = self.process
        return status | ({"containerID": f"process://{process.pid}"} if process else {})

    @staticmethod
    def _in_thread(work: Callable[..., None], *args: object) -> None:
        threading.Thread(target=work, args=args, daemon=True).start()


def kill_group(process: Process) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        logger.debug("process group %d has ended by itself", process.pid)
