"""What a replica's container asks the cluster for: devices, the memory that their ranks share, and CPU and memory."""

import math
from collections.abc import Mapping
from typing import Any, Final

from penstock.api.resources import Pool
from penstock.operator.objects import Object
from penstock.operator.overlay import mapping

SHARED_MEMORY_GIB = 1
"""Size of /dev/shm for each device. A container's default of 64 MiB is too small for collectives between processes."""


CPU_MEMORY_GIB: Final = 2
"""Memory of an engine on the CPU, for each data-parallel rank. Real models need more, which their template says."""
CPU_ENGINE: Final[Mapping[str, str]] = {"cpu": "1", "memory": f"{CPU_MEMORY_GIB}Gi"}
"""Requests of an engine of one rank on the CPU, which computes in one thread."""
CPUS_A_DEVICE: Final = 2
"""The core and the frontend each keep a CPU busy."""
MEMORY_A_DEVICE_GIB: Final = 8
"""Memory for torch, the CUDA context and the pinned buffers through which weights are loaded."""


def devices(pool: Pool) -> Object:
    """A pod template with the devices of a replica, or of its share of each node, to be laid over the engine's; empty on the CPU.

    Extended resources are never overcommitted: requests and limits must be equal.
    """
    if not pool.has_devices:
        return {}
    count = _a_node(pool)
    engine: Object = {"name": "engine", "resources": {}}
    spec: Object = {"containers": [engine]}
    if pool.accelerator is not None:
        amount = {pool.accelerator.resource: str(count)}
        engine["resources"] |= {"requests": amount, "limits": amount}
    if pool.resource_claims:
        engine["resources"]["claims"] = [{"name": it.name} for it in pool.resource_claims]
        spec["resourceClaims"] = [
            {"name": it.name, **({"resourceClaimName": it.claim} if it.claim else {"resourceClaimTemplateName": it.template})}
            for it in pool.resource_claims
        ]
    if count > 1:
        memory = {"medium": "Memory", "sizeLimit": f"{count * SHARED_MEMORY_GIB}Gi"}
        engine["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
        spec["volumes"] = [{"name": "shm", "emptyDir": memory}]
    return {"spec": spec}


def nodes(pool: Pool) -> int:
    """How many nodes one replica spans."""
    if not pool.has_devices:
        return pool.parallelism.nodes
    room = pool.accelerator.per_node if pool.accelerator is not None else None
    return 1 if room is None else math.ceil(pool.parallelism.devices / room)


def engine_requests(pool: Pool) -> dict[str, str]:
    """The CPU and memory that an engine requests unless its template says otherwise."""
    if not pool.has_devices:
        return {"cpu": str(_a_node(pool)), "memory": f"{CPU_MEMORY_GIB * pool.parallelism.cores_a_node}Gi"}
    count = _a_node(pool)
    return {"cpu": str(count * CPUS_A_DEVICE), "memory": f"{count * MEMORY_A_DEVICE_GIB}Gi"}


def unnamed(requests: Mapping[str, str], spec: Object, container: Object) -> dict[str, str]:
    """Return the requests that neither a container nor its pod names. A limit counts as a request, as in Kubernetes.

    Args:
        spec: The pod's spec.
        container: A container of the pod. Its `resources` may have any shape, since the API server checks them.
    """
    named = {name for part in (spec, container) for amounts in _amounts(part) for name in amounts}
    return {name: amount for name, amount in requests.items() if name not in named}


def asks_for_device(spec: Object, container: Object) -> bool:
    """Whether a pod asks for a device of any kind: an extended resource, a claim (DRA), or the runtime that brings one."""
    extended = any("/" in name for part in (spec, container) for amounts in _amounts(part) for name in amounts)
    return extended or bool(spec.get("resourceClaims")) or bool(spec.get("runtimeClassName"))


def _amounts(part: Object) -> list[Mapping[str, Any]]:
    resources = mapping(part.get("resources"))
    return [mapping(resources.get(field)) for field in ("requests", "limits")]


def _a_node(pool: Pool) -> int:
    """How many devices of a replica are on each of its nodes."""
    return math.ceil(pool.parallelism.devices / nodes(pool))
