"""One replica: the pod template, with the user's own laid over it."""

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, cast

from penstock.api import labels
from penstock.api.resources import InferenceModel, Pool, kv_alike, seconds
from penstock.operator import restrictions
from penstock.operator.desired.arguments import ADMIN, HTTP, KV_DISK, KV_SECRET, KV_SECRET_KEY, engine_args, event_ports
from penstock.operator.desired.devices import asks_for_device, devices, engine_requests, unnamed
from penstock.operator.desired.names import common_labels
from penstock.operator.desired.source import MOUNT, Fetched, credentials, needs_fetch, on_node, source_environment, source_volume
from penstock.operator.objects import AnyObject, Object
from penstock.operator.overlay import merge
from penstock.operator.restrictions import Allowances

TEMPLATE_VERSION = 6
"""Version of the templates that `pod_template` renders. Raise it with every change of what an unchanged spec renders to. It is
only
shown to people: an upgrade restarts no replicas because revisions hold their templates (see `rollout.revisions`)."""
DRAIN_MARGIN_S = 15
"""Between the end of the drain and the kubelet's SIGKILL: the engine's own shutdown, and the time until SIGTERM arrives."""
PROBE_PERIOD_S = 2
STARTUP_PERIOD_S = 5
ENGINE_RELEASE = re.compile(r"(?:.*/)?penstock/engine:(\d+)\.(\d+)\.\d+")
"""A released engine image, on any registry."""
LIVE_SINCE = (0, 1)
"""The first release whose engines answer `/live`."""
NODE_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""Taints of a node from which nothing is heard."""
NODE_LOST_S = 30
"""How long a replica waits for such a node before another one takes its place. Kubernetes would wait five minutes."""


class SourcePending(Exception):
    """A template cannot be rendered before it is known where its weights are."""


class TemplateError(ValueError):
    """A pool's template asks for what it may not have; the message names the fields."""


@dataclass(frozen=True)
class Rendering:
    """What decides a template beside the spec: the operator's flags, and what was fetched."""

    image: str
    """Engine image where the model names none."""
    system_namespace: str = "penstock-system"
    """The operator's namespace, which alone reaches the replicas' administrative port."""
    allow_privileged_templates: bool = False
    """Any field, and all that `allowances` lists."""
    allowances: Allowances = field(default_factory=Allowances)
    monitor_labels: dict[str, str] | None = None
    """Labels of each model's PodMonitor, by which a Prometheus selects it. None: no PodMonitors."""
    node_cache: str | None = None
    """A folder of each node where replicas may keep downloads; None: there is none."""
    storage_class: str | None = None
    """Storage class of claims for caches. None: the cluster's default."""
    fetched: Fetched | None = None
    """What the model's Job brought; None: it is not done, or there is none."""


def revision_of(workload: AnyObject) -> str:
    """Hash of everything that decides what a replica of this workload runs."""
    spec = workload["spec"]
    template = spec["template"] if workload["kind"] == "Deployment" else spec["leaderWorkerTemplate"]["leaderTemplate"]
    return str(template["metadata"]["labels"][labels.REVISION])


