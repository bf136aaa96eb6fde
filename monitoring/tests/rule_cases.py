"""Histories in which an alert fires, and such in which it stays silent. Series are in promtool's notation."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Case:
    """What is scraped every `every`, and whether the alert fires at `at`."""

    what: str
    series: dict[str, str]
    fires: dict[str, str] | None
    """The alert's labels, its name and severity aside; None: it is silent."""
    at: str = "20m"
    every: str = "1m"


TINY: Final = {"namespace": "default", "model": "tiny"}
CPU: Final = TINY | {"pool": "cpu"}
POD: Final = TINY | {"pod": "tiny-cpu-0"}


def named(name: str, **labels: str) -> str:
    """A series."""
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def answered(code: str) -> str:
    return named("penstock_gateway_requests_total", model="default/tiny", code=code)


def first_tokens(slow: int, times: int) -> dict[str, str]:
    """A hundred requests each time, so many of them slow."""
    name = "penstock_gateway_response_seconds"
    return {
        named(f"{name}_bucket", model="default/tiny", le="2.5"): f"0+{100 - slow}x{times}",
        named(f"{name}_count", model="default/tiny"): f"0+100x{times}",
    }


def condition(kind: str, status: str, reason: str, values: str = "1x30") -> dict[str, str]:
    return {named("penstock_model_condition", **TINY, condition=kind, status=status, reason=reason): values}


def replicas(wanted: str, ready: str) -> dict[str, str]:
    told = {"wanted": wanted, "ready": ready}
    return {named("penstock_pool_replicas", **CPU, state=state): values for state, values in told.items()}


def load(running: str, waiting: str, usage: str = "0.5x40", reason: str = "capacity") -> dict[str, str]:
    labels = CPU | {"pod": "tiny-cpu-0"}
    return {
        named("penstock_num_requests_running", **labels): running,
        named("penstock_num_requests_waiting", **labels, reason=reason): waiting,
        named("penstock_kv_cache_usage_perc", **labels): usage,
    }


def prefixes(hits: str) -> dict[str, str]:
    return {
        named("penstock_prefix_cache_hits_total", **POD): hits,
        named("penstock_prefix_cache_queries_total", **POD): "0+1000x400",
    }


def up(job: str, *values: str) -> dict[str, str]:
    return {named("up", job=f"penstock-system/{job}", instance=str(number)): it for number, it in enumerate(values)}


def envoys(*values: str) -> dict[str, str]:
    return {named("penstock_xds_envoys", pod=str(number)): it for number, it in enumerate(values)}


def decisions(values: dict[str, str], pools: str = "2x30") -> dict[str, str]:
    counted = {named("penstock_autoscaler_decisions_total", constraint=key): value for key, value in values.items()}
    return counted | {named("penstock_autoscaler_desired_replicas", **CPU): pools}


def load_times(floor: str, weights: str, pod: str = "tiny-cpu-0") -> dict[str, str]:
    labels = CPU | {"pod": pod}
    return {
        named("penstock_load_floor_seconds", **labels): floor,
        named("penstock_load_seconds", **labels, part="weights"): weights,
        named("penstock_load_seconds", **labels, part="warm_up"): "500x30",
    }


def audit(outcome: str, values: str) -> dict[str, str]:
    return {named("penstock_audit_lines_total", pod="gw-0", outcome=outcome): values}


def graph_steps(values: dict[str, str]) -> dict[str, str]:
    """Steps by why they were launched as they were."""
    modes = {"uniform": "FULL", "mixed": "PIECEWISE"}
    name = "penstock_cudagraph_steps_total"
    return {named(name, **POD, mode=modes.get(reason, "NONE"), reason=reason): it for reason, it in values.items()}


def xid(value: str) -> dict[str, str]:
    return {named("DCGM_FI_DEV_XID_ERRORS", Hostname="node-1", gpu="0"): value}


_MODEL = {"model": "default/tiny"}
_PREEMPTED = named("penstock_num_preemptions_total", **CPU, pod="tiny-cpu-0")
_CORRUPTED = named("penstock_corrupted_requests_total", **CPU, pod="tiny-cpu-0")
_EVENNESS = named("penstock_expert_balancedness", **POD, engine="0")
_AGE = named("penstock_picker_load_report_age_seconds", replica="tiny-cpu-0")
_COLD = named("penstock_autoscaler_cold_start_seconds", **CPU)
_GPU = {"Hostname": "node-1", "gpu": "0"}

