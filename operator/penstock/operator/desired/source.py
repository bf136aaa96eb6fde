"""The source of a replica's weights: the Job that downloads them or resolves their commit, the volume, and the engine's
argument."""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Final

from penstock.api import labels
from penstock.api.resources import InferenceModel
from penstock.operator.desired.devices import CPU_ENGINE, unnamed
from penstock.operator.desired.names import model_metadata
from penstock.operator.objects import Object
from penstock.operator.overlay import mapping, merge

MOUNT: Final = "/penstock/models"
"""Mount path of a claim, a node's folder or an image in the pods."""
PROGRESS_PORT: Final = 8002
"""Port of `GET /progress` in the Job's pod. The Job has no token to write its progress, and the operator may not read logs."""
HOPELESS: Final = 3
"""Exit status of `penstock fetch` where another try at once would not help."""
USER: Final = 65532
"""The images' user and group: a new volume is root's, and this makes it theirs."""
_COMMIT: Final = re.compile(r"^[0-9a-f]{40}$")
_SECRET_KEYS: Final = {
    "hf": {"HF_TOKEN": True},
    "s3": {
        "AWS_ACCESS_KEY_ID": True,
        "AWS_SECRET_ACCESS_KEY": True,
        "AWS_SESSION_TOKEN": False,
        "AWS_REGION": False,
        "AWS_ENDPOINT_URL": False,
    },
}
"""By scheme, the keys of the Secret and whether each is required."""
_SHARED: Final = ("imagePullSecrets", "serviceAccountName", "nodeSelector", "tolerations", "priorityClassName")
"""What of a pool's template the Job's pod has too: it uses the same image, and often the same volume and role."""
_AMOUNTS: Final = ("cpu", "memory", "ephemeral-storage")
"""The resources of an engine that a download has too; it needs no devices."""


@dataclass(frozen=True)
class Fetched:
    """What the Job brought."""

    folder: str
    """On the claim; empty where it only found out the version."""
    version: str
    """A commit of the Hub, or a hash of what a bucket held."""


def scheme(model: InferenceModel) -> str:
    """`file` for plain paths."""
    before, separator, _ = model.spec.source.uri.partition("://")
    return before if separator else "file"


def needs_fetch(model: InferenceModel) -> bool:
    """Whether a Job must have run before replicas can start."""
    source = model.spec.source
    return (_claim(model) is not None and scheme(model) != "pvc") or (
        source.revision is not None and not _COMMIT.match(source.revision)
    )


def source_args(model: InferenceModel, fetched: Fetched | None) -> list[str]:
    """Return the model argument of `penstock serve`."""
    source = model.spec.source
    if fetched is not None and fetched.folder:
        return [f"{MOUNT}/{fetched.folder}"]
    if scheme(model) == "oci":
        return [MOUNT]
    if scheme(model) == "pvc":
        return [f"{MOUNT}/{source.uri.removeprefix('pvc://').partition('/')[2]}".rstrip("/")]
    revision = fetched.version if fetched is not None else source.revision
    return [source.uri, *([] if revision is None else [f"--revision={revision}"])]


def source_volume(model: InferenceModel, node_cache: str | None = None) -> Object:
    """A pod template with the volume that holds the model, to be laid over the engine's; empty where there is none.

    Args:
        node_cache: The folder of each node that the administrator gives for downloads.
    """
    if scheme(model) == "oci":
        image = {"reference": model.spec.source.uri.removeprefix("oci://"), "pullPolicy": "IfNotPresent"}
        return _mounted({"image": image}, "engine", read_only=True)
    if on_node(model):
        # A folder for each namespace, which must be there: what one tenant downloads, another must not be able to change.
        folder = {"path": f"{node_cache}/{model.metadata.namespace}", "type": "Directory"}
        return _mounted({"hostPath": folder}, "engine", read_only=False)
    claim = _claim(model)
    return _mounted(_of_claim(claim), "engine", read_only=True) if claim else {}


def on_node(model: InferenceModel) -> bool:
    """Whether replicas download to a folder of their node."""
    cache = model.spec.source.cache
    return cache is not None and cache.type == "Node"


def cache_claim(model: InferenceModel, storage_class: str | None) -> Object | None:
    """The PersistentVolumeClaim that the operator makes for the model's cache; None where it makes none.

    Args:
        storage_class: The administrator's; None: the cluster's default.
    """
    cache = model.spec.source.cache
    if cache is None or cache.size is None:
        return None
    chosen = {} if storage_class is None else {"storageClassName": storage_class}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {**model_metadata(model), "name": _claim(model)},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": cache.size}}, **chosen},
    }


def source_environment(model: InferenceModel) -> list[Object]:
    """The credentials for the source, for the container that downloads."""
    secret = model.spec.source.secret_ref
    return [] if secret is None else credentials(secret.name, scheme(model))


