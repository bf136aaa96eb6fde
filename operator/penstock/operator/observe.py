"""The model as the cluster has it, gathered for the judgement in `status`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from penstock.api import labels
from penstock.api.fleet import pool_id
from penstock.api.resources import InferenceModel
from penstock.operator.api import WORKLOADS
from penstock.operator.canary.course import Course, Standing, course_of, written
from penstock.operator.desired import revision_of, size
from penstock.operator.loading import LoadedModels
from penstock.operator.objects import Object, Pod, Workload
from penstock.operator.observed import Fetching, Observed, PoolObserved, Refusal, RevisionObserved, ScalingStatus
from penstock.operator.other_scalers import OtherScaler, OthersReport, Target, other_of_model, other_of_pool
from penstock.operator.pods import of_pool
from penstock.operator.rollout.pace import Step
from penstock.operator.rollout.plan import Plan
from penstock.operator.routes import Routing
from penstock.operator.store import Children, Key

ScalingReport = Callable[[str], ScalingStatus | None]
"""What the autoscaler last said of the pool `namespace/model/pool`; None where it has not spoken yet."""
RoutingReport = Callable[[Key, Sequence[str]], Routing]
"""What the gateways say of a model and its pools."""
CanaryReport = Callable[[str, Course | None, Standing | None], Standing | None]
"""Returns the standing of a canary: see `Judges.follow`."""


@dataclass(frozen=True)
class Reports:
    """What other parts of the operator know about models."""

    scaling: ScalingReport
    routing: RoutingReport
    canary: CanaryReport
    others: OthersReport
    url: str = ""
    """URL of the gateway for clients."""


def observe(
    key: Key,
    resource: Object,
    model: InferenceModel | None,
    plan: Plan | None,
    refusal: Refusal | None,
    *,
    children: Children,
    workloads: Mapping[str, Workload],
    pods: Sequence[Pod],
    reports: Reports,
    conflict: str,
    loaded: LoadedModels,
    fetching: Fetching | None = None,
) -> Observed:
    """Collect all that the status is computed from.

    Args:
        plan: None: the model stays as it runs.
        workloads: Its workloads by name.
        pods: The pods of its replicas.
        conflict: Which of its names another model has, in a sentence.
        loaded: How long its replicas took to load their weights.
        fetching: The download that its replicas wait for.
    """
    planned = [] if plan is None else [cast(Workload, item) for item in plan.objects if item["kind"] in WORKLOADS]
    targets = {item["metadata"]["name"]: item for item in planned} or dict(workloads)
    pools: list[PoolObserved] = []
    for name, target in targets.items():
        pool = target["metadata"]["labels"][labels.POOL]
        its_pods = of_pool(pods, pool)
        next_step = plan.steps[pool] if plan is not None else Step()
        observed = _pool(key, model, workloads.get(name), target, its_pods, next_step, reports.scaling)
        moving = plan is not None and pool in plan.extra
        pools.append(
            replace(
                observed,
                moving=moving,
                loaded=loaded.of(key, observed.revision),
                other=_other(key, model, target, reports.others),
            )
        )
    routed = [pool.name for pool in pools]
    if plan is not None:
        pools += [_leaving(pool, live, pods, plan.leaving.blocked) for pool, live in plan.leaving.pools.items()]
    revision = _revision(plan, list(children.of(key, "ControllerRevision").values()))
    return Observed(
        name=key.name,
        generation=resource["metadata"].get("generation", 0),
        pools=pools,
        refusal=refusal,
        conflict=conflict,
        served_name=model.spec.served.name if model is not None else "",
        paused=model is not None and model.spec.rollout.paused,
        url=reports.url,
        routing=reports.routing(key, routed),
        fetching=fetching,
        revision=revision,
        canary=_canary(key, resource, model, revision, reports.canary),
        other=None if model is None else other_of_model(reports.others(Target(key.namespace, key.kind, key.name)), model),
    )


def workloads_of(children: Children, key: Key) -> dict[str, Workload]:
    """A model's workloads by name."""
    return {name: cast(Workload, it) for kind in WORKLOADS for name, it in children.of(key, kind).items()}


def _revision(plan: Plan | None, revisions: Sequence[Object]) -> RevisionObserved | None:
    current = plan.resolution.current if plan is not None else max(revisions, key=lambda it: it["revision"], default=None)
    if current is None:
        return None
    return RevisionObserved(current["revision"], max(it["templateVersion"] for it in current["data"]["pools"].values()))


def _canary(
    key: Key, resource: Object, model: InferenceModel | None, revision: RevisionObserved | None, report: CanaryReport
) -> Standing | None:
    """Return the standing of a canary. If its spec cannot be read, the standing does not change."""
    last = written(resource.get("status", {}))
    if model is None:
        return last
    course = course_of(model.spec.canary, f"{model.metadata.uid} {revision.number if revision is not None else 0}")
    return report(f"{key.namespace}/{key.name}", course, last)


def _pool(
    key: Key,
    model: InferenceModel | None,
    live: Workload | None,
    target: Workload,
    pods: Sequence[Pod],
    next_step: Step,
    scaling: ScalingReport,
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
        role="Both" if spec is None else spec.role,
        cost=0 if spec is None else spec.cost,
        scaled=scaled,
        scaling=scaling(pool_id(key.namespace, key.name, name)) if scaled else None,
        blocked=next_step.blocked,
        settling=next_step.settling,
    )


def _other(key: Key, model: InferenceModel | None, target: Workload, others: OthersReport) -> OtherScaler | None:
    """Return the other autoscaler that sizes the pool of a workload, if there is one."""
    name = target["metadata"]["labels"][labels.POOL]
    pool = next((pool for pool in model.spec.pools if pool.name == name), None) if model is not None else None
    if model is None or pool is None:
        return None
    return other_of_pool(others(Target(key.namespace, target["kind"], target["metadata"]["name"])), target, model, pool)


def _leaving(pool: str, live: Workload, pods: Sequence[Pod], blocked: str) -> PoolObserved:
    """A pool that goes when others can take its place: none of its pods are of a revision that is wanted, and how its own rollout
    went is of no interest any more."""
    its_pods = of_pool(pods, pool)
    return PoolObserved(name=pool, revision="", wanted=0, workload={**live, "status": {}}, pods=its_pods, blocked=blocked)
