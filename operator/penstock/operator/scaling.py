"""The autoscaler on Kubernetes: the pools that it may size, how it sizes them, and where its decisions are published."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kubernetes.aio.client import ApiException
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from penstock.api import labels
from penstock.api.resources import InferenceModel, PoolScalingStatus
from penstock.api.resources import Learned as LearnedStatus
from penstock.operator.acceptance import accept, sentence
from penstock.operator.ages import Ages
from penstock.operator.api import Api, said
from penstock.operator.apply import SCALE_MANAGER, owned
from penstock.operator.autoscale.bounds import WAITING_FOR
from penstock.operator.autoscale.coldstart import Starting
from penstock.operator.autoscale.learned import Learned
from penstock.operator.autoscale.limits import ModelLimits
from penstock.operator.autoscale.loop import ModelScale, PoolScale, Record
from penstock.operator.autoscale.spec import model_limits
from penstock.operator.desired import child_name
from penstock.operator.desired.arguments import HTTP
from penstock.operator.events import event, timestamp
from penstock.operator.objects import Object, Pod, Workload
from penstock.operator.observe import workloads_of
from penstock.operator.observed import ScalingStatus
from penstock.operator.other_scalers import OthersReport, Target
from penstock.operator.pods import base_url, is_live, is_ready, trouble
from penstock.operator.store import Children, Key, Resources, key_of
from penstock.operator.telemetry import ScalingMetrics

log = logging.getLogger(__name__)


VICTIM_COST: Final = "-1000"
HISTORY: Final = 10


@dataclass(frozen=True)
class _Asked:
    """What a model with `scaling` asks for, and what its status says was learned."""

    model: InferenceModel
    limits: ModelLimits
    learned: Mapping[str, Learned]


class KubernetesActuator:
    """`autoscale.loop.Actuator` on Deployments and LeaderWorkerSets."""

    def __init__(
        self,
        *,
        api: Api,
        resources: Resources,
        observed: Children,
        scale: Callable[[str, str, int, str], Awaitable[None]],
        changed: Callable[[Key], None],
        others: OthersReport,
        registry: CollectorRegistry,
        scheme: str = "http",
    ) -> None:
        """
        Args:
            scheme: Of replicas' URLs.
            scale: Sets the replicas of a workload (namespace, name, replicas, kind).
            changed: Told the model whose scaling status changed.
            others: Who else sizes a workload: such a pool is only told about, as in a dry run. Two who size it would take
                replicas from each other for ever.
        """
        self._api = api
        self._resources = resources
        self._children = observed
        self._scale = scale
        self._changed = changed
        self._others = others
        self._scheme = scheme
        self._reports: dict[str, ScalingStatus] = {}
        self._read: dict[Key, tuple[Object, _Asked | None]] = {}
        """The last version of each model, and what it asks for."""
        self._ages = Ages()
        self._metrics = ScalingMetrics(registry)

    def report(self, pool: str) -> ScalingStatus | None:
        """What was last decided for a pool."""
        return self._reports.get(pool)

    async def targets(self) -> Sequence[ModelScale]:
        """Models that have pools with `scaling` whose workloads exist, and are theirs."""
        models = [key for key in self._resources.known() if key.kind == "InferenceModel"]
        self._read = {key: self._reading(key, it) for key in models if (it := self._resources.get(key)) is not None}
        found: list[ModelScale] = []
        for key, (_, asked) in self._read.items():
            if asked is not None and (pools := self._pools(key, asked)):
                found.append(ModelScale(f"{key.namespace}/{key.name}", asked.limits, pools))
        known = {f"{model.id}/{name}" for model in found for name in model.pools}
        self._reports = {pool_id: report for pool_id, report in self._reports.items() if pool_id in known}
        self._metrics.keep(known)
        self._ages.keep(known)
        return found

    def _reading(self, key: Key, resource: Object) -> tuple[Object, _Asked | None]:
        """Parse the resource again only if its version changed: parsing takes half a millisecond, and all models are read twice a
        second."""
        read = self._read.get(key)
        return read if read is not None and read[0] is resource else (resource, _asked(resource))

    def _pools(self, key: Key, asked: _Asked) -> dict[str, PoolScale]:
        found: dict[str, PoolScale] = {}
        for pool in asked.model.spec.pools:
            workload = None if pool.scaling is None else self._workload(key, pool.name)
            if pool.scaling is None or workload is None:
                continue
            pods = [pod for pod in self._pods(key, pool.name).values() if is_live(pod)]
            times = self._ages.of(f"{key.namespace}/{key.name}/{pool.name}", pods)
            found[pool.name] = PoolScale(
                replicas=workload["spec"].get("replicas", 1),
                starting=tuple(
                    Starting(times.ages_s[pod["metadata"]["uid"]], trouble(pod) is not None) for pod in pods if not is_ready(pod)
                ),
                started_s=times.started_s,
                endpoints={
                    pod["metadata"]["uid"]: url for pod in pods if is_ready(pod) and (url := base_url(pod, HTTP, self._scheme))
                },
                dry_run=pool.scaling.mode == "DryRun" or self._other(workload) != "",
                learned=asked.learned.get(pool.name),
            )
        return found

    def _workload(self, key: Key, pool: str) -> Workload | None:
        """Return a pool's workload if its model owns it. The autoscaler sizes no other workload, whatever its labels."""
        workload, model = workloads_of(self._children, key).get(child_name(key.name, pool)), self._resources.get(key)
        mine = workload is not None and model is not None and owned(workload, model["metadata"]["uid"])
        return workload if mine else None

    def _other(self, workload: Workload) -> str:
        meta = workload["metadata"]
        return self._others(Target(meta["namespace"], workload["kind"], meta["name"]))

    def _pods(self, key: Key, pool: str) -> Mapping[str, Pod]:
        """The pool's pods by UID."""
        return {pod["metadata"]["uid"]: pod for pod in self._children.pods(key, pool)}

    async def scale(self, pool_id: str, replicas: int, victims: Sequence[str]) -> None:
        """Cordon the victims, make them the cheapest to delete, and set the size. Former victims that stay are unmarked.

        A refusal of the API server is logged and leaves the size as it is. The next observation decides again.
        """
        namespace, model, pool = pool_id.split("/")
        key = Key("InferenceModel", namespace, model)
        try:
            for uid, pod in self._pods(key, pool).items():
                if is_live(pod) and _is_victim(pod) != (uid in victims):
                    await self._mark(pod, uid in victims)
            workload = self._workload(key, pool)
            if workload is not None:  # else it went since it was looked at
                await self._scale(namespace, child_name(model, pool), replicas, workload["kind"])
        except ApiException as error:
            log.warning("scaling %s to %d: %s", pool_id, replicas, said(error))

    async def spare(self, pool_id: str) -> None:
        """Lets victims have requests again where there are no more replicas than there are to be: others went in their place, or
        the size could not be set. A refusal of the API server is logged; the next look tries again."""
        namespace, model, pool = pool_id.split("/")
        key = Key("InferenceModel", namespace, model)
        workload = self._workload(key, pool)
        live = [pod for pod in self._pods(key, pool).values() if is_live(pod)]
        if workload is None or len(live) > workload["spec"].get("replicas", 1):
            return
        try:
            for pod in live:
                if _is_victim(pod):
                    await self._mark(pod, False)
        except ApiException as error:
            log.warning("sparing the victims of %s: %s", pool_id, said(error))

    async def _mark(self, pod: Pod, victim: bool) -> None:
        """Server-side apply of the two annotations: applied without them, they go."""
        meta = pod["metadata"]
        annotations = {labels.CORDONED: "true", labels.DELETION_COST: VICTIM_COST} if victim else {}
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
        what = "marking %s/%s as the next to go" if victim else "letting %s/%s have requests again"
        log.info(what, meta["namespace"], meta["name"])
        await self._api.apply(body, SCALE_MANAGER)

    async def record(self, record: Record) -> None:
        """Keeps the decision for the model's status, counts it, and posts an Event where it was carried out."""
        namespace, name, pool = record.pool_id.split("/")
        key, decision, current = Key("InferenceModel", namespace, name), record.decision, record.current
        self._metrics.record(record)
        old = self._reports.get(record.pool_id)
        new = reported(record, old, old.decisions if old is not None else self._history(key, pool))
        if old is not None and not record.acted and _gist(old) == _gist(new):
            return  # only the figures in the sentence moved
        self._reports[record.pool_id] = new
        self._changed(key)
        resource = self._resources.get(key)
        if record.acted and resource is not None:
            message = f"pool {pool}: {current} to {decision.replicas} replicas: {decision.reason}"
            try:
                await self._api.create(event(resource, "Normal", "Scaled", message, timestamp()))
            except ApiException as error:
                log.warning("%s: no Event Scaled: %s", key, said(error))

    def _history(self, key: Key, pool: str) -> tuple[str, ...]:
        """The changes that an earlier operator wrote down."""
        status = (self._resources.get(key) or {}).get("status", {})
        return next((tuple(it.get("decisions", ())) for it in status.get("scaling", []) if it["pool"] == pool), ())


