"""How many replicas a pool has, and whose decision that is."""

from dataclasses import dataclass
from typing import Literal

from penstock.api.resources import InferenceModel, Pool
from penstock.operator.desired.devices import nodes


@dataclass(frozen=True)
class Size:
    """How many replicas a pool has, and who says so."""

    initial: int
    owner: Literal["spec", "autoscaler", "others"]
    """`spec`: always `initial`. Otherwise `initial` applies at creation only, and later the autoscaler or another client (HPA,
    KEDA,
    kubectl) sets the workload's scale."""


def size(model: InferenceModel, pool: Pool) -> Size:
    """How many replicas the pool has at first, and who decides later."""
    if pool.scaling is not None:
        return Size(max(pool.scaling.min, 1), "autoscaler")
    if model.spec.replicas is not None:
        return Size(model.spec.replicas, "spec")
    return Size(1, "others")


def may_surge(model: InferenceModel, pool: Pool) -> bool:
    """Whether the pool's only replica is to have a successor before its node is drained. Of groups that span nodes,
    LeaderWorkerSets would stop the successor first."""
    return model.spec.rollout.surge_before_evict and size(model, pool) == Size(1, "spec") and nodes(pool) == 1
