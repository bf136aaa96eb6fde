"""Inside one replica: the batch, its KV memory, its steps. Start with the row whose panel moved with the symptom."""

from typing import Final

from monitoring import alerts
from monitoring.boards.variables import MODELS, NAMESPACE, POOLS, REPLICAS
from monitoring.panels import Board, Panel, Query, Row
from monitoring.queries import GPU_BUSY, GPU_MEMORY_USED, REPLICA, buckets, mean, quantile, rate, series, total
from penstock.api import metrics

_GPU_NEEDS: Final = "GPUs and NVIDIA's DCGM exporter"
_LORA_NEEDS: Final = "an engine with --enable-lora"
_hits, _queries = (rate(it, REPLICA, by="pod") for it in (metrics.PREFIX_CACHE_HITS, metrics.PREFIX_CACHE_QUERIES))
_DRAFT_NEEDS: Final = "an engine with --spec-method"
_GRAMMAR_NEEDS: Final = "requests with structured output"
_IMAGE_NEEDS: Final = "requests with images"
_OFFLOAD_NEEDS: Final = "an engine with --kv-offload-memory-bytes"
_accepted, _drafted = (rate(it, REPLICA, by="pod") for it in (metrics.SPEC_ACCEPTED_TOKENS, metrics.SPEC_DRAFT_TOKENS))
_accepted_here, _drafted_here = (
    rate(it, REPLICA, by="position") for it in (metrics.SPEC_ACCEPTED_TOKENS_PER_POS, metrics.SPEC_DRAFT_TOKENS_PER_POS)
)
_GPU: Final = 'namespace=~"$namespace",pod=~"$replica"'

