"""Gateway API's InferencePools (`inference.networking.k8s.io/v1`): which replicas each selects.

Pods of InferenceModels are replicas already, and an InferencePool only names them. Any other pod that a pool selects becomes a
replica, one for each of the pool's ports, of an *open* model: it serves whatever its pods serve.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from penstock.api import labels
from penstock.api.fleet import Engine, InferencePool, Model, Pool, Replica, Role, open_id
from penstock.kube.client import Object

Meaning = TypeVar("Meaning")

log = logging.getLogger(__name__)

OPEN_HOLD_S = 30.0
"""How long requests for an open pool wait for a replica: nothing says it, and nothing scales the pool at our word."""
ENGINE_LABELS = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
_ENGINES: dict[str, Engine] = {
    "": "auto",
    "penstock": "penstock",
    "vllm": "vllm",
    "sglang": "sglang",
    "trtllm": "trtllm",
    "trtllm-serve": "trtllm",
    "llamacpp": "llamacpp",
}
ROLE_LABELS = (labels.ROLE, "llm-d.ai/role", "inference.networking.k8s.io/role")
_ROLES: dict[str, Role] = {
    "": "Both",
    "prefill": "Prefill",
    "encode": "Prefill",  # takes no whole requests either
    "encode-prefill": "Prefill",
    "decode": "Decode",
}
ACTIVE_PORTS = "llm-d.ai/active-ports"
"""Annotation: those of the pool's ports on which this pod serves, separated by commas."""
EVENT_PORTS = (labels.EVENTS_PORT, "kv-events")
"""What a container calls the port of its KV events."""


@dataclass
class Selected:
    """A fleet to which InferencePools are added, the oldest first. Models and pools are keyed by id."""

    models: dict[str, Model]
    pools: dict[str, Pool]
    replicas: dict[str, list[Replica]]
    """By `Replica.process`: the process, or each of its ranks."""
    inference_pools: list[InferencePool] = field(default_factory=list)


def select(item: Object, pods: Iterable[Object], into: Selected) -> None:
    """Adds an InferencePool with the pods that it selects.

    A pod's port that an older InferencePool without a model has already stays with that one.
    """
    metadata, spec = item["metadata"], item["spec"]
    namespace, name = metadata["namespace"], metadata["name"]
    open_model = open_id(namespace, name)
    members: list[str] = []
    models: dict[str, None] = {}
    strangers: list[Replica] = []
    for pod in pods:
        for replica in _replicas(pod, [port["number"] for port in spec["targetPorts"]], open_model):
            known = into.replicas.get(replica.process, [])
            if known and not known[0].open:
                members.extend(it.id for it in known)
                models[into.pools[known[0].pool].model] = None
            elif known:
                pool = known[0].pool
                log.warning("InferencePool %s/%s: %s belongs to %s, which is older", namespace, name, replica.name, pool)
            elif labels.MODEL not in pod["metadata"].get("labels", {}):  # one of ours, of a model that is gone
                strangers.append(replica)
    wanted = f"{namespace}/{spec['selector']['matchLabels'].get(labels.MODEL, '')}"
    if wanted in into.models:  # scaled to zero, it is still this model's
        models[wanted] = None
    made = datetime.fromisoformat(metadata["creationTimestamp"]).timestamp()
    if strangers or not models:
        models[open_model] = None
        into.models[open_model] = Model(id=open_model, served_names=[], created=made, hold_timeout_s=OPEN_HOLD_S)
        into.pools.update({pool: Pool(id=pool, model=open_model, role=role) for pool, role in _pools(open_model, strangers)})
        into.replicas.update({replica.process: [replica] for replica in strangers})
        members.extend(replica.id for replica in strangers)
    reference = spec.get("endpointPickerRef") or {}
    port = reference.get("port", {}).get("number")
    into.inference_pools.append(
        InferencePool(
            id=f"{namespace}/{name}",
            created=made,
            models=list(models),
            members=sorted(members),
            picker="" if not reference else reference["name"] if port is None else f"{reference['name']}:{port}",
            fails_open=reference.get("failureMode") == "FailOpen",
        )
    )


def _pools(open_model: str, replicas: Sequence[Replica]) -> Iterator[tuple[str, Role]]:
    """A pool for each role that occurs, and always the one of no role."""
    yield open_model, "Both"
    for role in ("Prefill", "Decode"):
        if any(replica.pool == f"{open_model}/{role}" for replica in replicas):
            yield f"{open_model}/{role}", role


def _replicas(pod: Object, ports: Sequence[int], open_model: str) -> Iterator[Replica]:
    """The pod's endpoints: none while it has no address, and once it has ended."""
    metadata, status = pod["metadata"], pod["status"]
    if status.get("phase") in ("Succeeded", "Failed") or not status.get("podIP"):
        return
    marks, notes = metadata.get("labels", {}), metadata.get("annotations", {})
    active = {int(port) for port in notes[ACTIVE_PORTS].split(",")} if ACTIVE_PORTS in notes else set(ports)
    named = {port.get("name"): port["containerPort"] for container in pod["spec"]["containers"] for port in container["ports"]}
    role = _marked(marks, ROLE_LABELS, _ROLES)
    engine = _marked(marks, ENGINE_LABELS, _ENGINES)
    conditions = {condition["type"]: condition["status"] for condition in status.get("conditions", [])}
    for port in ports:
        if port in active:
            yield Replica(
                uid=metadata["uid"],
                name=metadata["name"] if len(ports) == 1 else f"{metadata['name']}:{port}",
                pool=open_model if role == "Both" else f"{open_model}/{role}",
                host=status["podIP"],
                port=port,
                events_port=_event_port(named, ports.index(port)),
                replay_port=named.get(labels.REPLAY_PORT, 0),
                engine=engine,
                ready=conditions.get("Ready") == "True",
                terminating="deletionTimestamp" in metadata,
                kv_layout=notes.get(labels.KV_LAYOUT, ""),
                cordoned=notes.get(labels.CORDONED) == "true",
            )


def _marked(marks: Mapping[str, str], labels: Iterable[str], meaning: Mapping[str, Meaning]) -> Meaning:
    """What the first of `labels` that a pod has means; where it has none, or a value that says nothing to us, what "" means."""
    value = next((marks[label] for label in labels if label in marks), "")
    return meaning.get(value.lower(), meaning[""])


def _event_port(named: dict[str, int], rank: int) -> int:
    """Return the port on which a pod's rank publishes KV events: the named port is rank 0's, and each rank has the next one."""
    first = next((named[name] for name in EVENT_PORTS if name in named), 0)
    return first + rank if first else 0
