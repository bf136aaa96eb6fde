"""Events: one for each turn of a condition that a person would want to know of, none for each loop."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from penstock.operator.objects import Object

COMPONENT: Final = "penstock-operator"
FORMAT: Final = "%Y-%m-%dT%H:%M:%SZ"
"""Format of the API's times."""
# Conditions whose turning is worth an Event, and the status that is a warning.
_NOTABLE: Final = {"Accepted": "False", "Ready": "False", "Degraded": "True", "Routed": "False", "CanaryPassed": "False"}
_WELCOME: Final = ("Ready", "CanaryPassed")

# What every model says when it is new, or goes.
_ORDINARY: Final = ("Starting", "NotRoutedYet", "FetchStarting", "Downloading", "Terminating")


def turns(before: Sequence[Object], after: Sequence[Object]) -> list[tuple[str, str, str]]:
    """(type, reason, message) of what turned, or gives another reason while bad; nothing for a good first sight."""
    known = {condition["type"]: condition for condition in before}
    found: list[tuple[str, str, str]] = []
    for condition in after:
        bad = _NOTABLE.get(condition["type"])
        old = known.get(condition["type"], {})
        if bad is None or condition["status"] == "Unknown":
            continue
        warning = condition["status"] == bad and condition["reason"] not in _ORDINARY
        turned = old.get("status") != condition["status"]
        if warning and (turned or old.get("reason") != condition["reason"]):
            found.append(("Warning", condition["reason"], condition["message"]))
        elif turned and not warning and condition["type"] in _WELCOME and condition["status"] == "True":
            found.append(("Normal", condition["reason"], condition["message"]))
    return list(dict.fromkeys(found))


def event(resource: Object, kind: str, reason: str, message: str, now: str) -> Object:
    """The Event object about a resource.

    Args:
        kind: `Normal` or `Warning`.
        now: RFC 3339.
    """
    meta = resource["metadata"]
    about = {
        "apiVersion": resource["apiVersion"],
        "kind": resource["kind"],
        "name": meta["name"],
        "namespace": meta["namespace"],
        "uid": meta["uid"],
        "resourceVersion": meta.get("resourceVersion", ""),
    }
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
        "involvedObject": about,
        "type": kind,
        "reason": reason,
        "message": message[:1024],
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def timestamp() -> str:
    """Now, as the API writes times."""
    return datetime.now(UTC).strftime(FORMAT)
