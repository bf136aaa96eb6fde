"""Names of the Prometheus metrics that more than one component, a dashboard or an alert refers to.

Counters are named without `_total`, which the client library appends.
"""

from typing import Final

# --- engine: each also has the labels model_name and engine ---
NUM_REQUESTS_RUNNING: Final = "penstock_num_requests_running"
NUM_REQUESTS_WAITING: Final = "penstock_num_requests_waiting"  # label reason
KV_CACHE_USAGE: Final = "penstock_kv_cache_usage_perc"
PROMPT_TOKENS: Final = "penstock_prompt_tokens"  # label source: computed, local_cache
GENERATION_TOKENS: Final = "penstock_generation_tokens"
REQUEST_SUCCESS: Final = "penstock_request_success"  # label finished_reason
PREEMPTIONS: Final = "penstock_num_preemptions"
PREFIX_CACHE_QUERIES: Final = "penstock_prefix_cache_queries"
PREFIX_CACHE_HITS: Final = "penstock_prefix_cache_hits"
CORRUPTED_REQUESTS: Final = "penstock_corrupted_requests"
TIME_TO_FIRST_TOKEN: Final = "penstock_time_to_first_token_seconds"
INTER_TOKEN_LATENCY: Final = "penstock_inter_token_latency_seconds"
TIME_PER_OUTPUT_TOKEN: Final = "penstock_request_time_per_output_token_seconds"
E2E_LATENCY: Final = "penstock_e2e_request_latency_seconds"
QUEUE_TIME: Final = "penstock_request_queue_time_seconds"
WAIT_TIME: Final = "penstock_request_wait_seconds"
PREFILL_TIME: Final = "penstock_request_prefill_time_seconds"
DECODE_TIME: Final = "penstock_request_decode_time_seconds"
INFERENCE_TIME: Final = "penstock_request_inference_time_seconds"
REQUEST_PROMPT_TOKENS: Final = "penstock_request_prompt_tokens"
REQUEST_GENERATION_TOKENS: Final = "penstock_request_generation_tokens"
REQUEST_MAX_TOKENS: Final = "penstock_request_params_max_tokens"
REQUEST_N: Final = "penstock_request_params_n"
ENGINE_INFO: Final = "penstock_engine_info"  # labels version, dtype, quantization, kernels
LOAD_FLOOR_SECONDS: Final = "penstock_load_floor_seconds"
LOAD_SECONDS: Final = "penstock_load_seconds"  # label part: bandwidth, imports, weights, memory, cache, warm_up, adapters
CACHE_CONFIG_INFO: Final = "penstock_cache_config_info"  # the settings as labels
STEP_SECONDS: Final = "penstock_step_seconds"
STEP_TOKENS: Final = "penstock_step_tokens"
SAMPLED_TOKENS: Final = "penstock_sampled_tokens"
PREEMPTED_TOKENS: Final = "penstock_preempted_tokens"
RESUMED_CACHED_TOKENS: Final = "penstock_resumed_cached_tokens"
EXTERNAL_CACHE_QUERIES: Final = "penstock_external_prefix_cache_queries"
EXTERNAL_CACHE_HITS: Final = "penstock_external_prefix_cache_hits"
KV_OFFLOAD_BYTES: Final = "penstock_kv_offload_bytes"  # labels tier: memory, disk, store, object; transfer_type: store, load
KV_OFFLOAD_SECONDS: Final = "penstock_kv_offload_seconds"  # labels tier, transfer_type
KV_OFFLOAD_PAGES: Final = "penstock_kv_offload_pages"  # labels tier; state: used, free
KV_OFFLOAD_LOST_PAGES: Final = "penstock_kv_offload_lost_pages"  # labels tier; reason: evicted, failed
KV_OFFLOAD_DECLINED_TOKENS: Final = "penstock_kv_offload_declined_tokens"  # label tier
KV_OFFLOAD_FAILURES: Final = "penstock_kv_offload_failures"  # labels tier; operation: store, lookup
KV_TRANSFER_LEASES: Final = "penstock_kv_transfer_leases"
KV_TRANSFER_LEASED_PAGES: Final = "penstock_kv_transfer_leased_pages"
KV_TRANSFER_EXPIRED_LEASES: Final = "penstock_kv_transfer_expired_leases"
KV_TRANSFER_PULLS: Final = "penstock_kv_transfer_pulls"
KV_TRANSFER_BYTES: Final = "penstock_kv_transfer_bytes"
KV_TRANSFER_SECONDS: Final = "penstock_kv_transfer_seconds"
KV_TRANSFER_FAILED_PAGES: Final = "penstock_kv_transfer_failed_pages"
REMOTE_PREFILLS: Final = "penstock_remote_prefills"  # label result: lent, nothing, failed
ENCODER_IMAGES: Final = "penstock_encoder_images"  # label result: encoded, cached
ENCODER_TOKENS: Final = "penstock_encoder_tokens"
ENCODER_SECONDS: Final = "penstock_encoder_seconds"
ENCODER_WAITING_IMAGES: Final = "penstock_encoder_waiting_images"
ENCODER_CACHE_TOKENS: Final = "penstock_encoder_cache_tokens"  # label state: held, idle, free
EXPERT_TOKENS: Final = "penstock_expert_tokens"  # label ep_rank
EXPERT_BALANCEDNESS: Final = "penstock_expert_balancedness"
EXPERT_REBALANCES: Final = "penstock_expert_rebalances"
EXPERT_MOVED_BYTES: Final = "penstock_expert_moved_bytes"
CUDAGRAPH_STEPS: Final = "penstock_cudagraph_steps"  # labels mode: FULL, PIECEWISE, NONE; reason
CUDAGRAPH_TOKENS: Final = "penstock_cudagraph_tokens"  # label kind: real, padding
CUDAGRAPHS: Final = "penstock_cudagraphs"  # label state: captured, pending, failed
CUDAGRAPH_BYTES: Final = "penstock_cudagraph_memory_bytes"
SPEC_DRAFTS: Final = "penstock_spec_decode_num_drafts"
SPEC_DRAFT_TOKENS: Final = "penstock_spec_decode_num_draft_tokens"
SPEC_ACCEPTED_TOKENS: Final = "penstock_spec_decode_num_accepted_tokens"
SPEC_DRAFT_TOKENS_PER_POS: Final = "penstock_spec_decode_num_draft_tokens_per_pos"  # label position
SPEC_ACCEPTED_TOKENS_PER_POS: Final = "penstock_spec_decode_num_accepted_tokens_per_pos"  # label position
GRAMMARS: Final = "penstock_grammars"  # label result: compiled, failed, cached
GRAMMAR_COMPILE_SECONDS: Final = "penstock_grammar_compile_seconds"
LORA_SLOTS: Final = "penstock_lora_slots"
LORA_SLOTS_FREE: Final = "penstock_lora_slots_free"
LORA_REQUESTS_INFO: Final = "penstock_lora_requests_info"  # labels max_lora, running_lora_adapters, waiting_lora_adapters
LORA_SLOT_LOADS: Final = "penstock_lora_slot_loads"
LORA_READS: Final = "penstock_lora_reads"
ESTIMATED_FLOPS: Final = "penstock_estimated_flops"  # label part: linear, attention, lm_head
ESTIMATED_READ_BYTES: Final = "penstock_estimated_read_bytes"  # label part: weights, kv
ESTIMATED_WRITE_BYTES: Final = "penstock_estimated_write_bytes"  # KV
STEP_FLOOR_SECONDS: Final = "penstock_step_floor_seconds"
DEVICE_BANDWIDTH: Final = "penstock_device_memory_bytes_per_second"
DEVICE_FLOPS: Final = "penstock_device_flops_per_second"

