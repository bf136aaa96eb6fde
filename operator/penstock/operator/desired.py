"""From an InferenceModel to the objects that realise it: a pure function, one function a kind.

The same objects run on Kubernetes and, as processes, on one machine.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from penstock.api import labels
from penstock.api.resources import InferenceModel, Pool, seconds
from penstock.operator import restrictions
from penstock.operator.overlay import merge

Object = dict[str, Any]

HTTP, EVENTS, REPLAY = 8000, 5557, 5558
DRAIN_MARGIN_S = 15
"""Between the end of the drain and the kubelet's SIGKILL: the engine's own shutdown, and the time until SIGTERM arrives."""
PROBE_PERIOD_S = 2
STARTUP_PERIOD_S = 5


class TemplateError(ValueError):
    """A pool's template asks for what it may not have; the message names the fields."""


@dataclass(frozen=True)
class Rendering:
    """What the operator's flags decide."""

    image: str
    """Engine image where the model names none."""
    allow_privileged_templates: bool = False


@dataclass(frozen=True)
class Size:
    """How many replicas a pool has, and who says so."""

    initial: int
    owner: Literal["spec", "autoscaler", "others"]
    """`spec`: always `initial`. Else `initial` is for the creation only, and later the workload's scale belongs to the autoscaler
    or to whoever writes it (HPA, KEDA, kubectl)."""


def size(model: InferenceModel, pool: Pool) -> Size:
    """How many replicas the pool has at first, and who decides later."""
    if pool.scaling is not None:
        return Size(max(pool.scaling.min, 1), "autoscaler")
    if model.spec.replicas is not None:
        return Size(model.spec.replicas, "spec")
    return Size(1, "others")


def children(model: InferenceModel, rendering: Rendering) -> list[Object]:
    """Everything that the model is to own, in the order in which to apply it.

    Raises:
        TemplateError: a template asks for what it may not have.
        OverlayError: a template has a shape that does not fit.
    """
    objects: list[Object] = []
    for pool in model.spec.pools:
        objects.append(service(model, pool))
        wanted = size(model, pool)
        if wanted.owner != "spec" or wanted.initial > 1:
            objects.append(disruption_budget(model, pool))
        objects.append(deployment(model, pool, rendering))
    return objects


def child_name(model: str, pool: str) -> str:
    """The name of all of a pool's child objects."""
    return f"{model}-{pool}"


def revision_of(workload: Object) -> str:
    """Hash of everything that decides what a replica of this Deployment runs."""
    return str(workload["spec"]["template"]["metadata"]["labels"][labels.REVISION])


def selector(model: InferenceModel, pool: Pool) -> dict[str, str]:
    """The labels by which a pool's pods are found."""
    return {labels.MODEL: model.metadata.name, labels.POOL: pool.name}


def _metadata(model: InferenceModel, pool: Pool) -> Object:
    owner = {
        "apiVersion": f"{labels.GROUP}/{labels.VERSION}",
        "kind": "InferenceModel",
        "name": model.metadata.name,
        "uid": model.metadata.uid,
        "controller": True,
    }
    return {
        "name": child_name(model.metadata.name, pool.name),
        "namespace": model.metadata.namespace,
        "labels": _labels(model, pool),
        "ownerReferences": [owner],
    }


def _labels(model: InferenceModel, pool: Pool) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "penstock-engine",
        "app.kubernetes.io/instance": model.metadata.name,
        "app.kubernetes.io/component": "engine",
        "app.kubernetes.io/part-of": "penstock",
        "app.kubernetes.io/managed-by": "penstock",
        **selector(model, pool),
        labels.ROLE: pool.role,
    }


def service(model: InferenceModel, pool: Pool) -> Object:
    """A headless Service: names and EndpointSlices for the pool's ready replicas."""
    ports = [
        {"name": name, "port": number, "targetPort": name, "protocol": "TCP"}
        for name, number in ((labels.HTTP_PORT, HTTP), (labels.EVENTS_PORT, EVENTS), (labels.REPLAY_PORT, REPLAY))
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(model, pool),
        "spec": {"clusterIP": "None", "selector": selector(model, pool), "ports": ports},
    }


