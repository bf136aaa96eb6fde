"""Operator and autoscaler: how many replicas there are to be, why, and whether that is carried out."""

from typing import Final

from monitoring import alerts
from monitoring.boards.variables import MODELS, NAMESPACE, POOLS
from monitoring.panels import Board, Panel, Query, Row
from monitoring.queries import POOL, quantile, rate, series, total
from penstock.api import metrics

_WHICH: Final = "{{namespace}}/{{model}}/{{pool}}"
_BY: Final = "namespace, model, pool"


def _most(name: str, *selectors: str) -> str:
    return f"max by ({_BY}) ({series(name, POOL, *selectors)})"


_SIZES = Row(
    "Sizes",
    [
        Panel(
            "Demand",
            "Replicas' worth of work, of the role's strongest pool. It is covered where the next panel's sizes are above it.",
            [Query(_most(metrics.DEMAND_REPLICAS), _WHICH)],
        ),
        Panel(
            "Wanted and asked for",
            "What the autoscaler wants, and what it found. They part in DryRun, or where the API server refuses.",
            [
                Query(_most(metrics.DESIRED_REPLICAS), "wanted " + _WHICH),
                Query(_most(metrics.CURRENT_REPLICAS), "asked for " + _WHICH),
            ],
        ),
        Panel(
            "Not ready",
            "Replicas that are wanted and do not serve.",
            [
                Query(
                    _most(metrics.POOL_REPLICAS, 'state="wanted"') + " - " + _most(metrics.POOL_REPLICAS, 'state="ready"'), _WHICH
                )
            ],
            alert=alerts.REPLICAS_MISSING,
        ),
    ],
)
_WHY = Row(
    "Why",
    [
        Panel(
            "Looks by constraint",
            "A second. `Max`: the bound is too low. `NoData`: no gateway answers. `Pending`: replicas start.",
            [Query(rate(metrics.SCALING_DECISIONS, by="constraint"), "{{constraint}}")],
            kind="stacked",
            alert=alerts.AUTOSCALER_INERT,
        ),
        Panel(
            "Cold start",
            "Until a replica is ready, as seen. The autoscaler looks this far ahead.",
            [Query(_most(metrics.COLD_START), _WHICH)],
            unit="s",
            bad=600,
            alert=alerts.COLD_START_SLOW,
        ),
        Panel(
            "KV usage, and what waits",
            "The load that it sizes for.",
            [
                Query(f"avg by ({_BY}) ({series(metrics.KV_CACHE_USAGE, POOL)})", "KV " + _WHICH),
                Query(total(metrics.NUM_REQUESTS_WAITING, POOL, by=_BY), "waiting " + _WHICH),
            ],
        ),
    ],
)
_OPERATOR = Row(
    "Operator",
    [
        Panel(
            "Reconciles",
            "A second, by result.",
            [Query(rate(metrics.RECONCILES, by="result"), "{{result}}")],
            kind="stacked",
            width=12,
            alert=alerts.RECONCILES_FAIL,
        ),
        Panel(
            "Time of a reconcile, p99",
            "It is the API server's.",
            [Query(quantile(0.99, metrics.RECONCILE_SECONDS), "p99")],
            unit="s",
            width=12,
            alert=alerts.RECONCILES_FAIL,
        ),
    ],
)

AUTOSCALER: Final = Board(
    "penstock-autoscaler",
    "Penstock / Autoscaler",
    __doc__ or "",
    [NAMESPACE, MODELS, POOLS],
    [_SIZES, _WHY, _OPERATOR],
)
