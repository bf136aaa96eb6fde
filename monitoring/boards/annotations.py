"""Marks that show when a rollout ran and when a canary's share of the traffic changed."""

from typing import Final

from monitoring.panels import Annotation
from monitoring.queries import series
from penstock.api import metrics

_ROLLOUT_TEXT: Final = "{{namespace}}/{{model}} replaces its replicas"
_CANARY_TEXT: Final = "{{namespace}}/{{model}} gets another share of the traffic: {{verdict}}"


def changes(*selectors: str) -> tuple[Annotation, ...]:
    """Rollouts and canary steps of the models that the selectors choose."""
    rolling = series(metrics.MODEL_CONDITION, *selectors, 'condition="Progressing"', 'reason="RollingOut"')
    weight = series(metrics.CANARY_WEIGHT, *selectors)
    # Another verdict starts another series, and another weight changes the value: each is marked for a minute.
    return (
        Annotation("Rollout", f"max by (namespace, model) ({rolling})", _ROLLOUT_TEXT, "blue"),
        Annotation("Canary", f"{weight} unless {weight} == {weight} offset 1m", _CANARY_TEXT, "purple"),
    )