VLLM_NAMES: Final = {
    NUM_REQUESTS_RUNNING: "vllm:num_requests_running",
    KV_CACHE_USAGE: "vllm:kv_cache_usage_perc",
    PREFIX_CACHE_QUERIES: "vllm:prefix_cache_queries",
    PREFIX_CACHE_HITS: "vllm:prefix_cache_hits",
    PREEMPTIONS: "vllm:num_preemptions",
    EXTERNAL_CACHE_QUERIES: "vllm:external_prefix_cache_queries",
    EXTERNAL_CACHE_HITS: "vllm:external_prefix_cache_hits",
    GENERATION_TOKENS: "vllm:generation_tokens",
    REQUEST_SUCCESS: "vllm:request_success",
    CORRUPTED_REQUESTS: "vllm:corrupted_requests",
    STEP_TOKENS: "vllm:iteration_tokens_total",
    TIME_TO_FIRST_TOKEN: "vllm:time_to_first_token_seconds",
    INTER_TOKEN_LATENCY: "vllm:inter_token_latency_seconds",
    TIME_PER_OUTPUT_TOKEN: "vllm:request_time_per_output_token_seconds",
    E2E_LATENCY: "vllm:e2e_request_latency_seconds",
    QUEUE_TIME: "vllm:request_queue_time_seconds",
    PREFILL_TIME: "vllm:request_prefill_time_seconds",
    DECODE_TIME: "vllm:request_decode_time_seconds",
    INFERENCE_TIME: "vllm:request_inference_time_seconds",
    REQUEST_PROMPT_TOKENS: "vllm:request_prompt_tokens",
    REQUEST_GENERATION_TOKENS: "vllm:request_generation_tokens",
    REQUEST_MAX_TOKENS: "vllm:request_params_max_tokens",
    REQUEST_N: "vllm:request_params_n",
    CACHE_CONFIG_INFO: "vllm:cache_config_info",
    LORA_REQUESTS_INFO: "vllm:lora_requests_info",
    SPEC_DRAFTS: "vllm:spec_decode_num_drafts",
    SPEC_DRAFT_TOKENS: "vllm:spec_decode_num_draft_tokens",
    SPEC_ACCEPTED_TOKENS: "vllm:spec_decode_num_accepted_tokens",
    SPEC_ACCEPTED_TOKENS_PER_POS: "vllm:spec_decode_num_accepted_tokens_per_pos",
    ESTIMATED_WRITE_BYTES: "vllm:estimated_write_bytes_per_gpu",
}
"""What vLLM calls the same series; `penstock serve --metrics-compat vllm` tells both. Waiting requests, prompt tokens and what is
estimated by part have other labels there."""