def pod_template(model: InferenceModel, pool: Pool, rendering: Rendering) -> Object:
    """The replica, with the pool's template laid over it and labelled with the hash of the result.

    Raises:
        TemplateError, OverlayError: see `children`.
        SourcePending: The model's Job is not done.
    """
    check_template(pool, rendering)
    _check_new_template(pool, rendering)
    if needs_fetch(model) and rendering.fetched is None:
        raise SourcePending(model.metadata.name)
    if on_node(model) and rendering.node_cache is None:
        raise TemplateError("source.cache: type Node: start the operator with --node-cache, or use another cache")
    annotations: dict[str, str] = {}
    if pool.role != "Both":  # other pods have nobody to exchange KV blocks with
        annotations[labels.KV_LAYOUT] = kv_layout(model, pool, rendering.fetched)
    if model.spec.rollout.restarted_at is not None:
        annotations[labels.RESTARTED_AT] = model.spec.rollout.restarted_at
    base = {
        "metadata": {"labels": common_labels(model, pool), **({"annotations": annotations} if annotations else {})},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": math.ceil(seconds(model.spec.drain_timeout)) + DRAIN_MARGIN_S,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "tolerations": [],
            "containers": [_engine(model, pool, rendering)],
        },
    }
    template = merge(
        reduce(
            merge, [devices(pool), source_volume(model, rendering.node_cache), _kv_secret(model, pool), _kv_disk(model)], base
        ),
        pool.template,
        f"pools[{pool.name}].template",
    )
    template["spec"]["tolerations"] = _tolerations(template["spec"]["tolerations"])
    template = _completed(template, pool)
    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]
    return merge(template, {"metadata": {"labels": {labels.REVISION: digest}}})


def _completed(template: Object, pool: Pool) -> Object:
    """Add the requests that the template lacks. If nothing asks for a device, tell the engine to use none: a node's container
    runtime may
    expose a GPU to every container."""
    spec = template["spec"]
    (engine,) = (it for it in spec["containers"] if it["name"] == "engine")
    more: Object = {"name": "engine"}
    if requests := unnamed(engine_requests(pool), spec, engine):
        more["resources"] = {"requests": requests}
    if not asks_for_device(spec, engine):
        more["args"] = [*engine["args"], "--device=cpu"]
    return merge(template, {"spec": {"containers": [more]}}, f"pools[{pool.name}].template")


def _tolerations(own: list[Any]) -> list[Object]:
    """The user's own, and short ones for lost nodes where those say nothing of them. (No key means every taint.)"""
    known = [cast(Object, it) for it in own if isinstance(it, dict)]  # anything else the API server refuses
    named = {it.get("key") for it in known if it.get("effect") in (None, "", "NoExecute")}
    ours = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": NODE_LOST_S}
    return [*own, *({"key": key, **ours} for key in NODE_LOST if not {key, None, ""} & named)]


def check_template(pool: Pool, rendering: Rendering) -> None:
    """Raises TemplateError where the pool's metadata or template asks for what it may not have."""
    refused = [*restrictions.reserved_of_workload(pool.metadata.model_dump()), *restrictions.reserved(pool.template)]
    if refused:
        raise TemplateError(f"pools[{pool.name}]: {', '.join(refused)}: Penstock or Kubernetes sets this; remove it")
    asked = [] if rendering.allow_privileged_templates else restrictions.forbidden(pool.template)
    if asked:
        raise TemplateError(
            f"pools[{pool.name}]: {', '.join(asked)}: not allowed in a template; remove it, "
            "or start the operator with --allow-privileged-templates"
        )


def _check_new_template(pool: Pool, rendering: Rendering) -> None:
    """Raises TemplateError where a template that no revision has yet asks for what no flag of the operator lists."""
    found = {} if rendering.allow_privileged_templates else restrictions.unlisted(pool.template, rendering.allowances)
    if found:
        paths, flags = ", ".join(sorted(found)), ", ".join(dict.fromkeys(found.values()))
        raise TemplateError(
            f"pools[{pool.name}]: {paths}: not allowed in a template; remove it, or start the operator with {flags}"
        )


