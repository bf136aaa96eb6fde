"""The devices of a replica: what its container asks the cluster for, and the memory that its ranks share."""

import math
from typing import Any

from penstock.api.resources import Pool

Object = dict[str, Any]

SHARED_MEMORY_GIB = 1
"""Of /dev/shm for each device. A container has 64 MiB of it, in which collectives between processes fail."""


def devices(pool: Pool) -> Object:
    """A pod template with the devices of a replica, or of its share of each node, to be laid over the engine's; empty on the CPU.

    Extended resources are never overcommitted: requests and limits must be equal.
    """
    if pool.accelerator is None:
        return {}
    count = math.ceil(pool.parallelism.devices / nodes(pool))
    amount = {pool.accelerator.resource: str(count)}
    engine: Object = {"name": "engine", "resources": {"requests": amount, "limits": amount}}
    if count == 1:
        return {"spec": {"containers": [engine]}}
    memory = {"medium": "Memory", "sizeLimit": f"{count * SHARED_MEMORY_GIB}Gi"}
    engine["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
    return {"spec": {"containers": [engine], "volumes": [{"name": "shm", "emptyDir": memory}]}}


def nodes(pool: Pool) -> int:
    """How many nodes one replica spans."""
    room = pool.accelerator.per_node if pool.accelerator is not None else None
    return 1 if room is None else math.ceil(pool.parallelism.devices / room)
