"""From an InferenceModel to the objects that realise it: a pure function, one file a kind.

The same objects run on Kubernetes and, as processes, on one machine.
"""

from collections.abc import Mapping, Sequence

from penstock.api.resources import InferenceModel
from penstock.operator.desired.arguments import engine_args
from penstock.operator.desired.budget import disruption_budget
from penstock.operator.desired.deployment import Pace, deployment
from penstock.operator.desired.devices import nodes
from penstock.operator.desired.exposure import inference_pool, pod_monitor
from penstock.operator.desired.leader_worker_set import leader_worker_set
from penstock.operator.desired.names import child_name
from penstock.operator.desired.network_policy import network_policy, worker_network_policy
from penstock.operator.desired.pod import (
    TEMPLATE_VERSION,
    Rendering,
    SourcePending,
    TemplateError,
    check_template,
    pod_template,
    revision_of,
)
from penstock.operator.desired.service import service
from penstock.operator.desired.size import Size, size
from penstock.operator.objects import Object

__all__ = [
    "TEMPLATE_VERSION",
    "Pace",
    "Rendering",
    "Size",
    "SourcePending",
    "TemplateError",
    "check_template",
    "child_name",
    "children",
    "deployment",
    "engine_args",
    "pod_template",
    "revision_of",
    "size",
]


def children(
    model: InferenceModel,
    rendering: Rendering,
    templates: Mapping[str, Object] | None = None,
    paces: Mapping[str, Pace] | None = None,
    adapter_names: Sequence[str] = (),
    extra: Mapping[str, int] | None = None,
) -> list[Object]:
    """Return all objects that the model owns except its revisions, in the order to apply them.

    Args:
        templates: Pod templates by pool, as a revision has them. None: render them now.
        paces: Pace of the rollout by pool; `Surge` if missing.
        adapter_names: Names of its LoRA adapters in requests.
        extra: By pool, replicas beyond its size that replace those on a drained node. None: nodes are not known.

    Raises:
        TemplateError: a template asks for something that is not allowed.
        OverlayError: a template has the wrong shape.
    """
    objects: list[Object] = []
    for pool in model.spec.pools:
        objects.append(service(model, pool))
        budget = disruption_budget(model, pool, surge=extra is not None)
        if budget is not None:
            objects.append(budget)
        template = pod_template(model, pool, rendering) if templates is None else templates[pool.name]
        objects.append(network_policy(model, pool, template, rendering.system_namespace))
        if nodes(pool) > 1:
            objects.append(worker_network_policy(model, pool))
        pace: Pace = (paces or {}).get(pool.name, "Surge")
        if nodes(pool) == 1:
            objects.append(deployment(model, pool, template, pace, (extra or {}).get(pool.name, 0)))
        else:
            objects.append(leader_worker_set(model, pool, template, pace))
    labels = rendering.monitor_labels
    return [*objects, *inference_pool(model, adapter_names), *([] if labels is None else [pod_monitor(model, labels)])]
