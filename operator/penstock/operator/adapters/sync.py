"""Level-based: each ready replica's adapters are compared with what the LoraAdapters say, whatever happened to either. A replica
that has restarted is one that lacks some; an adapter that was deleted is one too many."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from penstock.api.resources import LoraAdapter
from penstock.operator.acceptance import accept
from penstock.operator.adapters.plan import Action, Origin, Report, accepted, actions, judged, origin
from penstock.operator.conditions.verdict import Verdict
from penstock.operator.desired.arguments import HTTP
from penstock.operator.events import timestamp
from penstock.operator.objects import Object, Pod
from penstock.operator.observed import LoadTimes
from penstock.operator.pods import argument, base_url, is_ready
from penstock.operator.replicas import ReplicaError, StillLoading
from penstock.operator.status import conditions, ending
from penstock.operator.store import Children, Key, Resources

log = logging.getLogger(__name__)


KIND: Final = "Adapters"
"""Kind of the queue key under which all adapters of a model are synchronized together."""
AGAIN_LOADING_S: Final = 2.0
AGAIN_FAILED_S: Final = 30.0
AT_ONCE: Final = 64
"""Replicas that are brought up to date at a time."""
TYPES: Final = ("Ready", "Accepted", "Loaded")


class ReplicaClient(Protocol):
    """What is used of `Replicas`."""

    @property
    def scheme(self) -> str: ...
    async def adapters(self, base: str) -> dict[str, Origin]: ...
    async def carry_out(self, base: str, action: Action) -> None: ...
    async def load_times(self, base: str) -> LoadTimes: ...


def adapters_key(model: Key) -> Key:
    """What to queue so that a model's adapters are looked at."""
    return Key(KIND, model.namespace, model.name)


class AdapterSync:
    """Keeps the adapters of all models loaded on their replicas.

    Args:
        resources: The users' resources.
        children: The models' pods.
        replicas: Client of the replicas' administrative API.
        write: Writes the status of a resource if it differs.
        later: Puts a key on the queue after a number of seconds.
    """

    def __init__(
        self,
        *,
        resources: Resources,
        children: Children,
        replicas: ReplicaClient,
        write: Callable[[Object, Object], Awaitable[None]],
        later: Callable[[Key, float], None],
    ) -> None:
        self._resources = resources
        self._children = children
        self._replicas = replicas
        self._write = write
        self._later = later
        self._at_once = asyncio.Semaphore(AT_ONCE)

    async def sync(self, key: Key) -> None:
        """Brings the replicas of one model, and the status of its adapters, up to date."""
        model_key = Key("InferenceModel", key.namespace, key.name)
        resource = self._resources.get(model_key)
        model, refusal = accept(resource) if resource is not None else (None, None)
        judgements: list[tuple[Object, LoraAdapter, Verdict]] = []
        for adapter_key in self._resources.adapters_of(model_key):
            found = self._resources.get(adapter_key)
            if found is None:
                continue
            adapter = LoraAdapter.parse(found)
            if "deletionTimestamp" in found["metadata"]:
                judgements.append((found, adapter, ending(found["metadata"])))
                continue
            conflict = self._resources.conflict(adapter_key)
            said = "" if refusal is None else refusal.message
            judgements.append((found, adapter, accepted(adapter, model, said, conflict)))
        reports: list[Report] = []
        if model is not None and model.spec.lora is not None:
            wanted = {it.spec.served.name: origin(it) for _, it, verdict in judgements if verdict.status is True}
            pods = [pod for pod in self._children.pods(model_key) if is_ready(pod)]
            reports = list(await asyncio.gather(*(self._bring_in_turn(pod, wanted) for pod in pods)))
        for found, adapter, verdict in judgements:
            await self._tell(found, adapter.spec.served.name, verdict, reports)
        if any(report.errors for report in reports):
            self._later(key, AGAIN_FAILED_S)
        elif any(report.pending for report in reports):
            self._later(key, AGAIN_LOADING_S)

    async def _tell(self, resource: Object, name: str, verdict: Verdict, reports: list[Report]) -> None:
        ready, verdicts = judged(verdict, name, reports)
        generation = resource["metadata"].get("generation", 0)
        before = list(resource.get("status", {}).get("conditions", []))
        made = conditions({kind: verdicts[kind] for kind in TYPES}, generation, before, timestamp())
        await self._write(resource, {"observedGeneration": generation, "ready": ready, "conditions": made})

    async def _bring_in_turn(self, pod: Pod, wanted: dict[str, Origin]) -> Report:
        async with self._at_once:
            return await self._bring(pod, wanted)

    async def _bring(self, pod: Pod, wanted: dict[str, Origin]) -> Report:
        """One replica to what is wanted."""
        name = pod["metadata"]["name"]
        scheme = self._replicas.scheme
        if argument(pod, "--ssl-certfile") is not None and scheme == "http":
            why = "it speaks HTTPS, and the operator does not know whose certificates to believe: start it with --replica-tls"
            return Report(name, dict.fromkeys(wanted, why))
        base, admin = (base_url(pod, port, scheme) for port in (HTTP, _admin_port(pod)))
        if base is None or admin is None:
            return Report(name, dict.fromkeys(wanted, "it has no address"))
        try:
            there = await self._replicas.adapters(base)
        except ReplicaError as error:
            return Report(name, dict.fromkeys(wanted, str(error)))
        errors: dict[str, str] = {}
        pending: set[str] = set()
        for action in actions(wanted, there):
            source = "" if action.origin is None else f" from {action.origin.uri}"
            log.info("pod %s/%s: %s adapter %s%s", pod["metadata"]["namespace"], name, action.verb, action.name, source)
            try:
                await self._replicas.carry_out(admin, action)
            except ReplicaError as error:
                errors[action.name] = str(error)
            except StillLoading:
                pending.add(action.name)
        return Report(name, errors, frozenset(pending))


def _admin_port(pod: Pod) -> int:
    """Return the port that loads adapters. Replicas of older revisions have one port for everything."""
    given = argument(pod, "--admin-port")
    return int(given) if given is not None and given.isdecimal() else HTTP
