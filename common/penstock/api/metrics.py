"""Names of the Prometheus metrics that more than one component, a dashboard or an alert refers to.

Counters are named without `_total`, which the client library appends.
"""

from typing import Final

# --- engine ---
NUM_REQUESTS_RUNNING: Final = "penstock_num_requests_running"
NUM_REQUESTS_WAITING: Final = "penstock_num_requests_waiting"  # label reason
KV_CACHE_USAGE: Final = "penstock_kv_cache_usage_perc"
PROMPT_TOKENS: Final = "penstock_prompt_tokens"  # label source: computed, local_cache
GENERATION_TOKENS: Final = "penstock_generation_tokens"
REQUEST_SUCCESS: Final = "penstock_request_success"  # label finished_reason
PREEMPTIONS: Final = "penstock_num_preemptions"
TIME_TO_FIRST_TOKEN: Final = "penstock_time_to_first_token_seconds"
INTER_TOKEN_LATENCY: Final = "penstock_inter_token_latency_seconds"
TIME_PER_OUTPUT_TOKEN: Final = "penstock_request_time_per_output_token_seconds"
E2E_LATENCY: Final = "penstock_e2e_request_latency_seconds"
PREFIX_CACHE_QUERIES: Final = "penstock_prefix_cache_queries"
PREFIX_CACHE_HITS: Final = "penstock_prefix_cache_hits"

# --- gateway ---
PICKS: Final = "penstock_picker_picks"  # labels pool, policy
PICK_SECONDS: Final = "penstock_picker_pick_seconds"
PICK_REFUSALS: Final = "penstock_picker_refusals"  # label reason
BOOKINGS_RELEASED: Final = "penstock_picker_booking_released"  # label by
BOOKINGS_OPEN: Final = "penstock_picker_bookings"
EVENT_GAPS: Final = "penstock_picker_event_gaps"
REPORT_AGE: Final = "penstock_picker_load_report_age_seconds"
REQUESTS_HELD: Final = "penstock_gateway_requests_held"
XDS_NACKS: Final = "penstock_xds_nacks"

# --- operator and autoscaler ---
RECONCILES: Final = "penstock_operator_reconciles"  # label result
RECONCILE_SECONDS: Final = "penstock_operator_reconcile_seconds"
DESIRED_REPLICAS: Final = "penstock_autoscaler_desired_replicas"  # labels namespace, model, pool
SCALING_DECISIONS: Final = "penstock_autoscaler_decisions"  # label constraint
