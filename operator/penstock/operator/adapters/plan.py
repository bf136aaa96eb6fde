"""What each replica should serve beside its model, and what it lacks: pure."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from penstock.api.resources import InferenceModel, LoraAdapter
from penstock.operator.conditions.verdict import Verdict

SCHEMES = ("hf", "file")
"""Schemes from which engines read adapters. A plain path is a file."""


class Origin(NamedTuple):
    """The location of an adapter's weights."""

    uri: str
    revision: str | None


class Action(NamedTuple):
    """A call to make to a replica."""

    verb: Literal["load", "unload"]
    name: str
    origin: Origin | None


def accepted(adapter: LoraAdapter, model: InferenceModel | None, refusal: str, conflict: str) -> Verdict:
    """Whether an adapter is to be served.

    Args:
        adapter: The resource.
        model: What it is for; None where there is none that can be read.
        refusal: Why the model is not acted on; empty where it is.
        conflict: Which of the adapter's names another has, in a sentence; empty where none.
    """
    name, uri = adapter.spec.model_ref.name, adapter.spec.source.uri
    if model is None:
        return Verdict(False, "ModelNotFound", f"there is no InferenceModel {name!r} in this namespace that can be read")
    if refusal:
        return Verdict(False, "ModelNotAccepted", f"InferenceModel {name!r} is not accepted: {refusal}")
    if model.spec.lora is None:
        return Verdict(False, "NoRoomForAdapters", f"InferenceModel {name!r} takes no adapters: set spec.lora there")
    scheme = uri.partition("://")[0] if "://" in uri else "file"
    if scheme not in SCHEMES:
        return Verdict(False, "UnsupportedSource", f"{uri}: adapters cannot be read from {scheme}:// yet; hf:// and file:// work")
    if not any(source.allows(uri) for source in model.spec.lora.sources):
        there = ", ".join(source.prefix for source in model.spec.lora.sources) or "none"
        message = f"{uri} is not below any of the spec.lora.sources of InferenceModel {name!r} ({there})"
        return Verdict(False, "SourceNotAllowed", message)
    if conflict:
        return Verdict(False, "NameConflict", conflict)
    return Verdict(True, "Accepted", f"replicas of {name!r} are to serve it as {adapter.spec.served.name!r}")


def origin(adapter: LoraAdapter) -> Origin:
    """Return the origin of a resource."""
    return Origin(adapter.spec.source.uri, adapter.spec.source.revision)


def actions(wanted: Mapping[str, Origin], there: Mapping[str, Origin]) -> list[Action]:
    """What brings a replica from what is there to what is wanted; first what makes room."""
    gone = [Action("unload", name, None) for name in there if name not in wanted]
    return gone + [Action("load", name, it) for name, it in wanted.items() if there.get(name) != it]


class Report(NamedTuple):
    """What came of one replica."""

    pod: str
    errors: Mapping[str, str]
    """By adapter, why the replica does not serve it. Adapters that it serves are not listed."""
    pending: frozenset[str] = frozenset()
    """Adapters that it is still reading."""


def judged(verdict: Verdict, name: str, reports: list[Report]) -> tuple[str, dict[str, Verdict]]:
    """`ready` as x/y, and the conditions of an adapter.

    Args:
        verdict: Whether it is to be served.
        name: By which replicas know it.
        reports: Of the model's ready replicas.
    """
    if verdict.status is not True:
        loaded = Verdict(False, verdict.reason, "replicas do not serve it")
        return f"0/{len(reports)}", {"Ready": verdict, "Accepted": verdict, "Loaded": loaded}
    failed = [f"pod {report.pod}: {report.errors[name]}" for report in reports if name in report.errors]
    pending = [report.pod for report in reports if name in report.pending]
    ready = len(reports) - len(failed) - len(pending)
    count = f"{ready} of {len(reports)} ready replicas serve it"
    if not reports:
        loaded = Verdict(False, "NoReadyReplica", "the model has no ready replica")
    elif failed:
        loaded = Verdict(False, "LoadFailed", f"{count}; {'; '.join(failed[:4])}")
    elif pending:
        loaded = Verdict(False, "Loading", f"{count}; {', '.join(pending[:4])} read it")
    else:
        loaded = Verdict(True, "Loaded", count)
    # Some replicas are enough to serve: the picker sends requests to those that have the adapter.
    serves = loaded if ready == len(reports) or not ready else Verdict(True, "Serving", loaded.message)
    return f"{ready}/{len(reports)}", {"Ready": serves, "Accepted": verdict, "Loaded": loaded}
