"""Alerts. Each has a page in `docs/runbooks` of its own name, and cases in `tests/rules` in which it fires and stays silent.

Objectives: of a model's requests, 99.9 % succeed and 99 % have their first token within 2.5 s, over 30 days. Burn rates and
windows are those of the SRE workbook, chapter 5: at 14.4 times the rate that uses up the budget exactly, 2 % of it is gone in an
hour.
"""

from typing import Final

from monitoring import queries
from monitoring.queries import rate, series, total
from monitoring.recordings import HIT_RATIO, MODEL, SLOW_S, WAITING, error_ratio, slow_ratio
from monitoring.rules import Alert, Group
from penstock.api import metrics

POOL: Final = "namespace, model, pool"
POD: Final = "namespace, model, pod"
GPU_ENGINE: Final = "an engine on a GPU"
EPLB_ENGINE: Final = "an engine with --enable-eplb"


def _has(*selectors: str) -> str:
    """How many of a model's conditions are so; 0 where none is."""
    return f"sum by ({MODEL}) ({series(metrics.MODEL_CONDITION, *selectors)} or 0 * {metrics.MODEL_CONDITION})"


def _increase(name: str, by: str, window: str = "10m") -> str:
    return f"sum by ({by}) (increase({name}_total[{window}]))"


def _up(job: str) -> tuple[str, str]:
    """Signal and condition of an alert on a process that is away. The Prometheus operator puts a namespace before the job."""
    found = series("up", f'job=~"(.+/)?{job}"')
    return f"sum ({found})", f"== 0 or absent({found})"


def _burns(ratio: tuple[str, str], most: float) -> tuple[str, str]:
    """Return the conditions of both windows: the long one shows that it matters, the short one that it continues."""
    long, short = ratio
    return long, f"> {most} and {short} > {most}"


_errors_fast = _burns((error_ratio("1h"), error_ratio("5m")), 0.0144)
_errors_slowly = _burns((error_ratio("6h"), error_ratio("30m")), 0.006)
_slow_fast = _burns((slow_ratio("1h"), slow_ratio("5m")), 0.144)
_slow_slowly = _burns((slow_ratio("6h"), slow_ratio("30m")), 0.06)

