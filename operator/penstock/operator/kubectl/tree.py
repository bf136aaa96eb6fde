"""`penstock status`: models, what is wrong with them, and what they are made of. `trees` is pure."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from penstock.api import labels
from penstock.operator.api import ADAPTERS, DEPLOYMENTS, LEADER_WORKER_SETS, MODELS, PODS
from penstock.operator.command_line import CommandFailed
from penstock.operator.desired import revision_of
from penstock.operator.kubectl.cluster import Cluster, selector_of
from penstock.operator.objects import Object, Pod, as_pods
from penstock.operator.pods import is_live, is_ready, revision, trouble

GOOD, WAITING, BAD, QUIET = "green", "yellow", "red", "dim"
_BAD_WHEN_TRUE: Final = ("Degraded",)
_WORTH_NO_LINE: Final = ("NotConfigured", "ScaledToZero")


@dataclass(frozen=True)
class Node:
    """A line, and what is below it."""

    text: str
    style: str = ""
    below: list["Node"] = field(default_factory=list)


@dataclass(frozen=True)
class Seen:
    """What was read."""

    models: Sequence[Object]
    adapters: Sequence[Object] = ()
    workloads: Sequence[Object] = ()
    pods: Sequence[Object] = ()


async def run(cluster: Cluster, options: argparse.Namespace) -> None:
    """Writes the trees to the terminal."""
    selector = selector_of(options.model)
    models = await cluster.listed(MODELS)
    if options.model:
        models = [it for it in models if it["metadata"]["name"] == options.model]
    if not models:
        what = f"InferenceModel {options.model}" if options.model else "InferenceModel"
        raise CommandFailed(f"there is no {what} in {cluster.namespace or 'any namespace'}")
    seen = Seen(
        models,
        await cluster.listed(ADAPTERS),
        [*await cluster.listed(DEPLOYMENTS, selector), *await cluster.listed(LEADER_WORKER_SETS, selector, optional=True)],
        await cluster.listed(PODS, selector),
    )
    show(trees(seen, datetime.now(UTC)))


def show(nodes: Iterable[Node]) -> None:
    """Writes trees to the terminal."""
    console = Console(highlight=False)
    for node in nodes:
        console.print(_rich(node))


def _rich(node: Node) -> Tree:
    tree = Tree(Text(node.text, style=node.style), guide_style=QUIET)
    for below in node.below:
        tree.children.append(_rich(below))
    return tree


def trees(seen: Seen, now: datetime) -> list[Node]:
    """One tree a model, by namespace and name."""
    return [_model(it, seen, now) for it in sorted(seen.models, key=_place)]


def _place(resource: Object) -> tuple[str, str]:
    return resource["metadata"]["namespace"], resource["metadata"]["name"]


def _model(model: Object, seen: Seen, now: datetime) -> Node:
    namespace, name = _place(model)
    status: Object = model.get("status", {})
    ready = next((it for it in status.get("conditions", []) if it["type"] == "Ready"), {"status": "Unknown"})
    words = [
        f"{namespace}/{name}",
        ready.get("reason", "NotSeenYet"),
        f"{status.get('ready', '0/0')} ready",
        status.get("url", ""),
    ]
    below = [Node(f"served as {', '.join(_names(model))}", QUIET), *_complaints(model)]
    workloads = [it for it in seen.workloads if _is_of(it, namespace, name)]
    pods = [it for it in seen.pods if _is_of(it, namespace, name)]
    below += [_pool(pool, status, workloads, pods, now) for pool in model["spec"]["pools"]]
    known = {pool["name"] for pool in model["spec"]["pools"]}
    left = [it for it in pods if _label(it, labels.POOL) not in known]
    if left:
        below.append(Node("of pools that are no more", WAITING, [_pod(it, "", now) for it in as_pods(sorted(left, key=_place))]))
    below += [
        _adapter(it)
        for it in sorted(seen.adapters, key=_place)
        if it["metadata"]["namespace"] == namespace and it["spec"]["modelRef"]["name"] == name
    ]
    style = {"True": GOOD, "False": BAD}.get(ready["status"], WAITING)
    return Node("  ".join(word for word in words if word), f"bold {style}", below)


def _names(resource: Object) -> list[str]:
    served = resource["spec"]["served"]
    return [served["name"], *served.get("aliases", [])]


def _is_of(item: Object, namespace: str, model: str) -> bool:
    return item["metadata"]["namespace"] == namespace and _label(item, labels.MODEL) == model


def _label(item: Object, label: str) -> str:
    return str(item["metadata"].get("labels", {}).get(label, ""))


def _complaints(resource: Object) -> Iterable[Node]:
    """The conditions that are not as they should be, each cause once."""
    status: Object = resource.get("status", {})
    generation = resource["metadata"].get("generation", 0)
    if status.get("observedGeneration") != generation:
        yield Node(f"the operator has not seen generation {generation} of it yet", WAITING)
    told: set[tuple[str, str]] = set()
    for condition in status.get("conditions", []):
        kind, state, cause = condition["type"], condition["status"], (condition["reason"], condition["message"])
        fine = "False" if kind in _BAD_WHEN_TRUE else "True"
        if state == fine or kind == "Progressing" or condition["reason"] in _WORTH_NO_LINE or cause in told:
            continue
        told.add(cause)
        yield Node(f"{kind}={state}  {condition['reason']}: {condition['message']}", WAITING if state == "Unknown" else BAD)


def _pool(pool: Object, status: Object, workloads: Sequence[Object], pods: Sequence[Object], now: datetime) -> Node:
    name = pool["name"]
    its = [it for it in pods if _label(it, labels.POOL) == name]
    workload = next((it for it in workloads if _label(it, labels.POOL) == name), None)
    wanted = revision_of(workload) if workload is not None else ""
    counts = next((it["ready"] for it in status.get("pools", []) if it["name"] == name), "0/0")
    ready, _, most = counts.partition("/")
    words = [f"pool {name}", pool.get("role", "Both"), counts, f"revision {wanted}" if wanted else "not made yet"]
    below = [
        Node(f"autoscaler: {it['current']} to {it['desired']} ({it['constraint']}): {it['reason']}", QUIET)
        for it in status.get("scaling", [])
        if it["pool"] == name
    ]
    below += [_pod(it, wanted, now) for it in as_pods(sorted(its, key=_place))]
    return Node("  ".join(words), GOOD if workload is not None and ready == most else WAITING, below)


def _pod(pod: Pod, wanted: str, now: datetime) -> Node:
    meta = pod["metadata"]
    problem = trouble(pod)
    state, style = ("Ready", GOOD) if is_ready(pod) else ("Starting", WAITING)
    if problem is not None:
        state, style = f"{problem.reason}: {problem.message}", BAD
    elif not is_live(pod):
        state, style = "Terminating" if "deletionTimestamp" in meta else pod.get("status", {}).get("phase", ""), QUIET
    restarts = sum(it.get("restartCount", 0) for it in pod.get("status", {}).get("containerStatuses", []))
    words = [
        meta["name"],
        state,
        f"on {node}" if (node := pod.get("spec", {}).get("nodeName")) else "",
        age(meta["creationTimestamp"], now),
        f"{restarts} restarts" if restarts else "",
        "cordoned" if labels.CORDONED in meta.get("annotations", {}) else "",
        f"old revision {revision(pod)}" if wanted and revision(pod) != wanted else "",
    ]
    return Node("  ".join(word for word in words if word), style)


def _adapter(adapter: Object) -> Node:
    status: Object = adapter.get("status", {})
    ready = next(
        (it for it in status.get("conditions", []) if it["type"] == "Ready"), {"status": "Unknown", "reason": "NotSeenYet"}
    )
    text = f"adapter {adapter['metadata']['name']}  {ready['reason']}  {status.get('ready', '0/0')}"
    if ready["status"] == "True":
        return Node(text, GOOD)
    return Node(text, WAITING if ready["status"] == "Unknown" else BAD, list(_complaints(adapter)))


def age(since: str, now: datetime) -> str:
    """As kubectl writes ages: the two largest units at most."""
    seconds = max(0, int((now - datetime.fromisoformat(since)).total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
