"""What a model's reconcile is to bring about: its present revision, how fast each pool may go there, and all child objects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from penstock.api import labels
from penstock.api.resources import InferenceModel
from penstock.operator import restrictions
from penstock.operator.desired import (
    TEMPLATE_VERSION,
    Pace,
    Rendering,
    child_name,
    children,
    pod_template,
)
from penstock.operator.desired.size import may_surge
from penstock.operator.objects import Object, Pod, Workload
from penstock.operator.pods import is_live, of_pool, revision
from penstock.operator.rollout.leaving import Leaving, leaving
from penstock.operator.rollout.pace import Step, step
from penstock.operator.rollout.revisions import Resolution, resolve, sound


@dataclass(frozen=True)
class Plan:
    """A plan for one model, made again at each reconcile."""

    resolution: Resolution
    steps: dict[str, Step]
    """Steps by pool."""
    objects: list[Object]
    """Objects in the order to apply them."""
    leaving: Leaving
    """Pools that the spec names no longer."""
    extra: dict[str, int] = field(default_factory=dict[str, int])
    """Replicas beyond the size of a pool, by pool, while the node of its only one is drained."""

    @property
    def kept(self) -> frozenset[tuple[str, str]]:
        """Kind and name of children that stay as they are."""
        return frozenset(("ControllerRevision", name) for name in self.resolution.kept) | self.leaving.kept

    @property
    def look_again_s(self) -> float | None:
        """When to look again though nothing happened."""
        times = (it.look_again_s for it in (*self.steps.values(), self.leaving))
        return min((it for it in times if it is not None), default=None)


def plan(
    model: InferenceModel,
    rendering: Rendering,
    *,
    revisions: Sequence[Object],
    workloads: Mapping[str, Workload],
    pods: Sequence[Pod],
    now: datetime,
    adapter_names: Sequence[str] = (),
    going: frozenset[str] | None = None,
) -> Plan:
    """Return the plan for a model with these children.

    Args:
        revisions: Its ControllerRevisions. A revision that another client wrote may ask for no more than a template may.
        workloads: Its workloads by name.
        adapter_names: Names of its LoRA adapters in requests.
        going: Names of the nodes that are about to be removed. None: not known.

    Raises:
        TemplateError, OverlayError, SourcePending: See `desired.pod_template`. Trusted revisions are not checked again.
    """
    running = frozenset(revision(pod) for pod in pods if is_live(pod))
    trusted = [it for it in revisions if sound(it) and (rendering.allow_privileged_templates or not _privileged(it))]
    resolution = resolve(
        model, trusted, running, lambda model, pool: pod_template(model, pool, rendering), version=TEMPLATE_VERSION
    )
    steps: dict[str, Step] = {}
    for pool in model.spec.pools:
        workload = workloads.get(child_name(model.metadata.name, pool.name))
        steps[pool.name] = step(
            workload,
            of_pool(pods, pool.name),
            resolution.templates[pool.name]["metadata"]["labels"][labels.REVISION],
            wanted=workload["spec"].get("replicas", 1) if workload is not None else 0,
            allow_downtime=model.spec.rollout.allow_downtime,
            paused=model.spec.rollout.paused,
            now=now,
        )
    paces: dict[str, Pace] = {name: it.pace for name, it in steps.items()}
    extra = None if going is None else _extra(model, pods, going)
    objects = [resolution.current, *children(model, rendering, resolution.templates, paces, adapter_names, extra)]
    return Plan(resolution, steps, objects, leaving(model, workloads, pods, now), extra or {})


def _extra(model: InferenceModel, pods: Sequence[Pod], going: frozenset[str]) -> dict[str, int]:
    """One more replica for each pool whose only one is on a node that is about to go."""
    named = {pool.name for pool in model.spec.pools if may_surge(model, pool)}
    on_going = [pod for pod in pods if is_live(pod) and pod.get("spec", {}).get("nodeName") in going]
    return {name: 1 for name in named if of_pool(on_going, name)}


def _privileged(revision: Object) -> bool:
    return any(restrictions.forbidden(entry["template"]) for entry in revision["data"]["pools"].values())
