"""Models that are brought before their replicas start: one Job for a claim, a model and a version.

No pod of a pool is made before the Job is done, so that no accelerator waits for a download. What it found out is kept as an
annotation of the Job, and then in the pod templates of the model's revision.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import aiohttp
import msgspec

from penstock.api.events import BEYOND
from penstock.api.resources import InferenceModel
from penstock.http.replica_answers import UNREADABLE, body_of
from penstock.operator.api import Api
from penstock.operator.apply import APPLIED, Applier, described, stamped
from penstock.operator.apply import MANAGER as APPLY_MANAGER
from penstock.operator.desired.pod import Rendering
from penstock.operator.desired.source import PROGRESS_PORT, Fetched, cache_claim, fetch_job
from penstock.operator.objects import Object, Pod, as_pods
from penstock.operator.observed import Fetching
from penstock.operator.pods import is_live, trouble
from penstock.operator.store import Children, Key
from penstock.sources.progress import Snapshot

log = logging.getLogger(__name__)


MANAGER: Final = "penstock-fetch"
RESULT: Final = "penstock.dev/fetched"
"""Annotation on a Job that is done: what it brought."""
LOOK_S: Final = 5.0
"""Between two looks at its progress."""
RETRY_S: Final = 300.0
"""Seconds after which a failed Job is created again: a Secret or a grant may have changed without any event."""
MAX_BYTES: Final = 4096
_TIMEOUT: Final = aiohttp.ClientTimeout(total=2.0)


@dataclass(frozen=True)
class Fetch:
    """How far a model's Job is."""

    job: str
    """Name of the Job."""
    fetched: Fetched | None
    """None: it is not done."""
    status: Fetching


class FetchJobs:
    """Makes the Jobs and reads them."""

    def __init__(
        self, api: Api, children: Children, applier: Applier, rendering: Rendering, later: Callable[[Key, float], None]
    ) -> None:
        """
        Args:
            later: Puts a key on the queue after a number of seconds.
        """
        self._api, self._children, self._applier = api, children, applier
        self._rendering, self._later = rendering, later

    async def look(self, key: Key, model: InferenceModel) -> Fetch | None:
        """Sees to it that the Job is there, and says how far it is; None where the model needs none.

        Raises:
            NotOwned, OwnerGone, ApiException: see `Applier.apply`.
        """
        wanted = fetch_job(model, self._rendering.image)
        if wanted is None:
            return None
        claim = cache_claim(model, self._rendering.storage_class)
        if claim is not None:
            await self._claim(key, model.metadata.uid, claim)
        name = wanted["metadata"]["name"]
        live = await self._applier.ensure(key, model.metadata.uid, wanted)
        if live is None or "deletionTimestamp" in live["metadata"]:
            self._later(key, LOOK_S)
            return Fetch(name, None, Fetching("FetchStarting", f"{model.spec.source.uri}: the download is about to start"))
        kept = _read(live["metadata"].get("annotations", {}).get(RESULT, ""))
        if kept is not None and kept.version:
            return Fetch(name, Fetched(kept.folder, kept.version), Fetching("Fetched", "the model is there"))
        selector = "batch.kubernetes.io/job-name"
        every = as_pods(self._children.of(key, "FetchPod").values())
        pods = [it for it in every if it["metadata"]["labels"].get(selector) == name]
        if _turned(live, "Complete"):
            return await self._complete(key, live, pods)
        if (when := _turned(live, "Failed")) is not None:
            return await self._failed(key, model, live, pods, when)
        if live["metadata"].get("annotations", {}).get(APPLIED) != stamped(wanted)["metadata"]["annotations"][APPLIED]:
            await self._delete(live, "another image, or other credentials: its template cannot change")
        self._later(key, LOOK_S)
        return Fetch(name, None, await _running(model, pods))

    async def _claim(self, key: Key, uid: str, claim: Object) -> None:
        """Makes the claim, or lets it grow. Its class stays, whatever the operator's flag says by now: no claim can change it."""
        live = await self._applier.ensure(key, uid, claim)
        wanted, there = (it["spec"]["resources"]["requests"]["storage"] for it in (claim, live or claim))
        if live is not None and there != wanted:
            log.info("asking for %s in place of %s: %s", wanted, there, described(claim))
            spec = {**claim["spec"], "storageClassName": live["spec"].get("storageClassName")}
            await self._api.apply({**claim, "spec": spec}, APPLY_MANAGER)

    async def _complete(self, key: Key, live: Object, pods: Sequence[Pod]) -> Fetch:
        name = live["metadata"]["name"]
        results = [it for pod in pods if (it := _result(pod)) is not None and it.version]
        if not results:
            await self._delete(live, "nobody knows any more what it found, and it is quickly found again")
            self._later(key, LOOK_S)
            return Fetch(name, None, Fetching("FetchStarting", "the download is looked at again"))
        fetched = Fetched(results[0].folder, results[0].version)
        meta = {it: live["metadata"][it] for it in ("name", "namespace", "uid")}
        annotation = {RESULT: json.dumps({"folder": fetched.folder, "version": fetched.version})}
        body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {**meta, "annotations": annotation}}
        log.info("noting at %s that it brought %s", described(live | {"kind": "Job"}), fetched.version)
        await self._api.apply(body, MANAGER)
        return Fetch(name, fetched, Fetching("Fetched", "the model is there"))

    async def _delete(self, live: Object, why: str) -> None:
        log.info("deleting %s: %s", described(live | {"kind": "Job"}), why)
        await self._api.delete({"kind": "Job", **live})

    async def _failed(self, key: Key, model: InferenceModel, live: Object, pods: Sequence[Pod], when: datetime) -> Fetch:
        left = RETRY_S - (datetime.now(UTC) - when).total_seconds()
        if left <= 0:
            await self._delete(live, "it failed, and is tried again")
        self._later(key, max(left, LOOK_S))
        reason, message = _why(model, pods) or ("FetchFailed", f"Job {live['metadata']['name']} failed")
        return Fetch(live["metadata"]["name"], None, Fetching(reason, message, failed=True))


