"""The gateway: what it decides, what it knows of replicas, and how true that is."""

from typing import Final

from monitoring import alerts
from monitoring.boards.variables import MODELS, NAMESPACE, POOLS, REPLICAS
from monitoring.panels import Board, Panel, Query, Row
from monitoring.queries import (
    AT_GATEWAY,
    POOL_AT_GATEWAY,
    REPLICA_AT_GATEWAY,
    buckets,
    quantile,
    rate,
    series,
    total,
)
from penstock.api import metrics

_found, _predicted = (rate(metrics.CACHED_TOKENS, AT_GATEWAY, f'view="{view}"') for view in ("found", "predicted"))

_DECISIONS = Row(
    "Decisions",
    [
        Panel(
            "Picks by policy",
            "A second. A policy that you did not ask for is a fallback: /debug/decisions says why.",
            [Query(rate(metrics.PICKS, POOL_AT_GATEWAY, by="pool, policy"), "{{pool}} {{policy}}")],
            unit="reqps",
            kind="stacked",
        ),
        Panel(
            "Refusals by reason",
            "Requests that the gateway answered itself.",
            [Query(f"{rate(metrics.PICK_REFUSALS, by='reason')} or vector(0)", "{{reason}}")],
            unit="reqps",
            kind="stacked",
        ),
        Panel(
            "Time of a pick",
            "Without tokenizing the prompt.",
            [Query(quantile(share, metrics.PICK_SECONDS), f"p{100 * share:.0f}") for share in (0.5, 0.99)],
            unit="s",
            warn=0.01,
        ),
        Panel(
            "What makes picks",
            "Gateways by version: python, or the compiled package.",
            [Query(f"count by (version, picks) ({metrics.GATEWAY_INFO})", "{{version}}: {{picks}}")],
        ),
        Panel(
            "Waiting at the gateway",
            "For a share of the room, or for a replica that wakes.",
            [
                Query(f"{total(metrics.FLOW_QUEUED, AT_GATEWAY)} or vector(0)", "for room"),
                Query(f"{total(metrics.REQUESTS_HELD, AT_GATEWAY)} or vector(0)", "for a replica"),
            ],
            kind="stacked",
            alert=alerts.NO_READY_REPLICA,
        ),
        Panel(
            "Bookings",
            "Requests under way. `unreported` that stays: engines' reports do not come.",
            [Query(total(metrics.BOOKINGS_OPEN, by="state"), "{{state}}")],
            kind="stacked",
            alert=alerts.REPORTS_STALE,
        ),
        Panel(
            "Ends of bookings",
            "`expired` should stay 0: the end of a request was never heard of.",
            [Query(rate(metrics.BOOKINGS_RELEASED, by="by"), "{{by}}")],
            unit="reqps",
            kind="stacked",
        ),
    ],
)
_KNOWLEDGE = Row(
    "What it knows",
    [
        Panel(
            "Age of load reports",
            "Replicas report every second.",
            [Query(f"max by (replica) ({series(metrics.REPORT_AGE, REPLICA_AT_GATEWAY)})", "{{replica}}")],
            unit="s",
            bad=10,
            alert=alerts.REPORTS_STALE,
        ),
        Panel(
            "Replicas by what is known of their cache",
            "`partial`: events were lost for good; routing there is by guess until the cache has turned over.",
            [Query(f"max by (knowledge) ({metrics.RESIDENCY_REPLICAS})", "{{knowledge}}")],
            kind="stacked",
            alert=alerts.EVENT_GAPS,
        ),
        Panel(
            "Blocks known, and forgotten",
            "Forgotten for want of memory: give the gateway more.",
            [
                Query(f"max ({metrics.RESIDENT_BLOCKS})", "known"),
                Query(f"max ({metrics.RESIDENT_BLOCKS_DROPPED}_total)", "forgotten since it started"),
            ],
        ),
        Panel(
            "Event streams with gaps",
            "A second. Each is followed by a replay.",
            [Query(rate(metrics.EVENT_GAPS), "gaps")],
            alert=alerts.EVENT_GAPS,
        ),
    ],
)
_TRUTH = Row(
    "How true it is",
    [
        Panel(
            "Cached tokens, predicted and found",
            "A second. Predicted far above found: caches turn over faster than events come.",
            [Query(_predicted, "predicted"), Query(_found, "found")],
        ),
        Panel(
            "Error of cached tokens",
            "As a share of the prompt.",
            [Query(buckets(metrics.CACHED_TOKENS_ERROR, AT_GATEWAY))],
            unit="percentunit",
            kind="heatmap",
        ),
        Panel(
            "First token, as multiple of the estimate",
            "About 1 is right. Far above: replicas are slower than their reports promise.",
            [Query(quantile(share, metrics.TTFT_RATIO, AT_GATEWAY), f"p{100 * share:.0f}") for share in (0.5, 0.9)],
        ),
        Panel(
            "Correction by replica",
            "What a replica's promises are multiplied by. One far above the others is a slow machine.",
            [Query(f"max by (replica) ({series(metrics.TTFT_CORRECTION, REPLICA_AT_GATEWAY)})", "{{replica}}")],
        ),
        Panel(
            "Prompts of another length",
            "Should stay 0: gateway and engine count tokens differently, so that no prefix is found.",
            [Query(rate(metrics.PROMPTS_MISCOUNTED, AT_GATEWAY, by="model"), "{{model}}")],
            bad=0.001,
        ),
        Panel(
            "Refusals by Envoys",
            "Should stay 0. /debug/xds has Envoy's words.",
            [Query(alerts.ENVOY_REFUSES.signal, "in ten minutes")],
            bad=1,
            alert=alerts.ENVOY_REFUSES,
        ),
    ],
)

PICKER: Final = Board(
    "penstock-picker",
    "Penstock / Picker",
    __doc__ or "",
    [NAMESPACE, MODELS, POOLS, REPLICAS],
    [_DECISIONS, _KNOWLEDGE, _TRUTH],
)
