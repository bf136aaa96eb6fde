"""What a pod says about itself, in words that a person can use."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.api import labels
from penstock.operator.objects import Condition, Object, Pod, PodStatus

MAX_QUOTE: Final = 512
# A container that waits for these is being made; for anything else it waits because something is wrong.
_MAKING: Final = ("ContainerCreating", "PodInitializing")

_SIGNALLED: Final = 128
"""A process that a signal ended has this and the signal's number as its exit code."""

_UNKNOWN_FLAG: Final = "error: unrecognized arguments:"
_OLDER: Final = " (the image is older than this operator, or engine.extraArgs has what it does not know)"


@dataclass(frozen=True)
class Trouble:
    """Why a pod is not ready, if it is more than being young."""

    pod: str
    reason: str
    """One CamelCase word: `EngineExited`, `Unschedulable`, `ImagePullBackOff`, …"""
    message: str
    exited: bool
    """The engine itself ended with an error."""


def is_ready(pod: Pod) -> bool:
    """Ready by its condition, and not about to go."""
    return is_live(pod) and (ready_condition(pod) or {}).get("status") == "True"


def ready_condition(pod: Pod) -> Condition | None:
    """The pod's `Ready` condition; None before the kubelet has written one."""
    conditions = pod.get("status", {}).get("conditions", [])
    return next((it for it in conditions if it["type"] == "Ready"), None)


def lost_readiness(pod: Pod) -> bool:
    """Whether the pod is not ready now and was before: it stopped being ready after its containers had started."""
    since = (ready_condition(pod) or {}).get("lastTransitionTime")
    started = [
        it.get("state", {}).get("running", {}).get("startedAt") for it in pod.get("status", {}).get("containerStatuses", [])
    ]
    if since is None or not started or not all(started):
        return False
    return datetime.fromisoformat(since) > max(datetime.fromisoformat(at) for at in started)


def is_live(pod: Pod) -> bool:
    """Neither terminating nor ended."""
    return "deletionTimestamp" not in pod["metadata"] and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def of_pool(pods: Iterable[Pod], pool: str) -> list[Pod]:
    """Return the pods that are replicas of a pool."""
    return [pod for pod in pods if pod["metadata"].get("labels", {}).get(labels.POOL) == pool]


def revision(pod: Pod) -> str:
    """The revision that the pod runs."""
    return str(pod["metadata"].get("labels", {}).get(labels.REVISION, ""))


def base_url(pod: Pod, port: int, scheme: str = "http") -> str | None:
    """Return the base URL of a pod's port; None while the pod has no address."""
    address = pod.get("status", {}).get("podIP")
    host = f"[{address}]" if address and ":" in address else address
    return f"{scheme}://{host}:{port}" if host else None


def argument(pod: Pod, flag: str) -> str | None:
    """The value of `FLAG=VALUE` among the arguments of a pod's engine; empty for a bare flag, None where it is missing."""
    engines = [container for container in pod.get("spec", {}).get("containers", []) if container["name"] == "engine"]
    words = [str(word).partition("=") for engine in engines for word in engine.get("args", [])]
    return next((value for name, _, value in words if name == flag), None)


def being_made(pod: Pod) -> bool:
    """Whether all of its containers wait for the kubelet to make them: none has run yet."""
    states = [*pod.get("status", {}).get("initContainerStatuses", []), *pod.get("status", {}).get("containerStatuses", [])]
    reasons = [it.get("state", {}).get("waiting", {}).get("reason") for it in states]
    return is_live(pod) and bool(reasons) and all(reason in _MAKING for reason in reasons)


def trouble(pod: Pod) -> Trouble | None:
    """What keeps the pod from being ready; None where it is ready, terminating, or merely starting."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    if "deletionTimestamp" in pod["metadata"] or is_ready(pod):
        return None
    if status.get("phase") == "Failed":
        reason = status.get("reason", "PodFailed")
        return Trouble(name, reason, f"pod {name} failed: {status.get('message', reason)}", exited=False)
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            message = f"pod {name} cannot be scheduled: {condition.get('message', '')}"
            return Trouble(name, condition.get("reason", "Unschedulable"), message, exited=False)
    return next(_containers(name, status), None)


def _containers(pod: str, status: PodStatus) -> Iterator[Trouble]:
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting = container.get("state", {}).get("waiting", {})
        ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated") or {}
        failed = ended.get("exitCode", 0) != 0 and not container.get("ready", False)
        reason = waiting.get("reason", "")
        if failed:
            # Not `CrashLoopBackOff`: between two tries the reason would be another one, and flap.
            yield Trouble(pod, "EngineExited", f"pod {pod}: {_last_words(container['name'], ended)}", exited=True)
        elif reason and reason not in _MAKING:
            yield Trouble(pod, reason, f"pod {pod}: {waiting.get('message', reason)}", exited=False)


def _last_words(container: str, ended: Object) -> str:
    """The last line of what the container said; that is where a program states what it died of, unless it was killed."""
    code, reason = ended.get("exitCode", 0), ended.get("reason", "Error")
    if code > _SIGNALLED:
        return f"container {container} was killed by signal {code - _SIGNALLED} ({reason})"
    lines = [line.strip() for line in ended.get("message", "").splitlines() if line.strip()]
    if lines:
        quote = lines[-1] if len(lines[-1]) <= MAX_QUOTE else f"{lines[-1][:MAX_QUOTE]}…"
        return f"{quote}{_OLDER}" if _UNKNOWN_FLAG in quote else quote
    return f"container {container} exited with {code} ({reason})"
