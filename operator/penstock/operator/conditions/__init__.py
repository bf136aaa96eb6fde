"""The conditions of an InferenceModel: one module each, with its verdict and its words. Pure."""

from collections.abc import Callable
from typing import Final

from penstock.operator.conditions import (
    accepted,
    canary_passed,
    degraded,
    model_available,
    pods_ready,
    progressing,
    ready,
    routed,
    scaling_active,
    serving,
)
from penstock.operator.conditions.verdict import Verdict
from penstock.operator.observed import Observed

JUDGES: Final[dict[str, Callable[[Observed], Verdict | None]]] = {
    "Ready": ready.judge,
    "Accepted": accepted.judge,
    "ModelAvailable": model_available.judge,
    "PodsReady": pods_ready.judge,
    "Serving": serving.judge,
    "Routed": routed.judge,
    "ScalingActive": scaling_active.judge,
    "Progressing": progressing.judge,
    "Degraded": degraded.judge,
    "CanaryPassed": canary_passed.judge,
}
"""Judges by condition type, in the order of the status. A judge returns None for a model that does not have its condition."""


def verdicts(observed: Observed) -> dict[str, Verdict]:
    """The verdicts on a model by condition type, in the order of `JUDGES`."""
    judged = {kind: judge(observed) for kind, judge in JUDGES.items()}
    return {kind: verdict for kind, verdict in judged.items() if verdict is not None}
