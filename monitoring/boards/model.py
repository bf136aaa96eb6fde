"""One model: what its clients see, and which phase of a request takes the time."""

from typing import Final

from monitoring import alerts
from monitoring.boards.annotations import changes
from monitoring.boards.variables import MODELS, NAMESPACE, POOLS
from monitoring.panels import Board, Panel, Query, Row
from monitoring.queries import AT_GATEWAY, POOL, buckets, mean, quantile, rate, series, total
from monitoring.queries import MODEL as OF_MODEL
from monitoring.recordings import SLOW_S, error_ratio, slow_ratio
from penstock.api import metrics

_CLIENTS = Row(
    "What clients see",
    [
        Panel(
            "Requests by answer",
            "429: too much for a tenant or the queue. 503: no replica. `reset`: ended before an answer, often by the client.",
            [Query(rate(metrics.MODEL_REQUESTS, AT_GATEWAY, by="code"), "{{code}}")],
            unit="reqps",
            kind="stacked",
        ),
        Panel(
            "Error budget, burn rate",
            "1 uses up the month's 0.1 % exactly, 14.4 in two days.",
            [Query(f"{series(error_ratio(it), AT_GATEWAY)} / 0.001", "{{model}} " + it) for it in ("5m", "1h", "6h")],
            warn=6,
            bad=14.4,
            alert=alerts.ERRORS_FAST,
        ),
        Panel(
            "First-token budget, burn rate",
            "Of the 1 % that may take more than 2.5 s.",
            [Query(f"{series(slow_ratio(it), AT_GATEWAY)} / 0.01", "{{model}} " + it) for it in ("5m", "1h", "6h")],
            warn=6,
            bad=14.4,
            alert=alerts.FIRST_TOKEN_FAST,
        ),
    ],
)


def _percentiles(name: str, *selectors: str) -> list[Query]:
    return [Query(quantile(share, name, *selectors), f"p{100 * share:.0f}") for share in (0.5, 0.9, 0.95, 0.99)]


