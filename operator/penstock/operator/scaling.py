"""The autoscaler's hands on Kubernetes: which pools it may size, how it sizes them, and where its decisions are told."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from kubernetes.aio.client import ApiException
from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.api import labels, metrics
from penstock.api.fleet import pool_id
from penstock.api.resources import Scaling
from penstock.operator.api import Api, said
from penstock.operator.apply import SCALE_MANAGER
from penstock.operator.autoscale.loop import PoolScale
from penstock.operator.autoscale.policy import Decision
from penstock.operator.autoscale.spec import limits
from penstock.operator.desired import child_name
from penstock.operator.events import event
from penstock.operator.pods import is_live, is_ready
from penstock.operator.reconciler import accept, timestamp
from penstock.operator.status import ScalingStatus
from penstock.operator.store import Children, Key, Resources

log = logging.getLogger(__name__)

Object = dict[str, Any]

DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
VICTIM_COST: Final = "-1000"
HISTORY: Final = 10


class KubernetesActuator:
    """`autoscale.loop.Actuator` on Deployments."""

    def __init__(
        self,
        *,
        api: Api,
        resources: Resources,
        observed: Children,
        scale: Callable[[str, str, int], Awaitable[None]],
        changed: Callable[[Key], None],
        registry: CollectorRegistry,
    ) -> None:
        """
        Args:
            scale: Sets the replicas of the Deployment (namespace, name, replicas).
            changed: Told the model whose scaling status changed.
        """
        self._api = api
        self._resources = resources
        self._children = observed
        self._scale = scale
        self._changed = changed
        self._reports: dict[str, ScalingStatus] = {}
        self._desired = Gauge(
            metrics.DESIRED_REPLICAS, "Replicas that the autoscaler wants", ["namespace", "model", "pool"], registry=registry
        )
        self._decisions = Counter(
            metrics.SCALING_DECISIONS, "Looks of the autoscaler by what bound them", ["constraint"], registry=registry
        )

    def report(self, pool: str) -> ScalingStatus | None:
        """What was last decided for a pool."""
        return self._reports.get(pool)

    async def pools(self) -> Sequence[PoolScale]:
        """Pools with `scaling` whose Deployment exists."""
        found: dict[str, PoolScale] = {}
        for key in self._resources.known():
            resource = self._resources.get(key)
            model, refusal = accept(resource) if key.kind == "InferenceModel" and resource is not None else (None, None)
            if model is None or refusal is not None:
                continue
            for pool in model.spec.pools:
                workload = self._children.of(key, "Deployment").get(child_name(key.name, pool.name))
                if pool.scaling is not None and workload is not None:
                    scale = self._pool_scale(key, pool.name, pool.scaling, workload)
                    found[scale.pool_id] = scale
        self._reports = {pool_id: report for pool_id, report in self._reports.items() if pool_id in found}
        return list(found.values())

    def _pool_scale(self, key: Key, name: str, scaling: Scaling, workload: Object) -> PoolScale:
        now = datetime.now(UTC)
        ages = [
            (now - datetime.fromisoformat(pod["metadata"]["creationTimestamp"])).total_seconds()
            for pod in self._pods(key, name).values()
            if is_live(pod) and not is_ready(pod)
        ]
        return PoolScale(
            pool_id=pool_id(key.namespace, key.name, name),
            limits=limits(scaling),
            dry_run=scaling.mode == "DryRun",
            replicas=workload["spec"].get("replicas", 1),
            pending_ages_s=tuple(ages),
        )

    def _pods(self, key: Key, pool: str) -> Mapping[str, Object]:
        """The pool's pods by UID."""
        pods = self._children.of(key, "Pod").values()
        return {pod["metadata"]["uid"]: pod for pod in pods if pod["metadata"]["labels"].get(labels.POOL) == pool}

    async def scale(self, pool_id: str, replicas: int, victims: Sequence[str]) -> None:
        """Cordons the victims, makes them the cheapest to delete, and sets the size; who was a victim before is none any more.

        A refusal of the API server is logged and leaves the size as it is: the next look decides anew.
        """
        namespace, model, pool = pool_id.split("/")
        key = Key("InferenceModel", namespace, model)
        try:
            for uid, pod in self._pods(key, pool).items():
                cordoned = labels.CORDONED in pod["metadata"].get("annotations", {})
                if is_live(pod) and cordoned != (uid in victims):
                    await self._mark(pod, uid in victims)
            await self._scale(namespace, child_name(model, pool), replicas)
        except ApiException as error:
            log.warning("scaling %s to %d: %s", pool_id, replicas, said(error))

    async def _mark(self, pod: Object, victim: bool) -> None:
        """Server-side apply of the two annotations: applied without them, they go."""
        meta = pod["metadata"]
        annotations = {labels.CORDONED: "true", DELETION_COST: VICTIM_COST} if victim else {}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
                "annotations": annotations,
            },
        }
        await self._api.apply(body, SCALE_MANAGER)

    async def record(self, pool_id: str, current: int, decision: Decision, *, acted: bool, dry_run: bool) -> None:
        """Keeps the decision for the model's status, counts it, and posts an Event where it was carried out."""
        namespace, name, pool = pool_id.split("/")
        key = Key("InferenceModel", namespace, name)
        self._desired.labels(namespace, name, pool).set(decision.replicas)
        self._decisions.labels(decision.constraint).inc()
        old = self._reports.get(pool_id)
        history = old.decisions if old is not None else ()
        if acted:
            history = (f"{timestamp()} {current} to {decision.replicas} ({decision.constraint}): {decision.reason}", *history)[
                :HISTORY
            ]
        new = ScalingStatus(
            current=current,
            desired=decision.replicas,
            constraint=decision.constraint,
            reason=decision.reason,
            active=decision.constraint != "NoData" and not dry_run,
            decisions=history,
        )
        if old is not None and not acted and _gist(old) == _gist(new):
            return  # only the figures in the sentence moved
        self._reports[pool_id] = new
        self._changed(key)
        resource = self._resources.get(key)
        if acted and resource is not None:
            message = f"pool {pool}: {current} to {decision.replicas} replicas: {decision.reason}"
            try:
                await self._api.create(event(resource, "Normal", "Scaled", message, timestamp()))
            except ApiException as error:
                log.warning("%s: no Event Scaled: %s", key, said(error))


def _gist(report: ScalingStatus) -> tuple[int, int, str, bool]:
    return report.current, report.desired, report.constraint, report.active
