"""The InferenceModels of a YAML file, as the local runtime runs them."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from penstock.api import fleet
from penstock.api.resources import InferenceModel, LoraAdapter, seconds, unsupported
from penstock.operator.autoscale.policy import Limits
from penstock.operator.autoscale.spec import limits
from penstock.operator.desired import Rendering, TemplateError, deployment
from penstock.operator.overlay import OverlayError


class ModelFileError(ValueError):
    """The file cannot be run; the message names the place and what to change."""


@dataclass(frozen=True)
class LocalModel:
    """One model: what the gateway must know of it, and the Deployments that make its replicas."""

    model: fleet.Model
    pools: list[fleet.Pool]
    deployments: dict[str, dict[str, Any]]
    """By pool ID."""
    limits: dict[str, Limits]
    """Of the pools that the autoscaler sizes, by pool ID."""
    dry_runs: frozenset[str]
    """Those of them that it only explains."""


def load_models(path: Path) -> list[LocalModel]:
    """The models of a YAML file.

    Raises:
        ModelFileError: the file cannot be read, holds something else, breaks a rule or uses a field that does nothing yet.
    """
    try:
        documents = [document for document in yaml.safe_load_all(path.read_text()) if document is not None]
    except (OSError, yaml.YAMLError) as error:
        raise ModelFileError(f"{path}: {error}") from None
    try:
        models = [_local(model) for model in _parse(path, documents)]
    except (TemplateError, OverlayError) as error:
        raise ModelFileError(f"{path}: {error}") from None
    if not models:
        raise ModelFileError(f"{path} holds no InferenceModel")
    _check_distinct(path, "InferenceModel", [local.model.id for local in models])
    _check_distinct(path, "served name", [name for local in models for name in local.model.served_names])
    return models


def _check_distinct(path: Path, what: str, names: list[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ModelFileError(f"{path} has more than one {what} {', '.join(twice)}")


def _parse(path: Path, documents: list[Any]) -> Iterator[InferenceModel]:
    for number, document in enumerate(documents, 1):
        place = f"{path}, document {number}"
        if not isinstance(document, dict):
            raise ModelFileError(f"{place} is no Kubernetes resource")
        if document.get("kind") == LoraAdapter.__name__:
            raise ModelFileError(f"{place}: LoraAdapter: adapters do nothing yet")
        try:
            model = InferenceModel.parse(document)
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            raise ModelFileError(f"{place}: {faults}") from None
        except ValueError as error:
            raise ModelFileError(f"{place}: {error}") from None
        if fields := unsupported(model.spec):
            raise ModelFileError(f"{place}: these fields do nothing yet, remove them: {', '.join(fields)}")
        if model.spec.source.secret_ref is not None:
            raise ModelFileError(
                f"{place}: spec.source.secretRef: there are no Secrets here; set HF_TOKEN in the environment instead"
            )
        yield model


def _local(model: InferenceModel) -> LocalModel:
    spec = model.spec
    ids = {pool.name: fleet.pool_id(model.metadata.namespace, model.metadata.name, pool.name) for pool in spec.pools}
    model_id = f"{model.metadata.namespace}/{model.metadata.name}"
    return LocalModel(
        model=fleet.Model(
            id=model_id,
            served_names=model.served_names,
            created=time.time(),
            policy=spec.routing.policy,
            hold_timeout_s=seconds(spec.routing.hold_timeout),
        ),
        pools=[fleet.Pool(id=ids[pool.name], model=model_id, role=pool.role) for pool in spec.pools],
        deployments={ids[pool.name]: deployment(model, pool, Rendering(image="")) for pool in spec.pools},
        limits={ids[pool.name]: limits(pool.scaling) for pool in spec.pools if pool.scaling is not None},
        dry_runs=frozenset(ids[pool.name] for pool in spec.pools if pool.scaling is not None and pool.scaling.mode == "DryRun"),
    )