_LATENCY = Row(
    "Latency",
    [
        Panel(
            "Time to first token at the gateway",
            "With queueing at the gateway, picking and Envoy.",
            [Query(buckets(metrics.RESPONSE_SECONDS, AT_GATEWAY))],
            unit="s",
            kind="heatmap",
            width=12,
        ),
        Panel(
            "Time to first token at the gateway, percentiles",
            "Interpolated within the histogram's buckets. The red line is the objective for 99 % of the requests.",
            _percentiles(metrics.RESPONSE_SECONDS, AT_GATEWAY),
            unit="s",
            bad=float(SLOW_S),
            alert=alerts.FIRST_TOKEN_FAST,
            width=12,
        ),
        Panel(
            "Time to first token at the engine",
            "Where the gateway's is longer, requests wait there.",
            [Query(buckets(metrics.TIME_TO_FIRST_TOKEN, POOL))],
            unit="s",
            kind="heatmap",
            width=12,
        ),
        Panel(
            "Time to first token at the engine, percentiles",
            "Rises with the queue and with long prompts.",
            _percentiles(metrics.TIME_TO_FIRST_TOKEN, POOL),
            unit="s",
            width=12,
        ),
        Panel(
            "Inter-token latency",
            "A second band above the first: prefill chunks of others between the tokens.",
            [Query(buckets(metrics.INTER_TOKEN_LATENCY, POOL))],
            unit="s",
            kind="heatmap",
            width=12,
        ),
        Panel(
            "Inter-token latency, percentiles",
            "p50 rises with the batch. p99 alone rises: prefill chunks or preemptions.",
            _percentiles(metrics.INTER_TOKEN_LATENCY, POOL),
            unit="s",
            width=12,
        ),
        Panel(
            "End-to-end time",
            "From the request's arrival at the engine to its last token.",
            [Query(buckets(metrics.E2E_LATENCY, POOL))],
            unit="s",
            kind="heatmap",
            width=12,
        ),
        Panel(
            "End-to-end time, percentiles",
            "Rises with longer outputs: compare with the output lengths below.",
            _percentiles(metrics.E2E_LATENCY, POOL),
            unit="s",
            width=12,
        ),
    ],
)
_LENGTHS = Row(
    "Lengths",
    [
        Panel(
            "Prompt length, percentiles",
            "Prompt tokens per request.",
            _percentiles(metrics.REQUEST_PROMPT_TOKENS, POOL),
            width=12,
        ),
        Panel(
            "Output length, percentiles",
            "Output tokens per request.",
            _percentiles(metrics.REQUEST_GENERATION_TOKENS, POOL),
            width=12,
        ),
    ],
)
_PHASES = Row(
    "Where the time goes",
    [
        Panel(
            "Mean phases of a request",
            "Queue: too little capacity. Prefill: long prompts or cold caches. Decode: steps are slow, or preemptions.",
            [
                Query(mean(metrics.QUEUE_TIME, POOL), "queue"),
                Query(mean(metrics.PREFILL_TIME, POOL), "prefill"),
                Query(mean(metrics.DECODE_TIME, POOL), "decode"),
            ],
            unit="s",
            kind="stacked",
        ),
        Panel(
            "First token beyond queue and prefill",
            "Mean. It is the frontend's: tokenizer and transport. More frontends, where it is much.",
            [
                Query(
                    f"{mean(metrics.TIME_TO_FIRST_TOKEN, POOL)} - {mean(metrics.QUEUE_TIME, POOL)} - "
                    f"{mean(metrics.PREFILL_TIME, POOL)}",
                    "frontend",
                )
            ],
            unit="s",
        ),
        Panel(
            "p99 of the phases",
            "As precise as the buckets, which are wide past some seconds.",
            [
                Query(quantile(0.99, metrics.QUEUE_TIME, POOL), "queue"),
                Query(quantile(0.99, metrics.PREFILL_TIME, POOL), "prefill"),
                Query(quantile(0.99, metrics.DECODE_TIME, POOL), "decode"),
            ],
            unit="s",
        ),
    ],
)
_WORK = Row(
    "Work and replicas",
    [
        Panel(
            "Prompt tokens by source",
            "They add up to all prompt tokens. After memory was added, `local_cache` must grow, or the blocks lie idle.",
            [Query(rate(metrics.PROMPT_TOKENS, POOL, by="source"), "{{source}}")],
            kind="stacked",
        ),
        Panel("Tokens generated", "A second.", [Query(rate(metrics.GENERATION_TOKENS, POOL, by="pool"), "{{pool}}")]),
        Panel(
            "Ends by reason",
            "`length` is max_tokens; `abort` a client that left; `error` see the engine's log.",
            [Query(rate(metrics.REQUEST_SUCCESS, POOL, by="finished_reason"), "{{finished_reason}}")],
            unit="reqps",
            kind="stacked",
        ),
        Panel(
            "Running and waiting",
            "Sequences of all replicas. See what they wait for on the engine's dashboard.",
            [
                Query(total(metrics.NUM_REQUESTS_RUNNING, POOL), "running"),
                Query(total(metrics.NUM_REQUESTS_WAITING, POOL), "waiting"),
            ],
            alert=alerts.QUEUE_GROWS,
        ),
        Panel(
            "Replicas",
            "Wanted, ready, and ready ones of the present revision.",
            [Query(total(metrics.POOL_REPLICAS, OF_MODEL, by="state"), "{{state}}")],
            alert=alerts.REPLICAS_MISSING,
        ),
        Panel(
            "Conditions that are not True",
            "With their reasons; `Degraded`, and `Progressing` when nothing changes, are well to be False.",
            [
                Query(
                    total(metrics.MODEL_CONDITION, OF_MODEL, 'status!="True"', by="condition, status, reason"),
                    "{{condition}}: {{status}}, {{reason}}",
                )
            ],
            kind="stat",
            alert=alerts.ROLLOUT_STUCK,
        ),
    ],
)

MODEL: Final = Board(
    "penstock-model",
    "Penstock / Model",
    __doc__ or "",
    [NAMESPACE, MODELS, POOLS],
    [_CLIENTS, _LATENCY, _LENGTHS, _PHASES, _WORK],
    changes(OF_MODEL),
)
