"""All models at once: is anything wrong, and where?"""

from typing import Final

from monitoring import alerts
from monitoring.boards.annotations import changes
from monitoring.boards.variables import NAMESPACE
from monitoring.panels import Board, Panel, Query, Row
from monitoring.queries import GPU_BUSY, quantile, rate, series, total
from monitoring.recordings import COST, HIT_RATIO, error_ratio
from penstock.api import metrics

_IN: Final = 'namespace=~"$namespace"'
_AT_GATEWAY: Final = 'model=~"($namespace)/.+"'

_NOW = Row(
    "Now",
    [
        Panel(
            "Alerts that fire",
            "Penstock's alerts. Each names its runbook.",
            [Query('count (ALERTS{alertname=~"Penstock.+",alertstate="firing"}) or vector(0)')],
            kind="stat",
            bad=1,
            width=4,
        ),
        Panel(
            "Models without a ready replica",
            "Whoever asks for them waits, then gets a 503.",
            [Query(f"count ({alerts.NO_READY_REPLICA.signal} > 0) or vector(0)")],
            kind="stat",
            bad=1,
            width=4,
            alert=alerts.NO_READY_REPLICA,
        ),
        Panel(
            "Replicas that are missing",
            "Wanted and not ready.",
            [Query(f"sum ({alerts.REPLICAS_MISSING.signal})")],
            kind="stat",
            warn=1,
            width=4,
            alert=alerts.REPLICAS_MISSING,
        ),
        Panel(
            "Failed requests, worst model",
            "Share of the last hour. The objective is 0.1 %.",
            [Query(f"max ({series(error_ratio('1h'), _AT_GATEWAY)})")],
            unit="percentunit",
            kind="stat",
            warn=0.001,
            bad=0.0144,
            width=4,
            alert=alerts.ERRORS_FAST,
        ),
        Panel(
            "Envoys connected",
            "To the gateway that has most of them.",
            [Query(f"max ({metrics.XDS_ENVOYS})")],
            kind="stat",
            width=4,
            alert=alerts.NO_ENVOY,
        ),
        Panel(
            "Tokens a second",
            "Generated, by all models.",
            [Query(rate(metrics.GENERATION_TOKENS, _IN))],
            kind="stat",
            width=4,
        ),
    ],
)
_MODELS = Row(
    "By model",
    [
        Panel(
            "Requests",
            "A second, whatever became of them.",
            [Query(rate(metrics.MODEL_REQUESTS, _AT_GATEWAY, by="model"), "{{model}}")],
            unit="reqps",
        ),
        Panel(
            "Failed requests",
            "Share that got a 5xx in the last five minutes. Open the model's dashboard.",
            [Query(series(error_ratio("5m"), _AT_GATEWAY), "{{model}}")],
            unit="percentunit",
            bad=0.0144,
            alert=alerts.ERRORS_FAST,
        ),
        Panel(
            "First token, p99",
            "From the complete request at the gateway. Past 10 s the buckets are wide, and this is a bound.",
            [Query(quantile(0.99, metrics.RESPONSE_SECONDS, _AT_GATEWAY, by="model"), "{{model}}")],
            unit="s",
            bad=2.5,
            alert=alerts.FIRST_TOKEN_FAST,
        ),
        Panel(
            "Waiting sequences",
            "In engines' queues. More than run, and growing: too little capacity.",
            [Query(total(metrics.NUM_REQUESTS_WAITING, _IN, by="namespace, model"), "{{namespace}}/{{model}}")],
            alert=alerts.QUEUE_GROWS,
        ),
        Panel(
            "Ready replicas",
            "By pool.",
            [
                Query(
                    total(metrics.POOL_REPLICAS, _IN, 'state="ready"', by="namespace, model, pool"),
                    "{{namespace}}/{{model}}/{{pool}}",
                )
            ],
        ),
        Panel(
            "Prefix cache",
            "Share of prompt tokens that were found, over ten minutes.",
            [Query(series(HIT_RATIO, _IN), "{{namespace}}/{{model}}")],
            unit="percentunit",
            most=1,
            alert=alerts.HIT_RATE,
        ),
    ],
)
_COST = Row(
    "What it costs",
    [
        Panel(
            "Replica seconds for 1,000 computed prompt tokens",
            "Prompt tokens from a cache cost next to nothing, so these are what is paid for. Rises where replicas idle.",
            [Query(f"1000 * {series(COST, _IN)}", "{{namespace}}/{{model}}")],
            unit="s",
            width=12,
        ),
        Panel(
            "GPU busy",
            "Share of time in which a kernel ran: high says little, low says that GPUs idle.",
            [Query(f"avg by (namespace, pod) ({series(GPU_BUSY, _IN)})", "{{namespace}}/{{pod}}")],
            unit="percent",
            most=100,
            width=12,
            needs="GPUs and NVIDIA's DCGM exporter",
            alert=alerts.GPU_ERRORS,
        ),
    ],
)

FLEET: Final = Board("penstock-fleet", "Penstock / Fleet", __doc__ or "", [NAMESPACE], [_NOW, _MODELS, _COST], changes(_IN))