async def _running(model: InferenceModel, pods: Sequence[Pod]) -> Fetching:
    """What the newest pod says, and what the one before it died of."""
    live = [pod for pod in pods if is_live(pod)]
    died = _why(model, pods)
    if not live:
        if died is not None:
            return Fetching(died[0], f"{died[1]}; it is tried again", failed=True)
        return Fetching("FetchStarting", f"{model.spec.source.uri}: the download is about to start")
    newest = max(live, key=lambda pod: pod["metadata"]["creationTimestamp"])
    if (wrong := trouble(newest)) is not None:
        return Fetching(wrong.reason, wrong.message, failed=True)
    said = await _progress(newest.get("status", {}).get("podIP"))
    before = f" (after: {died[1]})" if died is not None else ""
    return Fetching("Downloading", f"{model.spec.source.uri}: {said}{before}")


async def _progress(address: str | None) -> str:
    if address is None:
        return "its pod is starting"
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT) as session,
            session.get(f"http://{address}:{PROGRESS_PORT}/progress", allow_redirects=False) as answer,
        ):
            now = msgspec.json.decode(await body_of(answer, MAX_BYTES), type=Snapshot)
    except (TimeoutError, msgspec.MsgspecError, *UNREADABLE):
        return "its pod does not say yet how far it is"
    if now.phase == "waiting":
        return f"waiting for {now.waits_for}, which brings the same"
    if not 0 < now.total < BEYOND:
        return "asking what there is"
    return f"{now.phase}, {100 * now.done // now.total}% of {now.total / 2**30:.2f} GiB"


def _why(model: InferenceModel, pods: Sequence[Pod]) -> tuple[str, str] | None:
    """(reason, message) of the newest pod that failed, with the Secret's name and nothing that is in it."""
    for pod in sorted(pods, key=lambda pod: pod["metadata"]["creationTimestamp"], reverse=True):
        result = _result(pod)
        if result is not None and result.reason:
            secret = model.spec.source.secret_ref
            place = f" (credentials: Secret {secret.name})" if secret is not None else " (no secretRef)"
            about = place if result.reason in ("Unauthorized", "Forbidden", "NotFound") else ""
            return f"Source{result.reason}", f"{result.message}{about}"
        if pod.get("status", {}).get("phase") == "Failed" and (wrong := trouble(pod)) is not None:
            return "FetchFailed", wrong.message
    return None


class _Outcome(msgspec.Struct, frozen=True):
    """What a download's process writes at its end: what it brought, or why it did not."""

    folder: str = ""
    version: str = ""
    reason: str = ""
    message: str = ""


def _result(pod: Pod) -> _Outcome | None:
    """What its process wrote at its end."""
    ended = [it.get("state", {}).get("terminated", {}) for it in pod.get("status", {}).get("containerStatuses", [])]
    return next((read for it in ended if (read := _read(it.get("message", ""))) is not None), None)


def _read(text: str) -> _Outcome | None:
    """None for anything else: the image is the user's, and so may be the hand that wrote an annotation."""
    try:
        return msgspec.json.decode(text, type=_Outcome)
    except (msgspec.MsgspecError, *UNREADABLE):
        return None


def _turned(job: Object, kind: str) -> datetime | None:
    """When a condition of the Job became true; None where it is not."""
    for condition in job.get("status", {}).get("conditions", []):
        if condition["type"] == kind and condition["status"] == "True":
            return datetime.fromisoformat(condition["lastTransitionTime"])
    return None
