"""The InferenceModels of a YAML file, with their LoraAdapters, as the local runtime runs them."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock.api import fleet, labels
from penstock.api.resources import InferenceModel, LoraAdapter, seconds, unsupported
from penstock.operator.acceptance import sentence
from penstock.operator.autoscale.limits import ModelLimits
from penstock.operator.autoscale.schedule import ScheduleError
from penstock.operator.autoscale.spec import model_limits
from penstock.operator.canary.course import Course, course_of
from penstock.operator.desired import Rendering, TemplateError, deployment, pod_template
from penstock.operator.desired.source import Fetched
from penstock.operator.local.adapters import AdapterError, PlacedAdapter, adapters_of, described, with_adapters
from penstock.operator.overlay import OverlayError

_KIND = {"apiVersion": f"{labels.GROUP}/{labels.VERSION}", "kind": InferenceModel.__name__}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelFileError(ValueError):
    """The file cannot be run; the message names the place and what to change."""


@dataclass(frozen=True)
class LocalModel:
    """One model: what the gateway must know of it, and the Deployments that make its replicas."""

    model: fleet.Model
    source: str
    """Source of the checkpoint."""
    adapters: list[fleet.Adapter]
    pools: list[fleet.Pool]
    deployments: dict[str, dict[str, Any]]
    """Deployments by pool ID."""
    limits: ModelLimits
    """Limits of the pools that the autoscaler sizes."""
    dry_runs: frozenset[str]
    """The names of those of them that it only explains."""
    resource: dict[str, Any]
    """The InferenceModel as it was written."""
    course: Course | None = None
    """If it is a canary that is judged."""


def load_models(path: Path) -> list[LocalModel]:
    """The models of a YAML file.

    Raises:
        ModelFileError: the file cannot be read, holds something else, breaks a rule or uses a field that does nothing yet.
    """
    try:
        documents = [document for document in yaml.safe_load_all(path.read_text()) if document is not None]
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ModelFileError(f"{path}: {error}") from None
    try:
        resources = list(_parse(path, documents))
        models = [it for it in resources if isinstance(it, InferenceModel)]
        adapters = [it for it in resources if isinstance(it, PlacedAdapter)]
        found = [local_model(model, adapters_of(model, models, adapters)) for model in models]
    except (TemplateError, OverlayError, ScheduleError) as error:
        raise ModelFileError(f"{path}: {error}") from None
    except AdapterError as error:
        raise ModelFileError(str(error)) from None
    if not models:
        raise ModelFileError(f"{path} holds no InferenceModel")
    _check_distinct(path, "InferenceModel", [local.model.id for local in found])
    _check_distinct(path, "LoraAdapter", [adapter.id for local in found for adapter in local.adapters])
    served = [served for local in found for served in (local.model, *local.adapters)]
    _check_distinct(path, "served name", [name for one in served for name in one.served_names])
    return found


def one_model(name: str) -> LocalModel:
    """The model in a folder, or of that name on the Hugging Face Hub; a folder wins.

    Raises:
        ModelFileError: there is no such folder, and the name is none of the Hub.
    """
    folder = Path(name)
    if folder.is_dir():
        uri, served = f"file://{folder.resolve()}", folder.resolve().name
    elif _HUB_NAME.fullmatch(name):
        uri, served = f"hf://{name}", name
    else:
        raise ModelFileError(f"{name} is neither a folder nor a name on the Hugging Face Hub such as Qwen/Qwen3-0.6B")
    plain = re.sub(r"[^a-z0-9]+", "-", served.rpartition("/")[2].lower()).strip("-")[:40].strip("-") or "model"
    document = {
        **_KIND,
        "metadata": {"name": plain, "namespace": "default"},
        "spec": {"served": {"name": served}, "source": {"uri": uri}, "pools": [{"name": "default"}]},
    }
    try:
        return local_model(InferenceModel.parse(document))
    except ValueError as error:
        raise ModelFileError(f"{name}: {sentence(error)}") from None


def _check_distinct(path: Path, what: str, names: list[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ModelFileError(f"{path} has more than one {what} {', '.join(twice)}")


def _parse(path: Path, documents: list[Any]) -> Iterator[InferenceModel | PlacedAdapter]:
    for number, document in enumerate(documents, 1):
        place = f"{path}, document {number}"
        if not isinstance(document, dict):
            raise ModelFileError(f"{place} is no Kubernetes resource")
        kind = LoraAdapter if document.get("kind") == LoraAdapter.__name__ else InferenceModel
        try:
            model = kind.parse(document)
        except ValueError as error:  # pydantic's are, too
            raise ModelFileError(f"{place}: {sentence(error, kind)}") from None
        if isinstance(model, LoraAdapter):
            yield PlacedAdapter(place, model)
            continue
        if fields := unsupported(model.spec):
            raise ModelFileError(f"{place}: these fields do nothing yet, remove them: {', '.join(fields)}")
        if model.spec.source.cache is not None or model.spec.source.uri.startswith(("pvc://", "oci://")):
            raise ModelFileError(f"{place}: spec.source: there are no volumes here; remove source.cache, or name a folder")
        if model.spec.source.secret_ref is not None:
            raise ModelFileError(
                f"{place}: spec.source.secretRef: there are no Secrets here; set HF_TOKEN in the environment instead"
            )
        connector = model.spec.engine.connector
        if connector.disk is not None:
            raise ModelFileError(f"{place}: spec.engine.connector.disk: there are no volumes here; remove it")
        if connector.bucket is not None and connector.bucket.secret_ref is not None:
            raise ModelFileError(
                f"{place}: spec.engine.connector.bucket.secretRef: there are no Secrets here; set AWS_ACCESS_KEY_ID"
            )
        if connector.secret_ref is not None:
            raise ModelFileError(
                f"{place}: spec.engine.connector.secretRef: there are no Secrets here; give all pools the role Both"
            )
        for pool in model.spec.pools:
            asked = "accelerator" if pool.accelerator is not None else "resourceClaims" if pool.resource_claims else None
            if asked is not None:
                raise ModelFileError(f"{place}: spec.pools[{pool.name}].{asked}: nobody hands out devices here; remove it")
        yield model


def local_model(model: InferenceModel, adapters: Sequence[LoraAdapter] = ()) -> LocalModel:
    """What the local runtime makes of one model and its adapters."""
    spec, revision = model.spec, model.spec.source.revision
    rendering = Rendering(image="", fetched=None if revision is None else Fetched("", revision))  # the engine finds the commit
    ids = {pool.name: fleet.pool_id(model.metadata.namespace, model.metadata.name, pool.name) for pool in spec.pools}
    model_id = f"{model.metadata.namespace}/{model.metadata.name}"
    return LocalModel(
        model=fleet.Model(
            id=model_id,
            served_names=model.served_names,
            created=time.time(),
            policy=spec.routing.policy,
            weights=fleet.Weights(**spec.routing.weights.model_dump()) if spec.routing.weights else fleet.Weights(),
            priority=spec.routing.priority,
            hold_timeout_s=seconds(spec.routing.hold_timeout),
            canary=None if spec.canary is None else fleet.Canary(of=spec.canary.of, weight=spec.canary.first_weight),
        ),
        source=spec.source.uri,
        adapters=[described(adapter) for adapter in adapters],
        pools=[fleet.Pool(id=ids[pool.name], model=model_id, role=pool.role) for pool in spec.pools],
        deployments={
            ids[pool.name]: with_adapters(deployment(model, pool, pod_template(model, pool, rendering)), adapters)
            for pool in spec.pools
        },
        limits=model_limits(model),
        dry_runs=frozenset(pool.name for pool in spec.pools if pool.scaling is not None and pool.scaling.mode == "DryRun"),
        resource={
            **_KIND,
            "metadata": {"name": model.metadata.name, "namespace": model.metadata.namespace},
            "spec": spec.model_dump(mode="json", by_alias=True, exclude_unset=True),
        },
        course=course_of(spec.canary, model_id),
    )