CASES: Final[dict[str, list[Case]]] = {
    "PenstockErrorBudgetBurnsFast": [
        Case("5 % fail", {answered("200"): "0+95x70", answered("503"): "0+5x70"}, _MODEL, "65m"),
        Case("all fail", {answered("503"): "0+5x70"}, _MODEL, "65m"),
        Case("0.1 % fail", {answered("200"): "0+999x70", answered("503"): "0+1x70"}, None, "65m"),
        Case("none fails", {answered("200"): "0+95x70"}, None, "65m"),
        Case("clients ask for too much", {answered("200"): "0+5x70", answered("429"): "0+95x70"}, None, "65m"),
        Case("it is over", {answered("200"): "0+95x70", answered("503"): "0+20x50 1000x20"}, None, "65m"),
        Case("1.5 % fail", {answered("200"): "0+985x70", answered("503"): "0+15x70"}, _MODEL, "65m"),
        Case("1.4 % fail", {answered("200"): "0+986x70", answered("503"): "0+14x70"}, None, "65m"),
    ],
    "PenstockErrorBudgetBurnsSlowly": [
        Case("1 % fails", {answered("200"): "0+99x80", answered("500"): "0+1x80"}, _MODEL, "370m", "5m"),
        Case("0.1 % fails", {answered("200"): "0+999x80", answered("500"): "0+1x80"}, None, "370m", "5m"),
        Case("it is over", {answered("200"): "0+99x80", answered("500"): "0+2x60 120x20"}, None, "370m", "5m"),
        Case("0.65 % fail", {answered("200"): "0+9935x80", answered("503"): "0+65x80"}, _MODEL, "370m", "5m"),
        Case("0.55 % fail", {answered("200"): "0+9945x80", answered("503"): "0+55x80"}, None, "370m", "5m"),
    ],
    "PenstockFirstTokenBudgetBurnsFast": [
        Case("20 % are slow", first_tokens(20, 70), _MODEL, "65m"),
        Case("1 % is slow", first_tokens(1, 70), None, "65m"),
        Case("15 % are slow", first_tokens(15, 70), _MODEL, "65m"),
        Case("14 % are slow", first_tokens(14, 70), None, "65m"),
    ],
    "PenstockFirstTokenBudgetBurnsSlowly": [
        Case("10 % are slow", first_tokens(10, 80), _MODEL, "370m", "5m"),
        Case("1 % is slow", first_tokens(1, 80), None, "370m", "5m"),
        Case("7 % are slow", first_tokens(7, 80), _MODEL, "370m", "5m"),
        Case("5 % are slow", first_tokens(5, 80), None, "370m", "5m"),
    ],
    "PenstockNoReadyReplica": [
        Case("nothing serves", condition("Serving", "False", "NoReadyReplica"), TINY),
        Case("a minute only", condition("Serving", "False", "NoReadyReplica"), None, "1m"),
        Case("none is wanted", condition("Serving", "False", "ScaledToZero"), None),
        Case("it serves", condition("Serving", "True", "Serving"), None),
    ],
    "PenstockModelNotRouted": [
        Case("its name is another's", condition("Routed", "False", "NameConflict"), TINY),
        Case("nobody can say", condition("Routed", "Unknown", "GatewaysSilent"), None),
    ],
    "PenstockRolloutStuck": [
        Case("no progress", condition("Progressing", "False", "ProgressDeadlineExceeded"), TINY),
        Case("no room", condition("Degraded", "True", "RolloutBlocked"), TINY),
        Case("the new revision fails", condition("Ready", "False", "NewRevisionFails"), TINY),
        Case("it goes on", condition("Progressing", "True", "RollingOut"), None),
        Case("it is paused", condition("Progressing", "False", "Paused"), None),
    ],
    "PenstockReplicasMissing": [
        Case("one of three", replicas("3x30", "2x30"), CPU),
        Case("it comes in time", replicas("3x30", "2x10 3x20"), None),
        Case("for a quarter of an hour", replicas("3x30", "2x16 3x20"), CPU, "16m"),
        Case("for a minute less", replicas("3x30", "2x14 3x20"), None, "15m"),
    ],
    "PenstockQueueGrows": [
        Case("growing beyond the batch", load("8x40", "0+5x40"), TINY),
        Case("long, but not growing", load("8x40", "50x40"), None),
        Case("growing, but short", load("80x40", "0+1x40"), None),
        Case("one more than run", load("8x40", "0x10 1+1x30"), TINY, "30m"),
        Case("as many as run", load("40x40", "0+1x40"), None, "40m"),
    ],
    "PenstockKvPressure": [
        Case("full, and requests wait for room", load("8x40", "3x40", "0.97x40"), CPU),
        Case("full, and they wait for an adapter", load("8x40", "3x40", "0.97x40", reason="lora"), None),
        Case("full, and none waits", load("8x40", "0x40", "0.97x40"), None),
        Case("room", load("8x40", "3x40", "0.8x40"), None),
        Case("96 % full", load("8x40", "1x40", "0.96x40"), CPU),
        Case("94 % full", load("8x40", "3x40", "0.94x40"), None),
    ],
    "PenstockPreemptionStorm": [
        Case("again and again", {_PREEMPTED: "0+1x40"}, POD, "5m", "15s"),
        Case("once", {_PREEMPTED: "0x10 1x30"}, None, "3m15s", "15s"),
    ],
    "PenstockHitRateDropped": [
        Case("from 60 % to 10 %", prefixes("0+600x288 172800+100x30"), TINY, "25h30m", "5m"),
        Case("as yesterday", prefixes("0+600x400"), None, "25h30m", "5m"),
        Case("it was never good", prefixes("0+80x288 23040+10x30"), None, "25h30m", "5m"),
        Case("there was no yesterday", prefixes("0+100x400"), None, "12h", "5m"),
        Case("to 49 % of yesterday", prefixes("0+600x288 172800+294x30"), TINY, "25h30m", "5m"),
        Case("to 51 % of yesterday", prefixes("0+600x288 172800+306x30"), None, "25h30m", "5m"),
        Case("it was just good enough", prefixes("0+110x288 31680+10x30"), TINY, "25h30m", "5m"),
    ],
    "PenstockExpertsUneven": [
        Case("the busiest rank has four times its share", {_EVENNESS: "0.25x40"}, POD, "30m"),
        Case("for ten minutes", {_EVENNESS: "0.9x10 0.25x10 0.9x20"}, None, "30m"),
        Case("there is no load", {_EVENNESS: "0x40"}, None, "30m"),
        Case("nearly even", {_EVENNESS: "0.9x40"}, None, "30m"),
    ],
    "PenstockCorruptedRequests": [
        Case("one", {_CORRUPTED: "0x10 1x20"}, POD, "15m"),
        Case("none", {_CORRUPTED: "0x30"}, None),
    ],
    "PenstockGraphsMissing": [
        Case("a fifth of the steps", graph_steps({"uniform": "0+80x40", "not_captured": "0+20x40"}), POD, "35m"),
        Case("all of them", graph_steps({"not_captured": "0+20x40"}), POD, "35m"),
        Case("prompts beyond the largest size", graph_steps({"uniform": "0+50x40", "too_large": "0+50x40"}), None, "35m"),
        Case("only after the start", graph_steps({"uniform": "0+80x40", "not_captured": "0+20x5 100x35"}), None, "35m"),
        Case("none", graph_steps({"uniform": "0+80x40", "mixed": "0+20x40"}), None, "35m"),
        Case("11 %", graph_steps({"uniform": "0+89x40", "not_captured": "0+11x40"}), POD, "35m"),
        Case("9 %", graph_steps({"uniform": "0+91x40", "not_captured": "0+9x40"}), None, "35m"),
    ],
    "PenstockGpuErrors": [
        Case("XID 79", xid("79x30"), _GPU),
        Case("ECC", xid("0x30") | {named("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", **_GPU): "0x15 1x15"}, _GPU),
        Case("none", xid("0x30"), None),
    ],
    "PenstockLoadReportsStale": [
        Case("half a minute", {_AGE: "30x30"}, {"replica": "tiny-cpu-0"}),
        Case("fresh", {_AGE: "0.5x30"}, None),
        Case("a hiccup", {_AGE: "0.5x10 30 0.5x20"}, None, "11m"),
        Case("11 s", {_AGE: "11x30"}, {"replica": "tiny-cpu-0"}),
        Case("10 s", {_AGE: "10x30"}, None),
    ],
    "PenstockEventGaps": [
        Case("one a minute", {"penstock_picker_event_gaps_total": "0+1x30"}, {}),
        Case("one", {"penstock_picker_event_gaps_total": "0x15 1x15"}, None),
        Case("four in ten minutes", {"penstock_picker_event_gaps_total": "0x10 1 2 3 4x20"}, {}, "15m"),
        Case("two in ten minutes", {"penstock_picker_event_gaps_total": "0x10 1 2x20"}, None, "15m"),
    ],
    "PenstockPickerDown": [
        Case("both", up("penstock-gateway", "0x30", "0x30"), {}),
        Case("not even known", up("penstock-operator", "1x30"), {}),
        Case("one of two", up("penstock-gateway", "0x30", "1x30"), None),
    ],
    "PenstockNoEnvoy": [
        Case("none", envoys("0x30", "0x30"), {}),
        Case("one, at the second gateway", envoys("0x30", "1x30"), None),
    ],
    "PenstockEnvoyRefuses": [
        Case("once", {named("penstock_xds_nacks_total", type="cds"): "0x15 1x15"}, {}),
        Case("long ago", {named("penstock_xds_nacks_total", type="cds"): "0 1x30"}, None),
    ],
    "PenstockAuditLinesLost": [
        Case("a full disk", audit("failed", "0x15 40x15"), {"pod": "gw-0", "outcome": "failed"}),
        Case("it is over", audit("dropped", "0 40x30"), None),
        Case("all are written", audit("written", "0+40x30"), None),
    ],
    "PenstockOperatorDown": [
        Case("both", up("penstock-operator", "0x30", "0x30"), {}),
        Case("a standby", up("penstock-operator", "0x30", "1x30"), None),
    ],
    "PenstockNoLeader": [
        Case("two standbys", {f'penstock_operator_leader{{pod="{pod}"}}': "0x30" for pod in "ab"}, {}),
        Case(
            "a leader and a standby",
            {'penstock_operator_leader{pod="a"}': "1x30", 'penstock_operator_leader{pod="b"}': "0x30"},
            None,
        ),
        Case("a change of leaders", {'penstock_operator_leader{pod="a"}': "1x9 0 1x19"}, None),
    ],
    "PenstockReconcilesFail": [
        Case(
            "a fifth",
            {
                named("penstock_operator_reconciles_total", result="ok"): "0+8x40",
                named("penstock_operator_reconciles_total", result="error"): "0+2x40",
            },
            {},
            "30m",
        ),
        Case("none ever", {named("penstock_operator_reconciles_total", result="ok"): "0+8x40"}, None, "30m"),
        Case(
            "11 %",
            {
                named("penstock_operator_reconciles_total", result="ok"): "0+89x40",
                named("penstock_operator_reconciles_total", result="error"): "0+11x40",
            },
            {},
            "30m",
        ),
        Case(
            "9 %",
            {
                named("penstock_operator_reconciles_total", result="ok"): "0+91x40",
                named("penstock_operator_reconciles_total", result="error"): "0+9x40",
            },
            None,
            "30m",
        ),
    ],
    "PenstockAutoscalerInert": [
        Case("it sees nothing", decisions({"NoData": "0+4x30"}), {}),
        Case("it does not look", decisions({"Demand": "9x30"}), {}),
        Case("it looks", decisions({"Demand": "0+4x30", "NoData": "1x30"}), None),
        Case("nothing is to be scaled", decisions({}, "_x30"), None),
    ],
    "PenstockColdStartSlow": [
        Case("a quarter of an hour", {_COLD: "900x30"}, CPU),
        Case("a minute", {_COLD: "60x30"}, None),
        Case("ten minutes and a second", {_COLD: "601x30"}, CPU),
        Case("ten minutes", {_COLD: "600x30"}, None),
    ],
    "PenstockModelLoadSlow": [
        Case("a third of the speed", load_times("40x30", "120x30"), CPU),
        Case("just below half", load_times("49x30", "100x30"), CPU),
        Case("half", load_times("50x30", "100x30"), None),
        Case("a small model", load_times("1x30", "30x30"), None),
        Case("a model just large enough", load_times("1x30", "31x30"), CPU),
        Case("made-up weights", load_times("0x30", "120x30"), None),
        Case("one of two replicas", load_times("40x30", "120x30") | load_times("40x30", "41x30", "tiny-cpu-1"), CPU),
    ],
}