# --- gateway ---
GATEWAY_INFO: Final = "penstock_gateway_info"  # labels version; picks: python, or the compiled package
PICKS: Final = "penstock_picker_picks"  # labels pool, policy
PICK_SECONDS: Final = "penstock_picker_pick_seconds"
MODEL_REQUESTS: Final = "penstock_gateway_requests"  # labels model, code
RESPONSE_SECONDS: Final = "penstock_gateway_response_seconds"  # label model
PICK_REFUSALS: Final = "penstock_picker_refusals"  # label reason
BOOKINGS_RELEASED: Final = "penstock_picker_booking_released"  # label by
BOOKINGS_OPEN: Final = "penstock_picker_bookings"
EVENT_GAPS: Final = "penstock_picker_event_gaps"
RESIDENT_BLOCKS: Final = "penstock_picker_resident_blocks"
RESIDENT_BLOCKS_DROPPED: Final = "penstock_picker_resident_blocks_dropped"
RESIDENCY_REPLICAS: Final = "penstock_picker_residency_replicas"  # label knowledge: exact, partial, predicted, unknown
CACHED_TOKENS: Final = "penstock_picker_cached_tokens"  # labels model; view: predicted, found
CACHED_TOKENS_ERROR: Final = "penstock_picker_cached_tokens_error"  # label model
TTFT_RATIO: Final = "penstock_picker_ttft_ratio"  # label model
TTFT_CORRECTION: Final = "penstock_picker_ttft_correction"  # label replica
PROMPTS_MISCOUNTED: Final = "penstock_picker_prompts_miscounted"  # label model
REPORT_AGE: Final = "penstock_picker_load_report_age_seconds"
REQUESTS_HELD: Final = "penstock_gateway_requests_held"
FLOW_QUEUED: Final = "penstock_flow_queued_requests"  # labels model, priority
FLOW_QUEUED_BYTES: Final = "penstock_flow_queued_bytes"
FLOW_WAIT: Final = "penstock_flow_wait_seconds"  # labels model, outcome
TENANT_REQUESTS: Final = "penstock_tenant_requests"  # labels tenant, outcome
TENANT_TOKENS: Final = "penstock_tenant_tokens"  # labels tenant, kind: prompt, cached, output
TENANT_RUNNING: Final = "penstock_tenant_running_requests"  # label tenant
TENANTS_RELOADS: Final = "penstock_tenants_reloads"  # label result
AUDIT_LINES: Final = "penstock_audit_lines"  # label outcome: written, dropped, failed
XDS_NACKS: Final = "penstock_xds_nacks"  # label type
XDS_ENVOYS: Final = "penstock_xds_envoys"

# --- operator and autoscaler ---
OPERATOR_LEADER: Final = "penstock_operator_leader"
RECONCILES: Final = "penstock_operator_reconciles"  # label result
RECONCILE_SECONDS: Final = "penstock_operator_reconcile_seconds"
DESIRED_REPLICAS: Final = "penstock_autoscaler_desired_replicas"  # labels namespace, model, pool
CURRENT_REPLICAS: Final = "penstock_autoscaler_current_replicas"  # labels namespace, model, pool
DEMAND_REPLICAS: Final = "penstock_autoscaler_demand_replicas"  # labels namespace, model, pool
SCALING_DECISIONS: Final = "penstock_autoscaler_decisions"  # label constraint
COLD_START: Final = "penstock_autoscaler_cold_start_seconds"  # labels namespace, model, pool
MODEL_CONDITION: Final = "penstock_model_condition"  # labels namespace, model, condition, status, reason
CANARY_WEIGHT: Final = "penstock_canary_weight_percent"  # labels namespace, model, verdict
POOL_REPLICAS: Final = "penstock_pool_replicas"  # labels namespace, model, pool, state: wanted, ready, updated