_BATCH = Row(
    "Batch and queue",
    [
        Panel(
            "Running",
            "Sequences in the batch. At --max-num-seqs while KV is free: raise it.",
            [Query(total(metrics.NUM_REQUESTS_RUNNING, REPLICA, by="pod"), "{{pod}}")],
        ),
        Panel(
            "Waiting, by what for",
            "`capacity`: KV blocks or places in the batch. `lora`: slots. `grammar`: compilation. `remote_kv`: a transfer.",
            [Query(total(metrics.NUM_REQUESTS_WAITING, REPLICA, by="reason"), "{{reason}}")],
            kind="stacked",
            alert=alerts.QUEUE_GROWS,
        ),
        Panel(
            "Time in the queue, p99",
            "Until first scheduled.",
            [Query(quantile(0.99, metrics.QUEUE_TIME, REPLICA, by="pod"), "{{pod}}")],
            unit="s",
        ),
    ],
)
_KV = Row(
    "KV memory",
    [
        Panel(
            "KV usage",
            "Share of blocks that requests hold; what is merely cached counts as free.",
            [Query(series(metrics.KV_CACHE_USAGE, REPLICA), "{{pod}}")],
            unit="percentunit",
            most=1,
            warn=0.95,
            alert=alerts.KV_PRESSURE,
        ),
        Panel(
            "Preemptions, and decode time p99",
            "A long tail of decode times without preemptions has another cause: look at the steps.",
            [
                Query(rate(metrics.PREEMPTIONS, REPLICA), "preemptions a second"),
                Query(quantile(0.99, metrics.DECODE_TIME, REPLICA), "decode p99, seconds"),
            ],
            alert=alerts.PREEMPTIONS,
        ),
        Panel(
            "Tokens given up by preemption",
            "The difference is computed twice.",
            [
                Query(rate(metrics.PREEMPTED_TOKENS, REPLICA), "given up"),
                Query(rate(metrics.RESUMED_CACHED_TOKENS, REPLICA), "found again in the cache"),
            ],
            alert=alerts.PREEMPTIONS,
        ),
        Panel(
            "Prefix cache",
            "Share of looked-up prompt tokens that were found; each prompt counts once.",
            [
                Query(
                    f"{_hits} / {_queries}",
                    "{{pod}}",
                )
            ],
            unit="percentunit",
            most=1,
            alert=alerts.HIT_RATE,
        ),
        Panel(
            "Prompt tokens by source",
            "`computed` is what prefill has to do.",
            [Query(rate(metrics.PROMPT_TOKENS, REPLICA, by="source"), "{{source}}")],
            kind="stacked",
        ),
        Panel(
            "LoRA slots taken",
            "All taken and `lora` waiting: raise --max-loras.",
            [
                Query(
                    f"{total(metrics.LORA_SLOTS, REPLICA, by='pod')} - {total(metrics.LORA_SLOTS_FREE, REPLICA, by='pod')}",
                    "{{pod}}",
                )
            ],
            needs=_LORA_NEEDS,
        ),
    ],
)
_STEPS = Row(
    "Steps",
    [
        Panel(
            "Time of a step",
            "A band that rises with equal tokens: the machine is shared, or slower.",
            [Query(buckets(metrics.STEP_SECONDS, REPLICA))],
            unit="s",
            kind="heatmap",
        ),
        Panel(
            "Tokens of a step",
            "At the token budget: prefill fills the steps (--max-num-batched-tokens).",
            [Query(mean(metrics.STEP_TOKENS, REPLICA, by="pod"), "{{pod}}")],
        ),
        Panel(
            "Tokens sampled and delivered",
            "Sampled ones that nobody gets were in flight when their sequence ended.",
            [
                Query(rate(metrics.SAMPLED_TOKENS, REPLICA), "sampled"),
                Query(rate(metrics.GENERATION_TOKENS, REPLICA), "delivered"),
            ],
        ),
        Panel(
            "Floating-point operations",
            "A second, counted from the model's shape. Low is normal for decoding, a fault for prefill.",
            [Query(rate(metrics.ESTIMATED_FLOPS, REPLICA, by="part"), "{{part}}")],
            unit="flops",
            kind="stacked",
        ),
        Panel(
            "Memory traffic",
            "Bytes read a second. Near the device's bandwidth, decoding can be no faster.",
            [
                Query(rate(metrics.ESTIMATED_READ_BYTES, REPLICA, by="part"), "read {{part}}"),
                Query(rate(metrics.ESTIMATED_WRITE_BYTES, REPLICA), "written"),
            ],
            unit="Bps",
            kind="stacked",
        ),
        Panel(
            "Corrupted requests",
            "Logits were not finite. Take the replica out of service.",
            [Query(rate(metrics.CORRUPTED_REQUESTS, REPLICA, by="pod"), "{{pod}}")],
            bad=0.001,
            alert=alerts.CORRUPTED,
        ),
    ],
)
_DRAFTS = Row(
    "Drafts",
    [
        Panel(
            "Accepted drafts",
            "Share of the draft tokens that the model accepted. Low: the text does not repeat, or the draft model does not fit.",
            [Query(f"{_accepted} / {_drafted}", "{{pod}}")],
            unit="percentunit",
            most=1,
            needs=_DRAFT_NEEDS,
        ),
        Panel(
            "Accepted drafts by position",
            "Falls with the position. A flat tail near zero: fewer drafts (--spec-tokens) cost less.",
            [Query(f"{_accepted_here} / {_drafted_here}", "{{position}}")],
            unit="percentunit",
            most=1,
            needs=_DRAFT_NEEDS,
        ),
        Panel(
            "Draft tokens",
            "Proposed and accepted tokens per second. None: drafts do not pay at present, and the engine makes none.",
            [Query(_drafted, "proposed {{pod}}"), Query(_accepted, "accepted {{pod}}")],
            needs=_DRAFT_NEEDS,
        ),
    ],
)
_GRAMMARS = Row(
    "Grammars and host memory",
    [
        Panel(
            "Grammars",
            "Requested grammars per second: compiled, found in the cache, or failed.",
            [Query(rate(metrics.GRAMMARS, REPLICA, by="result"), "{{result}}")],
            kind="stacked",
            needs=_GRAMMAR_NEEDS,
        ),
        Panel(
            "Time to compile a grammar, p99",
            "Requests wait for it with the reason `grammar`. High: large schemas.",
            [Query(quantile(0.99, metrics.GRAMMAR_COMPILE_SECONDS, REPLICA, by="pod"), "{{pod}}")],
            unit="s",
            needs=_GRAMMAR_NEEDS,
        ),
        Panel(
            "KV pages to and from the host's memory and the disk",
            "Bytes per second. Many stores and few loads: the pages are not used again.",
            [Query(rate(metrics.KV_OFFLOAD_BYTES, REPLICA, by="tier, transfer_type"), "{{tier}} {{transfer_type}}")],
            unit="Bps",
            needs=_OFFLOAD_NEEDS,
        ),
        Panel(
            "Failures of the memory behind the KV cache",
            "Per second: pages that could not be stored, and look-ups without an answer. The tier is down, full or slow.",
            [Query(rate(metrics.KV_OFFLOAD_FAILURES, REPLICA, by="tier, operation"), "{{tier}} {{operation}}")],
            needs=_OFFLOAD_NEEDS,
        ),
        Panel(
            "Images",
            "Images per second: encoded, or found in the cache of embeddings.",
            [Query(rate(metrics.ENCODER_IMAGES, REPLICA, by="result"), "{{result}}")],
            needs=_IMAGE_NEEDS,
        ),
        Panel(
            "Images that wait for the tower",
            "Images of unfinished requests that no tower has begun with. Many for long: more replicas, or a larger "
            "--max-num-batched-tokens.",
            [Query(series(metrics.ENCODER_WAITING_IMAGES, REPLICA), "{{pod}}")],
            needs=_IMAGE_NEEDS,
        ),
        Panel(
            "Balance of experts",
            "Mean load of the ranks over that of the busiest one. Low for long: in --eplb-config, a shorter step_interval where "
            "traffic changes, more num_redundant_experts where few experts have most of the load.",
            [Query(series(metrics.EXPERT_BALANCEDNESS, REPLICA), "{{pod}}")],
            unit="percentunit",
            most=1,
            needs=alerts.EPLB_ENGINE,
        ),
        Panel(
            "Load of ranks with experts",
            "Choices of an expert for a token, a second, by the rank that computes them. One far above the others is waited for.",
            [Query(rate(metrics.EXPERT_TOKENS, REPLICA, by="ep_rank"), "rank {{ep_rank}}")],
            needs=alerts.EPLB_ENGINE,
        ),
        Panel(
            "Experts that move",
            "Bytes a second between ranks, and redistributions an hour. None for hours, with a low balance: look for a warning "
            "in the log.",
            [
                Query(rate(metrics.EXPERT_MOVED_BYTES, REPLICA), "bytes a second"),
                Query(f"3600 * {rate(metrics.EXPERT_REBALANCES, REPLICA)}", "redistributions an hour"),
            ],
            needs=alerts.EPLB_ENGINE,
        ),
    ],
)
_padding, _computed = (rate(metrics.CUDAGRAPH_TOKENS, REPLICA, it, by="pod") for it in ('kind="padding"', ""))
_GRAPHS = Row(
    "CUDA graphs",
    [
        Panel(
            "Steps by graph",
            "`FULL`: one launch a step, as decoding should. `PIECEWISE`: prompts. `NONE`: kernel by kernel, a busy host.",
            [Query(rate(metrics.CUDAGRAPH_STEPS, REPLICA, by="mode"), "{{mode}}")],
            kind="stacked",
            needs=alerts.GPU_ENGINE,
        ),
        Panel(
            "Steps without a graph, by why",
            "`too_large`: beyond the largest size, where a graph would gain little. `not_captured`: still to come, or it failed.",
            [Query(rate(metrics.CUDAGRAPH_STEPS, REPLICA, 'mode="NONE"', by="reason"), "{{reason}}")],
            kind="stacked",
            needs=alerts.GPU_ENGINE,
            alert=alerts.GRAPHS_MISSING,
        ),
        Panel(
            "Padding",
            "Share of all tokens that fill batches up to a graph's size. Large: --cudagraph-capture-sizes that fit better.",
            [Query(f"{_padding} / {_computed}", "{{pod}}")],
            unit="percentunit",
            most=1,
            needs=alerts.GPU_ENGINE,
        ),
    ],
)
_GPUS = Row(
    "GPU",
    [
        Panel(
            "GPU busy",
            "Share of time in which a kernel ran.",
            [Query(series(GPU_BUSY, _GPU), "{{pod}} GPU {{gpu}}")],
            unit="percent",
            most=100,
            width=12,
            needs=_GPU_NEEDS,
        ),
        Panel(
            "GPU memory",
            "Flat: the engine takes its share at the start.",
            [Query(series(GPU_MEMORY_USED, _GPU), "{{pod}} GPU {{gpu}}")],
            unit="decmbytes",
            width=12,
            needs=_GPU_NEEDS,
            alert=alerts.GPU_ERRORS,
        ),
    ],
)

ENGINE: Final = Board(
    "penstock-engine",
    "Penstock / Engine",
    __doc__ or "",
    [NAMESPACE, MODELS, POOLS, REPLICAS],
    [_BATCH, _KV, _STEPS, _DRAFTS, _GRAMMARS, _GRAPHS, _GPUS],
)
