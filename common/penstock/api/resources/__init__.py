"""The resources that users apply: `InferenceModel` and `LoraAdapter` (penstock.dev/v1alpha1).

The CRDs are generated from these classes (`crds`, `penstock crds`). Every rule between fields is written once, as a `Rule` with
a CEL form for the API server and a Python form for everywhere else.
"""

from penstock.api.resources.base import Condition, Part, ResourceMeta, Rule, Served, seconds
from penstock.api.resources.canary import Canary, CanaryStatus, Judge
from penstock.api.resources.crd import crds
from penstock.api.resources.lora import LoraAdapter, LoraAdapterSpec, LoraAdapterStatus
from penstock.api.resources.model import Engine, InferenceModel, InferenceModelSpec, Limits, Source
from penstock.api.resources.model_status import InferenceModelStatus, Learned, PoolScalingStatus
from penstock.api.resources.pools import MAX_POOLS, Parallelism, Pool, Rollout, Routing
from penstock.api.resources.scaling import Hint, Scaling, SharedScaling, Slo
from penstock.api.resources.support import kv_alike, unsupported

__all__ = [
    "MAX_POOLS",
    "Canary",
    "CanaryStatus",
    "Condition",
    "Engine",
    "Hint",
    "InferenceModel",
    "InferenceModelSpec",
    "InferenceModelStatus",
    "Judge",
    "Learned",
    "Limits",
    "LoraAdapter",
    "LoraAdapterSpec",
    "LoraAdapterStatus",
    "Parallelism",
    "Part",
    "Pool",
    "PoolScalingStatus",
    "ResourceMeta",
    "Rollout",
    "Routing",
    "Rule",
    "Scaling",
    "Served",
    "SharedScaling",
    "Slo",
    "Source",
    "crds",
    "kv_alike",
    "seconds",
    "unsupported",
]
