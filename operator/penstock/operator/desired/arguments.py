"""The arguments of the engine's container: every field of the spec that a flag of `penstock serve` honours."""

import math

from penstock.api.resources import InferenceModel, seconds
from penstock.api.resources.model import Lora
from penstock.operator.desired.source import Fetched, source_args

HTTP, ADMIN, EVENTS, REPLAY = 8000, 8003, 5557, 5558
"""Ports of a replica."""


def engine_args(model: InferenceModel, fetched: Fetched | None = None) -> list[str]:
    """The arguments of `penstock serve`.

    Args:
        fetched: What the model's Job brought, where it needs one.
    """
    engine, limits, source = model.spec.engine, model.spec.engine.limits, model.spec.source
    drafts = engine.speculative
    flags = {
        "--load-format": None if source.load_format == "auto" else source.load_format,
        "--dtype": engine.dtype,
        "--max-model-len": limits.max_model_len,
        "--max-num-seqs": limits.max_num_seqs,
        "--max-num-batched-tokens": limits.max_batched_tokens,
        "--long-prefill-token-threshold": limits.long_prefill_threshold,
        "--block-size": limits.block_size,
        "--spec-method": None if drafts is None else drafts.method,
        "--spec-model": None if drafts is None else drafts.model,
        "--spec-tokens": None if drafts is None else drafts.tokens,
        "--gpu-memory-utilization": None if limits.memory_percent is None else limits.memory_percent / 100,
    }
    return [
        *source_args(model, fetched),
        "--served-model-name",  # takes all words up to the next flag
        *model.served_names,
        "--host=$(POD_IP)",
        f"--port={HTTP}",
        f"--admin-port={ADMIN}",
        f"--events-port={EVENTS}",
        f"--replay-port={REPLAY}",
        f"--shutdown-timeout={math.ceil(seconds(model.spec.drain_timeout))}",
        *(f"{flag}={value}" for flag, value in flags.items() if value is not None),
        *_lora(model.spec.lora),
        *engine.extra_args,
    ]


def _lora(lora: Lora | None) -> list[str]:
    """Room for adapters, which the operator then loads over HTTP; the gateway forwards no such request."""
    if lora is None:
        return []
    host = [] if lora.cpu_slots is None else [f"--max-cpu-loras={lora.cpu_slots}"]
    room = ["--enable-lora", f"--max-loras={lora.slots}", *host, f"--max-lora-rank={lora.max_rank}"]
    return [*room, "--allow-runtime-lora-updating"]