def reported(record: Record, old: ScalingStatus | None, history: Sequence[str]) -> ScalingStatus:
    """What a decision makes of the report before it, and of the changes that were made so far."""
    decision, current = record.decision, record.current
    if record.acted:
        change = f"{timestamp()} {current} to {decision.replicas} ({decision.constraint}): {decision.reason}"
        history = (change, *history)[:HISTORY]
    learned = record.learned if old is None or old.learned is None or record.learned.differs(old.learned) else old.learned
    return ScalingStatus(
        current=current,
        desired=decision.replicas,
        constraint=decision.constraint,
        reason=decision.reason,
        idle="NoData" if decision.blind else "DryRun" if record.dry_run else "",
        decisions=tuple(history),
        learned=learned,
        out_of_reach=decision.out_of_reach,
        waits=tuple(name for name in decision.inputs if name.startswith(WAITING_FOR)),
    )


def _is_victim(pod: Pod) -> bool:
    """Return whether a pod has both marks of a victim. One alone is not enough: people cordon pods too, and a template or a
    person may
    set a deletion cost."""
    found: Object = pod["metadata"].get("annotations", {})
    return labels.CORDONED in found and found.get(labels.DELETION_COST) == VICTIM_COST


def _asked(resource: Object) -> _Asked | None:
    """None where it asks for no scaling, or is not acted on."""
    if not _asks_for_scaling(resource):
        return None
    model, refusal = accept(resource)
    return None if model is None or refusal is not None else _Asked(model, model_limits(model), restored(resource))