def kv_layout(model: InferenceModel, pool: Pool, fetched: Fetched | None = None) -> str:
    """Fingerprint of all that decides the content and layout of a replica's KV cache: blocks travel only between equal ones."""
    engine = model.spec.engine
    facts = {
        "source": model.spec.source.model_dump(mode="json", include={"uri", "revision", "load_format"}),
        **({} if fetched is None else {"version": fetched.version}),
        "engine": engine.model_dump(mode="json", include={"image", "dtype", "quantization", "extra_args"}),
        "block_size": engine.limits.block_size,
        **kv_alike(model.spec, pool.parallelism),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _engine(model: InferenceModel, pool: Pool, rendering: Rendering) -> Object:
    """The engine's container. Its flags name the pod's own address, so that it runs as a plain process just the same."""
    started = math.ceil(seconds(model.spec.rollout.progress_deadline) / STARTUP_PERIOD_S)
    image = model.spec.engine.image or rendering.image
    return {
        "name": "engine",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["penstock", "serve"],
        "args": engine_args(model, rendering.fetched, pool),
        "env": _environment(model),
        "ports": [
            {"name": labels.HTTP_PORT, "containerPort": HTTP, "protocol": "TCP"},
            {"name": labels.ADMIN_PORT, "containerPort": ADMIN, "protocol": "TCP"},
            *({"name": name, "containerPort": number, "protocol": "TCP"} for name, number in event_ports(pool)),
        ],
        # Loading takes minutes; until it is done only the start-up probe counts, so that nothing kills a loading replica.
        "startupProbe": _probe(model, "/ready", STARTUP_PERIOD_S, started),
        "readinessProbe": _probe(model, "/ready", PROBE_PERIOD_S, 3),
        "livenessProbe": _probe(model, _liveness_path(image), 10, 3),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        # The last words of an engine that dies are the status' explanation.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _kv_secret(model: InferenceModel, pool: Pool) -> Object:
    """A pod template with the secret that replicas of both roles know, to be laid over the engine's; empty for other pools."""
    secret = model.spec.engine.connector.secret_ref
    if pool.role == "Both" or secret is None:
        return {}
    items = [{"key": KV_SECRET_KEY, "path": KV_SECRET_KEY}]
    mount = {"name": "kv-transfer", "mountPath": KV_SECRET, "readOnly": True}
    volume = {"name": "kv-transfer", "secret": {"secretName": secret.name, "items": items}}
    return {"spec": {"volumes": [volume], "containers": [{"name": "engine", "volumeMounts": [mount]}]}}


def _kv_disk(model: InferenceModel) -> Object:
    """A pod template with the disk for KV pages, to be laid over the engine's; empty without one."""
    disk = model.spec.engine.connector.disk
    if disk is None:
        return {}
    place: Object = {"emptyDir": {}} if disk.claim_name is None else {"persistentVolumeClaim": {"claimName": disk.claim_name}}
    mount = {"name": "kv-pages", "mountPath": KV_DISK}
    return {"spec": {"volumes": [{"name": "kv-pages", **place}], "containers": [{"name": "engine", "volumeMounts": [mount]}]}}


def _liveness_path(image: str) -> str:
    """`/live`, or `/health` for an image that may be too old for it: a 404 would restart such an engine for ever. `/health` is
    safe behind a start-up probe, and the kubelet stops liveness probes when a pod ends."""
    release = ENGINE_RELEASE.fullmatch(image)
    known = release is not None and (int(release[1]), int(release[2])) >= LIVE_SINCE
    return "/live" if known else "/health"


def _probe(model: InferenceModel, path: str, period_s: int, failures: int) -> Object:
    tls = any(argument.partition("=")[0] == "--ssl-certfile" for argument in model.spec.engine.extra_args)
    get = {"path": path, "port": labels.HTTP_PORT, "scheme": "HTTPS" if tls else "HTTP"}
    return {"httpGet": get, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}


def _environment(model: InferenceModel) -> list[Object]:
    environment: list[Object] = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    if on_node(model):  # the caches of Hugging Face's library and of our own sources are in there
        environment.append({"name": "XDG_CACHE_HOME", "value": MOUNT})
    # Where a Job downloads, the replicas need no credentials.
    fetched = model.spec.source.cache is not None and not on_node(model)
    source = [] if fetched else source_environment(model)
    bucket = model.spec.engine.connector.bucket
    pages = [] if bucket is None or bucket.secret_ref is None else credentials(bucket.secret_ref.name, "s3")
    return [*environment, *source, *(it for it in pages if it not in source)]  # equal where both name one Secret
