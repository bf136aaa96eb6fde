"""Level-based: whatever happened, look at everything that is there, compute what should be, apply the difference, and write the
status when it changed."""

import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from kubernetes.aio.client import ApiException
from prometheus_client import CollectorRegistry, Counter, Histogram
from pydantic import ValidationError

from penstock.api import labels, metrics
from penstock.api.fleet import pool_id
from penstock.api.resources import InferenceModel, LoraAdapter, unsupported
from penstock.operator.api import Api, said
from penstock.operator.apply import MANAGER, Applier, NotOwned, OwnerGone
from penstock.operator.desired import Rendering, TemplateError, child_name, children, revision_of, size
from penstock.operator.events import event, turns
from penstock.operator.overlay import OverlayError
from penstock.operator.status import Observed, PoolObserved, Refusal, ScalingStatus, Verdict, conditions, status_of
from penstock.operator.store import Children, Key, Resources, key_of

log = logging.getLogger(__name__)

Object = dict[str, Any]
ScalingReport = Callable[[str], ScalingStatus | None]
"""What the autoscaler last said of the pool `namespace/model/pool`; None where it has not spoken yet."""


class Reconciler:
    """Brings the cluster to what the resources say, one key at a time."""

    def __init__(
        self,
        *,
        api: Api,
        resources: Resources,
        observed: Children,
        rendering: Rendering,
        scaling: ScalingReport,
        url: str = "",
        registry: CollectorRegistry,
    ) -> None:
        """
        Args:
            url: Where clients reach the gateway, for `status.url`.
        """
        self._api = api
        self._resources = resources
        self._children = observed
        self._rendering = rendering
        self._scaling = scaling
        self._url = url
        self._applier = Applier(api, observed)
        self._done = Counter(metrics.RECONCILES, "Reconciles by result", ["result"], registry=registry)
        self._took = Histogram(metrics.RECONCILE_SECONDS, "Time of one reconcile in seconds", registry=registry)

    async def reconcile(self, key: Key) -> None:
        """Brings one resource up to date.

        Raises:
            ApiException, aiohttp.ClientError, TimeoutError: the API server refused or did not answer; to be tried again.
        """
        resource = self._resources.get(key)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
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
        wanted: list[Object] = []
        failure: Exception | None = None
        if model is not None and refusal is None:
            try:
                wanted = children(model, self._rendering)
                sizes = {child_name(key.name, pool.name): size(model, pool) for pool in model.spec.pools}
                await self._applier.apply(key, model.metadata.uid, wanted, sizes)
            except (TemplateError, OverlayError) as error:
                refusal = Refusal("ForbiddenTemplate" if isinstance(error, TemplateError) else "InvalidTemplate", str(error))
            except OwnerGone:
                return  # the watch will say so too
            except NotOwned as error:
                refusal, failure = Refusal("NotOwned", str(error)), error  # nothing tells when the other object goes
            except ApiException as error:
                if error.status is None or not 400 <= error.status < 500 or error.status in (409, 429):
                    raise  # not a verdict on the spec: try again
                refusal, failure = Refusal("ApplyRefused", said(error)), error
        observed = self._observe(key, resource, model, wanted if refusal is None else [], refusal)
        await self._write(resource, status_of(observed, previous(resource), timestamp()))
        if failure is not None:
            raise failure

    def _observe(
        self, key: Key, resource: Object, model: InferenceModel | None, wanted: Sequence[Object], refusal: Refusal | None
    ) -> Observed:
        """The model as the cluster has it; without wanted objects, as it is left running."""
        workloads = self._children.of(key, "Deployment")
        targets = {item["metadata"]["name"]: item for item in wanted if item["kind"] == "Deployment"} or workloads
        pods = list(self._children.of(key, "Pod").values())
        pools: list[PoolObserved] = []
        for name, target in targets.items():
            pool = target["metadata"]["labels"][labels.POOL]
            its_pods = [pod for pod in pods if pod["metadata"]["labels"].get(labels.POOL) == pool]
            pools.append(self._pool(key, model, workloads.get(name), target, its_pods))
        return Observed(
            name=key.name,
            generation=resource["metadata"].get("generation", 0),
            pools=pools,
            refusal=refusal,
            conflict=self._resources.conflict(key),
            served_name=model.spec.served.name if model is not None else "",
            paused=model is not None and model.spec.rollout.paused,
            url=self._url,
        )

    def _pool(
        self, key: Key, model: InferenceModel | None, live: Object | None, target: Object, pods: Sequence[Object]
    ) -> PoolObserved:
        """One pool; `target` is the wanted workload, or the live one where nothing is wanted."""
        name = target["metadata"]["labels"][labels.POOL]
        spec = next((pool for pool in model.spec.pools if pool.name == name), None) if model is not None else None
        given = live is not None and (model is None or spec is None or size(model, spec).owner != "spec")
        source = live if live is not None and given else target
        scaled = spec is not None and spec.scaling is not None
        return PoolObserved(
            name=name,
            revision=revision_of(target),
            wanted=source["spec"].get("replicas", 1),
            workload=live,
            pods=pods,
            scaled=scaled,
            scaling=self._scaling(pool_id(key.namespace, key.name, name)) if scaled else None,
        )

    async def _adapter(self, resource: Object) -> None:
        """No engine takes adapters yet: the resource says so instead of waiting for ever."""
        try:
            LoraAdapter.parse(resource)
            refusal = Verdict(False, "UnsupportedField", "LoraAdapter: this version serves no adapters")
        except (ValidationError, ValueError) as error:
            refusal = Verdict(False, "InvalidSpec", sentence(error))
        generation = resource["metadata"].get("generation", 0)
        judged = {"Ready": refusal, "Accepted": refusal}
        made = conditions(judged, generation, previous(resource), timestamp())
        await self._write(resource, {"observedGeneration": generation, "conditions": made})

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
        self._resources.put(written)
        for kind, reason, message in turns(previous(resource), status["conditions"]):
            log.info("%s: %s: %s", key_of(resource), reason, message)
            try:
                await self._api.create(event(resource, kind, reason, message, timestamp()))
            except ApiException as error:  # the condition says the same
                log.warning("%s: no Event %s: %s", key_of(resource), reason, said(error))


def accept(resource: Object) -> tuple[InferenceModel | None, Refusal | None]:
    """The model, and why it is not acted on."""
    try:
        model = InferenceModel.parse(resource)
    except (ValidationError, ValueError) as error:
        return None, Refusal("InvalidSpec", sentence(error))
    paths = unsupported(model.spec)
    if paths:
        return model, Refusal("UnsupportedField", f"this version does not implement {', '.join(paths)}: remove what is named")
    return model, None


def sentence(error: ValueError) -> str:
    """What is wrong with a resource, field by field, without pydantic's decoration."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(
        f"{'.'.join(str(part) for part in it['loc'])}: {it['msg'].removeprefix('Value error, ')}".removeprefix(": ")
        for it in error.errors(include_url=False)
    )


def previous(resource: Object) -> list[Object]:
    """The conditions that a resource has."""
    return list(resource.get("status", {}).get("conditions", []))


def timestamp() -> str:
    """Now, as the API writes times."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