def _asks_for_scaling(resource: Object) -> bool:
    pools = resource["spec"].get("pools", [])
    return any(isinstance(pool, dict) and "scaling" in pool for pool in pools)


def restored(resource: Object) -> dict[str, Learned]:
    """What the status says was learned, by pool."""
    found: dict[str, Learned] = {}
    for pool in resource.get("status", {}).get("scaling", []):
        try:
            said = PoolScalingStatus.model_validate(pool)
        except ValidationError as error:  # another version's, or a person's: this one learns anew
            log.warning(
                "%s: what the status says of scaling is not understood: %s", key_of(resource), sentence(error, PoolScalingStatus)
            )
            continue
        if said.learned is not None:
            found[said.pool] = _from_status(said.learned)
    return found


def _from_status(said: LearnedStatus) -> Learned:
    return Learned(
        prefill_tokens_per_s=float(said.prefill_tokens_per_second),
        step_base_s=said.step_base_microseconds / 1e6,
        step_row_s=said.step_row_nanoseconds / 1e9,
        max_num_seqs=float(said.max_num_seqs),
        rows_in_kv=float(said.sequences_in_kv),
        cold_start_s=float(said.cold_start_seconds),
        slo_factor=said.slo_percent / 100,
    )


def _gist(report: ScalingStatus) -> tuple[object, ...]:
    """What is worth a new status: all but the figures in sentences."""
    ignored = report.out_of_reach != ""
    return report.current, report.desired, report.constraint, report.idle, report.learned, report.waits, ignored
