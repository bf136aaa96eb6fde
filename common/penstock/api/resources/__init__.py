"""The resources that users apply: `InferenceModel` and `LoraAdapter` (penstock.dev/v1alpha1).

The CRDs are generated from these classes (`crds`, `penstock crds`). Every rule between fields is written once, as a `Rule` with
a CEL form for the API server and a Python form for everywhere else.
"""

from penstock.api.resources.base import Condition, Part, ResourceMeta, Rule, Served, seconds
from penstock.api.resources.crd import crds
from penstock.api.resources.lora import LoraAdapter, LoraAdapterSpec, LoraAdapterStatus
from penstock.api.resources.model import Engine, InferenceModel, InferenceModelSpec, InferenceModelStatus, Limits, Source
from penstock.api.resources.pools import Pool, Rollout, Routing, Scaling
from penstock.api.resources.support import unsupported

__all__ = [
    "Condition",
    "Engine",
    "InferenceModel",
    "InferenceModelSpec",
    "InferenceModelStatus",
    "Limits",
    "LoraAdapter",
    "LoraAdapterSpec",
    "LoraAdapterStatus",
    "Part",
    "Pool",
    "ResourceMeta",
    "Rollout",
    "Routing",
    "Rule",
    "Scaling",
    "Served",
    "Source",
    "crds",
    "seconds",
    "unsupported",
]