def disruption_budget(model: InferenceModel, pool: Pool) -> Object:
    """Node drains take one replica at a time. For a single one there is none, since it would block a drain for ever."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(model, pool),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector(model, pool)}},
    }


def deployment(model: InferenceModel, pool: Pool, rendering: Rendering) -> Object:
    """The pool's workload. A new revision's replica must be ready before an old one goes."""
    rollout = model.spec.rollout
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(model, pool),
        "spec": {
            "replicas": size(model, pool).initial,
            "selector": {"matchLabels": selector(model, pool)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "progressDeadlineSeconds": math.ceil(seconds(rollout.progress_deadline)),
            "revisionHistoryLimit": 2,
            "paused": rollout.paused,
            "template": pod_template(model, pool, rendering),
        },
    }


def pod_template(model: InferenceModel, pool: Pool, rendering: Rendering) -> Object:
    """The replica, with the pool's template laid over it and labelled with the hash of the result.

    Raises:
        TemplateError, OverlayError: see `children`.
    """
    refused = restrictions.reserved(pool.template)
    if refused:
        raise TemplateError(f"pools[{pool.name}]: {', '.join(refused)}: Penstock sets this; remove it")
    asked = [] if rendering.allow_privileged_templates else restrictions.forbidden(pool.template)
    if asked:
        raise TemplateError(
            f"pools[{pool.name}]: {', '.join(asked)}: not allowed in a template; remove it, "
            "or start the operator with --allow-privileged-templates"
        )
    base = {
        "metadata": {"labels": _labels(model, pool)},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": math.ceil(seconds(model.spec.drain_timeout)) + DRAIN_MARGIN_S,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [_engine(model, rendering)],
        },
    }
    template = merge(base, pool.template, f"pools[{pool.name}].template")
    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]
    return merge(template, {"metadata": {"labels": {labels.REVISION: digest}}})


def _engine(model: InferenceModel, rendering: Rendering) -> Object:
    """The engine's container. Its flags name the pod's own address, so that it runs as a plain process just the same."""
    started = math.ceil(seconds(model.spec.rollout.progress_deadline) / STARTUP_PERIOD_S)
    return {
        "name": "engine",
        "image": model.spec.engine.image or rendering.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["penstock", "serve"],
        "args": engine_args(model),
        "env": _environment(model),
        "ports": [
            {"name": labels.HTTP_PORT, "containerPort": HTTP, "protocol": "TCP"},
            {"name": labels.EVENTS_PORT, "containerPort": EVENTS, "protocol": "TCP"},
            {"name": labels.REPLAY_PORT, "containerPort": REPLAY, "protocol": "TCP"},
        ],
        # Loading takes minutes; until it is done only the start-up probe counts, so that nothing kills a loading replica.
        "startupProbe": _probe("/ready", STARTUP_PERIOD_S, started),
        "readinessProbe": _probe("/ready", PROBE_PERIOD_S, 3),
        "livenessProbe": _probe("/health", 10, 3),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        # The last words of an engine that dies are the status' explanation.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _probe(path: str, period_s: int, failures: int) -> Object:
    get = {"path": path, "port": labels.HTTP_PORT, "scheme": "HTTP"}
    return {"httpGet": get, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}


def _environment(model: InferenceModel) -> list[Object]:
    environment: list[Object] = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    secret = model.spec.source.secret_ref
    if secret is not None:
        environment.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret.name, "key": "HF_TOKEN"}}})
    return environment


def engine_args(model: InferenceModel) -> list[str]:
    """The arguments of `penstock serve`."""
    engine, limits = model.spec.engine, model.spec.engine.limits
    flags = {
        "--dtype": engine.dtype,
        "--max-model-len": limits.max_model_len,
        "--max-num-seqs": limits.max_num_seqs,
        "--max-num-batched-tokens": limits.max_batched_tokens,
        "--long-prefill-token-threshold": limits.long_prefill_threshold,
        "--block-size": limits.block_size,
        "--gpu-memory-utilization": None if limits.memory_percent is None else limits.memory_percent / 100,
    }
    return [
        model.spec.source.uri,
        "--served-model-name",  # takes all words up to the next flag
        *model.served_names,
        "--host=$(POD_IP)",
        f"--port={HTTP}",
        f"--events-port={EVENTS}",
        f"--replay-port={REPLAY}",
        f"--shutdown-timeout={math.ceil(seconds(model.spec.drain_timeout))}",
        *(f"{flag}={value}" for flag, value in flags.items() if value is not None),
        *engine.extra_args,
    ]