def credentials(secret: str, of: str) -> list[Object]:
    """The variables with a Secret's credentials for a scheme, `hf` or `s3`."""
    references = {
        key: {"name": secret, "key": key, **({} if needed else {"optional": True})} for key, needed in _SECRET_KEYS[of].items()
    }
    return [{"name": key, "valueFrom": {"secretKeyRef": reference}} for key, reference in references.items()]


def fetch_job(model: InferenceModel, default_image: str) -> Object | None:
    """Return the Job that downloads the model to its cache or, without a cache, resolves its commit. None if neither is needed.

    The Job's name encodes what it downloads and for which restart: after a restart it resolves a branch again.

    Raises:
        OverlayError: the first pool's template has the wrong shape.
    """
    if not needs_fetch(model):
        return None
    spec = model.spec.source
    fixed = spec.revision is not None and _COMMIT.match(spec.revision)
    claim = None if spec.cache is None else _claim(model)
    facts = [spec.uri, spec.revision, claim, None if fixed else model.spec.rollout.restarted_at]
    name = f"{model.metadata.name}-fetch-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:10]}"
    base = model_metadata(model)
    hopeless = {"containerName": "fetch", "operator": "In", "values": [HOPELESS]}
    policy = [
        {"action": "FailJob", "onExitCodes": hopeless},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**base, "name": name},
        "spec": {"backoffLimit": 6, "podFailurePolicy": {"rules": policy}, "template": _pod(model, default_image)},
    }


def _pod(model: InferenceModel, default_image: str) -> Object:
    spec, claim = model.spec.source, _claim(model)
    pool = model.spec.pools[0]
    engine: Object = {"name": "engine", "env": []}
    given: Object = merge({"spec": {"containers": [engine]}}, pool.template, f"pools[{pool.name}].template")["spec"]
    more: list[Object] = given["containers"][0]["env"]
    own: list[Object] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *source_environment(model),
    ]
    names = {it["name"] for it in own}
    result = "/run/penstock-fetch/result"
    container: Object = {
        "name": "fetch",
        "resources": _resources(given["containers"][0]),
        "image": model.spec.engine.image or default_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["penstock", "fetch"],
        "args": [
            spec.uri,
            *([] if spec.revision is None else [f"--revision={spec.revision}"]),
            *([] if claim is None else [f"--to={MOUNT}"]),
            f"--result={result}",
            "--host=$(POD_IP)",
            f"--port={PROGRESS_PORT}",
        ],
        # Proxies and mirrors of the replicas are the download's too.
        "env": [*own, *(it for it in more if it.get("name") not in names)],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "terminationMessagePath": result,
    }
    part_of = {"app.kubernetes.io/part-of": "penstock", "app.kubernetes.io/managed-by": "penstock"}
    pod: Object = {
        # Not the label by which replicas are found.
        "metadata": {"labels": {"app.kubernetes.io/name": "penstock-fetch", **part_of, labels.FETCH_OF: model.metadata.name}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
            },
            **{name: given[name] for name in _SHARED if given.get(name)},
            **_node_affinity(given),
            "containers": [container],
        },
    }
    return pod if claim is None else merge(pod, _mounted(_of_claim(claim), "fetch", read_only=False))


def _resources(engine: Object) -> Object:
    """Return the resources of the pool's engine without its devices, with requests if it names none."""
    given = mapping(engine.get("resources"))
    kept: Object = {
        field: {name: amount for name, amount in mapping(given[field]).items() if name in _AMOUNTS}
        for field in ("requests", "limits")
        if field in given
    }
    return merge(kept, {"requests": unnamed(CPU_ENGINE, {}, {"resources": kept})})


def _node_affinity(spec: Object) -> Object:
    """Return the node affinity of the pool's pods. Affinity to other pods is left out, since it could keep the Job from
    starting."""
    nodes = mapping(mapping(spec.get("affinity")).get("nodeAffinity"))
    return {"affinity": {"nodeAffinity": nodes}} if nodes else {}


def _claim(model: InferenceModel) -> str | None:
    if scheme(model) == "pvc":
        return model.spec.source.uri.removeprefix("pvc://").partition("/")[0]
    cache = model.spec.source.cache
    if cache is None or cache.type != "PVC":
        return None
    return cache.claim_name or f"{model.metadata.name}-models"


def _of_claim(name: str) -> Object:
    # Not read-only itself: a volume that one node may write could not be mounted on it for both Job and replicas.
    return {"persistentVolumeClaim": {"claimName": name}}


def _mounted(what: Object, container: str, *, read_only: bool) -> Object:
    mount = {"name": "penstock-models", "mountPath": MOUNT, **({"readOnly": True} if read_only else {})}
    volume = {"name": "penstock-models", **what}
    return {"spec": {"containers": [{"name": container, "volumeMounts": [mount]}], "volumes": [volume]}}
