"""Level-based: whatever happened, look at everything that is there, compute what should be, apply the difference, and write the
status when it changed."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from kubernetes.aio.client import ApiException
from prometheus_client import CollectorRegistry, Counter, Histogram

from penstock.api import labels, metrics
from penstock.api.resources import InferenceModel, LoraAdapter
from penstock.operator.acceptance import accept, sentence
from penstock.operator.adapters.sync import KIND, TYPES, AdapterSync, ReplicaClient, adapters_key
from penstock.operator.api import refuses, said
from penstock.operator.apply import MANAGER, Applier, NotOwned, OwnerGone, owned
from penstock.operator.cluster import Cluster
from penstock.operator.conditions.verdict import Verdict
from penstock.operator.desired import Rendering, SourcePending, TemplateError, check_template, child_name, size
from penstock.operator.desired.source import cache_claim
from penstock.operator.events import event, timestamp, turns
from penstock.operator.failures import EVENTS_AGAIN_S, MAKING_S, incomplete, stuck, with_failure, with_reason
from penstock.operator.fetching import Fetch, FetchJobs
from penstock.operator.loading import KIND as LOAD_TIMES
from penstock.operator.loading import LoadedModels, load_times_key
from penstock.operator.objects import Object, Pod, Workload
from penstock.operator.observe import Reports, observe, workloads_of
from penstock.operator.observed import Refusal
from penstock.operator.overlay import OverlayError
from penstock.operator.pods import being_made
from penstock.operator.rollout.plan import Plan, plan
from penstock.operator.status import conditions, ending, status_of
from penstock.operator.store import Key, key_of
from penstock.operator.told import Told

log = logging.getLogger(__name__)


class Reconciler:
    """Brings the cluster to what the resources say, one key at a time."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        rendering: Rendering,
        reports: Reports,
        replicas: ReplicaClient,
        later: Callable[[Key, float], None],
        registry: CollectorRegistry,
    ) -> None:
        """
        Args:
            replicas: Client that reads the replicas' adapters and load times.
            later: Puts a key on the queue after a number of seconds.
        """
        api, children, resources = cluster.api, cluster.children, cluster.resources
        self._api = api
        self._going = cluster.going
        self._resources = resources
        self._children = children
        self._rendering = rendering
        self._reports = reports
        self._later = later
        self._told = Told(api)
        self._applier = Applier(api, children, cluster.absent)
        self._fetches = FetchJobs(api, children, self._applier, rendering, later)
        self._adapters = AdapterSync(resources=resources, children=children, replicas=replicas, write=self._write, later=later)
        self._loaded = LoadedModels(children, replicas)
        self._done = Counter(metrics.RECONCILES, "Reconciles by result", ["result"], registry=registry)
        self._took = Histogram(metrics.RECONCILE_SECONDS, "Seconds that a reconcile took", registry=registry)

    async def reconcile(self, key: Key) -> None:
        """Brings one resource up to date.

        Raises:
            ApiException, aiohttp.ClientError, TimeoutError: the API server refused or did not answer; to be tried again.
        """
        if key.kind == KIND:
            await self._adapters.sync(key)
            return
        if key.kind == LOAD_TIMES:
            if await self._loaded.ask(key):
                self._later(Key("InferenceModel", key.namespace, key.name), 0.0)
            return
        model = self._resources.model_of(key)
        if model is not None or key.kind == "InferenceModel":
            self._look_at_adapters(model or key)
        resource = self._resources.get(key)
        if resource is None:
            if key.kind == "InferenceModel":
                self._reports.canary(f"{key.namespace}/{key.name}", None, None)
                self._loaded.forget(key)
            return  # the garbage collector takes the children
        began = time.monotonic()
        try:
            await (self._model(key, resource) if key.kind == "InferenceModel" else self._adapter(resource))
        except BaseException:
            self._done.labels("error").inc()
            raise
        self._done.labels("ok").inc()
        self._took.observe(time.monotonic() - began)

    async def _model(self, key: Key, resource: Object) -> None:
        model, refusal = accept(resource)
        if "deletionTimestamp" in resource["metadata"]:
            gone = ending(resource["metadata"])
            refusal = Refusal(gone.reason, gone.message)
        planned: Plan | None = None
        pods = await self._pods(key)
        workloads = await self._workloads(key, pods)
        fetch: Fetch | None = None
        failure: Exception | None = None
        if model is not None and refusal is None:
            try:
                for pool in model.spec.pools:  # here, since what a revision holds is not rendered again
                    check_template(pool, self._rendering)
                fetch = await self._fetches.look(key, model)
                planned = self._plan(key, model, fetch, workloads, pods)
                refusal = None if planned is None else self._missing(planned)
                if planned is not None and refusal is None:
                    sizes = {child_name(key.name, pool.name): size(model, pool) for pool in model.spec.pools}
                    await self._applier.apply(
                        key, model.metadata.uid, planned.objects, sizes, planned.kept | self._of_source(model, fetch)
                    )
            except (TemplateError, OverlayError) as error:
                refusal = Refusal("ForbiddenTemplate" if isinstance(error, TemplateError) else "InvalidTemplate", str(error))
            except OwnerGone:
                return  # the watch will say so too
            except NotOwned as error:
                refusal, failure = Refusal("NotOwned", str(error)), error  # nothing tells when the other object goes
            except ApiException as error:
                if not refuses(error):
                    raise  # not a verdict on the spec: try again
                refusal, failure = Refusal("ApplyRefused", said(error)), error
        if planned is not None and planned.look_again_s is not None:
            self._later(key, planned.look_again_s)
        observed = observe(
            key,
            resource,
            model,
            planned if refusal is None else None,
            refusal,
            children=self._children,
            workloads=workloads,
            pods=pods,
            reports=self._reports,
            loaded=self._loaded,
            conflict=self._resources.conflict(key),
            fetching=fetch.status if fetch is not None and planned is None and refusal is None else None,
        )
        if self._loaded.asks(key):
            self._later(load_times_key(key), 0.0)
        sized = resource.get("status", {}).get("scaling", [])
        await self._write(resource, status_of(observed, previous(resource), timestamp(), sized))
        if failure is not None:
            raise failure

    def _missing(self, planned: Plan) -> Refusal | None:
        """Refuse replicas that span nodes on a cluster without LeaderWorkerSets. Other missing kinds are optional."""
        spanning = [it for it in planned.objects if it["kind"] == "LeaderWorkerSet"]
        if not spanning or not self._applier.absent("LeaderWorkerSet"):
            return None
        names = ", ".join(it["metadata"]["labels"][labels.POOL] for it in spanning)
        return Refusal(
            "LeaderWorkerSetMissing",
            f"a replica of pool {names} spans nodes, which needs LeaderWorkerSets: install LWS (leaderworkerset.x-k8s.io/v1), "
            "or let a replica fit a node",
        )

    async def _pods(self, key: Key) -> list[Pod]:
        """The model's pods, and of the first that is stuck what Events alone say: one for each model, since thousands may be."""
        pods, now = self._children.pods(key), datetime.now(UTC)
        if any(being_made(pod) for pod in pods):
            self._later(key, MAKING_S)
        for at, pod in enumerate(pods):
            if stuck(pod, now):
                pods[at] = with_reason(pod, await self._told.events(key.namespace, "Pod", pod["metadata"]["name"]), now)
                break
        return pods

    async def _workloads(self, key: Key, pods: Sequence[Pod]) -> dict[str, Workload]:
        """The model's workloads by name, with what Events alone say of them."""
        found = workloads_of(self._children, key)
        silent = [name for name, it in found.items() if it["kind"] == "LeaderWorkerSet" and incomplete(it, pods)]
        if silent:
            self._later(key, EVENTS_AGAIN_S)
            events = await self._told.events(key.namespace, "StatefulSet")
            found |= {name: with_failure(found[name], events, datetime.now(UTC)) for name in silent}
        return found

    def _plan(
        self, key: Key, model: InferenceModel, fetch: Fetch | None, workloads: dict[str, Workload], pods: Sequence[Pod]
    ) -> Plan | None:
        """Return the plan, or None while what is new in the spec must be fetched first."""
        uid = model.metadata.uid
        try:
            return plan(
                model,
                replace(self._rendering, fetched=None if fetch is None else fetch.fetched),
                revisions=[it for it in self._children.of(key, "ControllerRevision").values() if owned(it, uid)],
                workloads=workloads,
                pods=pods,
                now=datetime.now(UTC),
                adapter_names=self._resources.adapter_names(key),
                going=self._going(),
            )
        except SourcePending:
            return None

    def _of_source(self, model: InferenceModel, fetch: Fetch | None) -> frozenset[tuple[str, str]]:
        """Kind and name of the children that bring the weights: the plan does not name them, and they stay."""
        claim = cache_claim(model, self._rendering.storage_class)
        kept = [("Job", fetch.job)] if fetch is not None else []
        return frozenset(kept if claim is None else [*kept, (claim["kind"], claim["metadata"]["name"])])

    async def _adapter(self, resource: Object) -> None:
        """One that cannot be read says so; the others are looked at with their model's replicas."""
        try:
            LoraAdapter.parse(resource)
            return
        except ValueError as error:  # pydantic's are, too
            refusal = Verdict(False, "InvalidSpec", sentence(error, LoraAdapter))
        generation = resource["metadata"].get("generation", 0)
        made = conditions(dict.fromkeys(TYPES, refusal), generation, previous(resource), timestamp())
        await self._write(resource, {"observedGeneration": generation, "ready": "0/0", "conditions": made})

    def _look_at_adapters(self, model: Key) -> None:
        """Later, since replicas may take their time to answer."""
        resource = self._resources.get(model)
        if self._resources.adapters_of(model) or (resource is not None and resource["spec"].get("lora")):
            self._later(adapters_key(model), 0.0)

    async def _write(self, resource: Object, status: Object) -> None:
        """Writes the status if it differs, and an Event for each condition that turned."""
        if resource.get("status") == status:
            return
        meta = resource["metadata"]
        body = {
            "apiVersion": resource["apiVersion"],
            "kind": resource["kind"],
            "metadata": {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
            "status": status,
        }
        written = await self._api.apply(body, MANAGER, "status")
        known = self._resources.get(key_of(resource))
        if known is not None and known["metadata"]["uid"] == meta["uid"]:  # else it went meanwhile, which no watch says twice
            self._resources.put(written)
        for kind, reason, message in turns(previous(resource), status["conditions"]):
            log.info("%s: %s: %s", key_of(resource), reason, message)
            try:
                await self._api.create(event(resource, kind, reason, message, timestamp()))
            except ApiException as error:  # the condition says the same
                log.warning("%s: no Event %s: %s", key_of(resource), reason, said(error))


def previous(resource: Object) -> list[Object]:
    """The conditions that a resource has."""
    return list(resource.get("status", {}).get("conditions", []))
