"""Envoy: what clients send and get, what replicas answer, and how the exchange with the picker goes."""

from typing import Final

from monitoring import alerts
from monitoring.boards.variables import MODELS, NAMESPACE
from monitoring.panels import Board, Panel, Query, Row
from monitoring.queries import (
    ENVOY_CLIENTS,
    ENVOY_PICKER,
    ENVOY_POOLS,
    quantile,
    rate,
    total,
)
from penstock.api import metrics

_CLUSTER: Final = "envoy_cluster_name"
_SHARES: Final = (0.5, 0.95, 0.99)


def _plain(name: str, *selectors: str, by: str = "") -> str:
    """The rate of a counter whose name does not end in `_total`: Envoy's seldom do."""
    return rate(name, *selectors, by=by, part="")


def _spent(name: str, *selectors: str) -> str:
    return rate(name, *selectors, part="_sum")


_OUTSIDE: Final = (
    f"({_spent('envoy_http_downstream_rq_time', ENVOY_CLIENTS)} - {_spent('envoy_cluster_upstream_rq_time', ENVOY_POOLS)})"
    f" / {rate('envoy_http_downstream_rq', ENVOY_CLIENTS)}"
)

_TO_CLIENTS = Row(
    "Clients",
    [
        Panel(
            "Requests by status",
            "A second, all models. 5xx: see which code the replicas gave, and whether the picker failed.",
            [
                Query(
                    _plain("envoy_http_downstream_rq_xx", ENVOY_CLIENTS, by="envoy_response_code_class"),
                    "{{envoy_response_code_class}}xx",
                )
            ],
            unit="reqps",
            kind="stacked",
        ),
        Panel(
            "Time of a request",
            "From its first byte to the last byte of the answer: a stream counts until its last token.",
            [Query(quantile(share, "envoy_http_downstream_rq_time", ENVOY_CLIENTS), f"p{100 * share:.0f}") for share in _SHARES],
            unit="ms",
        ),
        Panel(
            "Connections and requests of clients",
            "Open now, at all Envoys together.",
            [
                Query(total("envoy_http_downstream_cx_active", ENVOY_CLIENTS), "connections"),
                Query(total("envoy_http_downstream_rq_active", ENVOY_CLIENTS), "requests"),
            ],
        ),
        Panel(
            "Connections refused",
            "Should stay 0. An Envoy has 50,000 connections, or too little memory: run more Envoys.",
            [
                Query(_plain("envoy_listener_downstream_global_cx_overflow"), "too many connections"),
                Query(_plain("envoy_listener_downstream_cx_overload_reject"), "overload"),
            ],
            bad=0.001,
        ),
    ],
)
_TO_REPLICAS = Row(
    "Replicas",
    [
        Panel(
            "Requests to replicas",
            "A second, by pool. A retry counts again.",
            [Query(rate("envoy_cluster_upstream_rq", ENVOY_POOLS, by=_CLUSTER), "{{envoy_cluster_name}}")],
            unit="reqps",
            kind="stacked",
        ),
        Panel(
            "Answers of replicas by code",
            "503 with a retry: the replica was full or draining, and another one answered.",
            [Query(_plain("envoy_cluster_upstream_rq", ENVOY_POOLS, by="envoy_response_code"), "{{envoy_response_code}}")],
            unit="reqps",
            kind="stacked",
        ),
        Panel(
            "Time at the replica",
            "From sending the request to the last byte of the answer.",
            [Query(quantile(share, "envoy_cluster_upstream_rq_time", ENVOY_POOLS), f"p{100 * share:.0f}") for share in _SHARES],
            unit="ms",
        ),
        Panel(
            "Retries",
            "A second. Envoy retries only where the replica has done no work. `given up`: three tries were not enough.",
            [
                Query(_plain("envoy_cluster_upstream_rq_retry", ENVOY_POOLS), "retries"),
                Query(_plain("envoy_cluster_upstream_rq_retry_success", ENVOY_POOLS), "answered"),
                Query(_plain("envoy_cluster_upstream_rq_retry_limit_exceeded", ENVOY_POOLS), "given up"),
            ],
            unit="reqps",
        ),
        Panel(
            "Circuit breakers",
            "1: open, Envoy refuses requests to this pool. Their limits are far above what a pool can serve.",
            [
                Query(
                    f'max by ({_CLUSTER}) ({{__name__=~"envoy_cluster_circuit_breakers_default_.+_open",{ENVOY_POOLS}}})',
                    "{{envoy_cluster_name}}",
                )
            ],
            most=1,
            bad=1,
        ),
        Panel(
            "Connections to replicas",
            "Open now, by pool.",
            [Query(total("envoy_cluster_upstream_cx_active", ENVOY_POOLS, by=_CLUSTER), "{{envoy_cluster_name}}")],
        ),
        Panel(
            "Connections that failed",
            "A second, by pool. Replicas that are gone, or a NetworkPolicy.",
            [Query(_plain("envoy_cluster_upstream_cx_connect_fail", ENVOY_POOLS, by=_CLUSTER), "{{envoy_cluster_name}}")],
            bad=0.1,
        ),
        Panel(
            "Replicas that Envoy may use",
            "As the Envoy with the fewest has it. Fewer than the pool has ready: its configuration is old.",
            [
                Query(
                    f"min by ({_CLUSTER}) (envoy_cluster_membership_healthy{{{ENVOY_POOLS}}})", "{{envoy_cluster_name}} usable"
                ),
                Query(f"min by ({_CLUSTER}) (envoy_cluster_membership_total{{{ENVOY_POOLS}}})", "{{envoy_cluster_name}} known"),
            ],
            alert=alerts.ENVOY_REFUSES,
        ),
    ],
)
_TO_PICKER = Row(
    "Picker",
    [
        Panel(
            "Exchanges with the picker",
            "A second. A request has two: one for the pick, one that shows the answer's headers. `answered itself`: refusals.",
            [
                Query(_plain("envoy_http_ext_proc_streams_started", ENVOY_CLIENTS), "begun"),
                Query(_plain("envoy_http_ext_proc_immediate_responses_sent", ENVOY_CLIENTS), "answered itself"),
            ],
            unit="reqps",
        ),
        Panel(
            "Exchanges that failed",
            "Should stay 0: clients get a 503, or any ready replica where the gateway runs with --fail-open.",
            [
                Query(_plain("envoy_http_ext_proc_streams_failed", ENVOY_CLIENTS), "failed"),
                Query(_plain("envoy_http_ext_proc_message_timeouts", ENVOY_CLIENTS), "timed out"),
                Query(_plain("envoy_http_ext_proc_spurious_msgs_received", ENVOY_CLIENTS), "unexpected message"),
                Query(_plain("envoy_http_ext_proc_failure_mode_allowed", ENVOY_CLIENTS), "went on without a pick"),
            ],
            bad=0.001,
            alert=alerts.PICKER_DOWN,
        ),
        Panel(
            "Time of a request outside replicas",
            "Mean: the exchange with the picker, waiting at the gateway for room, and Envoy itself.",
            [Query(_OUTSIDE, "mean")],
            unit="ms",
        ),
        Panel(
            "Time of a pick at the gateway",
            "As the gateway measures it, without tokenizing the prompt.",
            [Query(quantile(share, metrics.PICK_SECONDS), f"p{100 * share:.0f}") for share in (0.5, 0.99)],
            unit="s",
            warn=0.01,
        ),
        Panel(
            "Connections to gateways",
            "Open now, at all Envoys together: each has a few to its control plane and to its picker.",
            [Query(total("envoy_cluster_upstream_cx_active", ENVOY_PICKER, by=_CLUSTER), "{{envoy_cluster_name}}")],
        ),
        Panel(
            "Gateways that Envoy may use",
            "As the Envoy with the fewest has it. 0: this Envoy answers 503.",
            [Query(f"min by ({_CLUSTER}) (envoy_cluster_membership_healthy{{{ENVOY_PICKER}}})", "{{envoy_cluster_name}}")],
            alert=alerts.PICKER_DOWN,
        ),
    ],
)
_ITSELF = Row(
    "Envoy itself",
    [
        Panel(
            "Envoys",
            "That Prometheus reaches.",
            [Query("sum (envoy_server_live)")],
            kind="stat",
            alert=alerts.NO_ENVOY,
        ),
        Panel(
            "Memory",
            "Allocated, of the largest Envoy.",
            [Query("max (envoy_server_memory_allocated)")],
            unit="bytes",
            kind="stat",
        ),
        Panel("Youngest Envoy", "Since it started.", [Query("min (envoy_server_uptime)")], unit="s", kind="stat"),
    ],
)

ENVOY: Final = Board(
    "penstock-envoy",
    "Penstock / Envoy",
    __doc__ or "",
    [NAMESPACE, MODELS],
    [_TO_CLIENTS, _TO_REPLICAS, _TO_PICKER, _ITSELF],
)