ERRORS_FAST = Alert(
    "PenstockErrorBudgetBurnsFast",
    "critical",
    *_errors_fast,
    summary="{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} failed in the last hour",
    description="This rate uses up the month's error budget of 0.1 % within two days.",
)
ERRORS_SLOWLY = Alert(
    "PenstockErrorBudgetBurnsSlowly",
    "warning",
    *_errors_slowly,
    summary="{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} failed in the last six hours",
    description="This rate uses up the month's error budget of 0.1 % within five days.",
)
FIRST_TOKEN_FAST = Alert(
    "PenstockFirstTokenBudgetBurnsFast",
    "critical",
    *_slow_fast,
    summary=f"{{{{ $value | humanizePercentage }}}} of the requests to {{{{ $labels.model }}}} waited more than {SLOW_S} s",
    description="Time to first token in the last hour. The objective allows 1 % of the requests to be slower.",
)
FIRST_TOKEN_SLOWLY = Alert(
    "PenstockFirstTokenBudgetBurnsSlowly",
    "warning",
    *_slow_slowly,
    summary=f"{{{{ $value | humanizePercentage }}}} of the requests to {{{{ $labels.model }}}} waited more than {SLOW_S} s",
    description="Time to first token in the last six hours. The objective allows 1 % of the requests to be slower.",
)
NO_READY_REPLICA = Alert(
    "PenstockNoReadyReplica",
    "critical",
    _has('condition="Serving"', 'status="False"', 'reason!="ScaledToZero"'),
    "> 0",
    summary="No replica of {{ $labels.namespace }}/{{ $labels.model }} takes requests",
    description="The gateway holds requests until routing.holdTimeout has passed, then answers 503.",
    lasting="2m",
)
NOT_ROUTED = Alert(
    "PenstockModelNotRouted",
    "critical",
    _has('condition="Routed"', 'status="False"'),
    "> 0",
    summary="The gateways do not send requests to {{ $labels.namespace }}/{{ $labels.model }}",
    description="Another model owns its served name, no gateway knows it, or an Envoy refuses its configuration.",
    lasting="5m",
)
ROLLOUT_STUCK = Alert(
    "PenstockRolloutStuck",
    "warning",
    _has('reason=~"ProgressDeadlineExceeded|RolloutBlocked|NewRevisionFails"'),
    "> 0",
    summary="The rollout of {{ $labels.namespace }}/{{ $labels.model }} is stuck",
    description="Older replicas keep serving. The model's conditions name the cause.",
    lasting="5m",
)
_wanted, _ready = (total(metrics.POOL_REPLICAS, f'state="{state}"', by=POOL) for state in ("wanted", "ready"))
REPLICAS_MISSING = Alert(
    "PenstockReplicasMissing",
    "warning",
    f"{_wanted} - {_ready}",
    "> 0",
    summary="{{ $labels.namespace }}/{{ $labels.model }} lacks {{ $value }} replicas in pool {{ $labels.pool }}",
    description="For 15 minutes. The replicas do not start, or they crash.",
    lasting="15m",
)
QUEUE_GROWS = Alert(
    "PenstockQueueGrows",
    "warning",
    WAITING,
    f"> {total(metrics.NUM_REQUESTS_RUNNING, by=MODEL)} and deriv({WAITING}[10m]) > 0",
    summary="{{ $value }} sequences wait for {{ $labels.namespace }}/{{ $labels.model }}, more than run, and the queue grows",
    description="Requests arrive faster than the replicas serve them. Time to first token keeps rising.",
    lasting="5m",
)
_for_room = total(metrics.NUM_REQUESTS_WAITING, 'reason="capacity"', by=POOL)
KV_PRESSURE = Alert(
    "PenstockKvPressure",
    "warning",
    f"avg by ({POOL}) ({metrics.KV_CACHE_USAGE})",
    f"> 0.95 and {_for_room} > 0",
    summary="KV memory of {{ $labels.namespace }}/{{ $labels.model }} is {{ $value | humanizePercentage }} full",
    description="Requests to pool {{ $labels.pool }} wait for KV blocks. Preemptions follow, and they compute tokens twice.",
    lasting="10m",
)
PREEMPTIONS = Alert(
    "PenstockPreemptionStorm",
    "warning",
    rate(metrics.PREEMPTIONS, by=POD, window="1m"),
    "> 0",
    summary="{{ $labels.pod }} preempts {{ $value | humanize }} sequences a second",
    description="The engine evicts their KV blocks and computes them again. Decoding stalls meanwhile.",
    lasting="1m",
)
HIT_RATE = Alert(
    "PenstockHitRateDropped",
    "warning",
    HIT_RATIO,
    f"< 0.5 * {HIT_RATIO} offset 1d and {HIT_RATIO} offset 1d > 0.1",
    summary="{{ $labels.namespace }}/{{ $labels.model }} finds {{ $value | humanizePercentage }} of its prompts cached",
    description="Less than half of yesterday's share. The prompts changed (a timestamp at the start?), or routing did.",
    lasting="15m",
)
CORRUPTED = Alert(
    "PenstockCorruptedRequests",
    "critical",
    _increase(metrics.CORRUPTED_REQUESTS, POD),
    "> 0",
    summary="{{ $labels.pod }} computed NaN or infinite logits",
    description="The requests failed. The device is broken, or the weights overflow their dtype.",
)
_steps = rate(metrics.CUDAGRAPH_STEPS, by=POD, window="10m")
_graph_missing = rate(metrics.CUDAGRAPH_STEPS, 'reason="not_captured"', by=POD, window="10m")
GRAPHS_MISSING = Alert(
    "PenstockGraphsMissing",
    "warning",
    f"({_graph_missing} or 0 * {_steps}) / {_steps}",
    "> 0.1",
    summary="{{ $labels.pod }} runs {{ $value | humanizePercentage }} of its steps without the CUDA graph that it should have",
    description="For 15 minutes. Captures fail, or the engine is never idle long enough. Such steps wait for the host.",
    lasting="15m",
    needs=GPU_ENGINE,
)
EXPERTS_UNEVEN = Alert(
    "PenstockExpertsUneven",
    "warning",
    f"avg by ({POD}) ({metrics.EXPERT_BALANCEDNESS} > 0)",
    "< 0.5",
    summary="The ranks of {{ $labels.pod }} have {{ $value | humanizePercentage }} of the busiest rank's work, on average",
    description="For 15 minutes it has had more than twice its share. Each layer waits for it, while the others are idle.",
    lasting="15m",
    needs=EPLB_ENGINE,
)
REPORTS_STALE = Alert(
    "PenstockLoadReportsStale",
    "warning",
    f"max by (replica) ({metrics.REPORT_AGE})",
    "> 10",
    summary="The last load report of {{ $labels.replica }} is {{ $value | humanizeDuration }} old",
    description="Replicas report every second. The picker works with outdated load.",
    lasting="1m",
)
EVENT_GAPS = Alert(
    "PenstockEventGaps",
    "warning",
    f"sum (increase({metrics.EVENT_GAPS}_total[10m]))",
    "> 3",
    summary="{{ $value | humanize }} event streams lost messages in ten minutes",
    description="The gateway replays each stream. Until then the picker does not know what the replicas have cached.",
)
_gateway, _operator = _up("penstock-gateway"), _up("penstock-operator")
PICKER_DOWN = Alert(
    "PenstockPickerDown",
    "critical",
    *_gateway,
    summary="No gateway answers its scrapes",
    description="Without a picker, Envoy answers 503. With --fail-open, it uses a model's replicas in turn.",
    lasting="1m",
)
NO_ENVOY = Alert(
    "PenstockNoEnvoy",
    "critical",
    f"max ({metrics.XDS_ENVOYS})",
    "== 0",
    summary="No Envoy is connected to any gateway",
    description="Clients get no answer, or they reach an Envoy that keeps its last configuration.",
    lasting="2m",
)
ENVOY_REFUSES = Alert(
    "PenstockEnvoyRefuses",
    "warning",
    f"sum (increase({metrics.XDS_NACKS}_total[10m]))",
    "> 0",
    summary="An Envoy refuses configuration from the gateway",
    description="The Envoy keeps its previous configuration, so it misses new models and replicas.",
)
_audit_lines = series(f"{metrics.AUDIT_LINES}_total", 'outcome!="written"')
AUDIT_LINES_LOST = Alert(
    "PenstockAuditLinesLost",
    "warning",
    f"sum by (pod, outcome) (increase({_audit_lines}[10m]))",
    "> 0",
    summary="The gateway lost {{ $value | humanize }} lines of its audit log",
    description="Gateway {{ $labels.pod }}, {{ $labels.outcome }}. Requests are served, but the log does not show who made them.",
    needs="an audit log",
)
OPERATOR_DOWN = Alert(
    "PenstockOperatorDown",
    "warning",
    *_operator,
    summary="No operator answers its scrapes",
    description="Running replicas keep serving. Nothing is scaled, rolled out or repaired.",
    lasting="5m",
)
NO_LEADER = Alert(
    "PenstockNoLeader",
    "warning",
    f"sum ({metrics.OPERATOR_LEADER})",
    "== 0",
    summary="Operators run, but none of them acts",
    description="No operator holds the Lease. Running replicas keep serving; nothing is scaled, rolled out or repaired.",
    lasting="2m",
)
_failed = rate(metrics.RECONCILES, 'result="error"', window="10m")
_reconciles = rate(metrics.RECONCILES, window="10m")
RECONCILES_FAIL = Alert(
    "PenstockReconcilesFail",
    "warning",
    f"({_failed} or vector(0)) / {_reconciles}",
    "> 0.1",
    summary="{{ $value | humanizePercentage }} of the operator's reconciles fail",
    description="The API server refuses the operator's requests or does not answer.",
    lasting="15m",
)
_looks = f"rate({metrics.SCALING_DECISIONS}_total[5m])"
_seeing = series(f"{metrics.SCALING_DECISIONS}_total", 'constraint!="NoData"')
_informed = f"rate({_seeing}[5m])"
AUTOSCALER_INERT = Alert(
    "PenstockAutoscalerInert",
    "warning",
    f"sum ({_informed} or 0 * {_looks})",
    f"== 0 and on () count({metrics.DESIRED_REPLICAS}) > 0",
    summary="The autoscaler makes no decisions",
    description="It has no load data, or its loop is stuck. Pools keep their size.",
    lasting="5m",
)
COLD_START_SLOW = Alert(
    "PenstockColdStartSlow",
    "warning",
    f"max by ({POOL}) ({metrics.COLD_START})",
    "> 600",
    summary="A replica of {{ $labels.namespace }}/{{ $labels.model }} takes {{ $value | humanizeDuration }} to start",
    description="Pool {{ $labels.pool }}. A burst waits that long, and the autoscaler keeps spare replicas to cover it.",
)
_weights = f'{metrics.LOAD_SECONDS}{{part="weights"}}'
LOAD_SLOW = Alert(
    "PenstockModelLoadSlow",
    "warning",
    f"min by ({POOL}) (({metrics.LOAD_FLOOR_SECONDS} > 0) / ignoring (part) {_weights})",
    f"< 0.5 and max by ({POOL}) ({_weights}) > 30",
    summary="{{ $labels.namespace }}/{{ $labels.model }} loads at {{ $value | humanizePercentage }} of its storage's speed",
    description="Pool {{ $labels.pool }}. Loading takes over 30 s, and more than twice as long as reading the files once.",
)
GPU_ERRORS = Alert(
    "PenstockGpuErrors",
    "critical",
    f"max by (Hostname, gpu) ({queries.GPU_XID})",
    f"> 0 or sum by (Hostname, gpu) (increase({queries.GPU_DOUBLE_BIT_ERRORS}[10m])) > 0",
    summary="GPU {{ $labels.gpu }} of {{ $labels.Hostname }} has errors",
    description="An XID error, or memory errors that ECC cannot correct.",
    needs="GPUs and NVIDIA's DCGM exporter",
)

CLIENTS: Final = Group("penstock.clients", [ERRORS_FAST, ERRORS_SLOWLY, FIRST_TOKEN_FAST, FIRST_TOKEN_SLOWLY])
MODELS: Final = Group("penstock.models", [NO_READY_REPLICA, NOT_ROUTED, ROLLOUT_STUCK, REPLICAS_MISSING])
ENGINES: Final = Group(
    "penstock.engines", [QUEUE_GROWS, KV_PRESSURE, PREEMPTIONS, HIT_RATE, CORRUPTED, GRAPHS_MISSING, EXPERTS_UNEVEN, GPU_ERRORS]
)
GATEWAY: Final = Group("penstock.gateway", [REPORTS_STALE, EVENT_GAPS, PICKER_DOWN, NO_ENVOY, ENVOY_REFUSES, AUDIT_LINES_LOST])
OPERATOR: Final = Group(
    "penstock.operator", [OPERATOR_DOWN, NO_LEADER, RECONCILES_FAIL, AUTOSCALER_INERT, COLD_START_SLOW, LOAD_SLOW]
)
ALERTS: Final = (CLIENTS, MODELS, ENGINES, GATEWAY, OPERATOR)
