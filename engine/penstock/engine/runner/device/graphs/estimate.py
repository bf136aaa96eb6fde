"""What graphs will take of the device's memory, reckoned before there are any, for the sizing of the KV cache."""

from penstock.engine.config import GraphConfig
from penstock.engine.runner.device.graphs.dispatcher import FEW_REQUESTS

BYTES_PER_LAUNCH = 20 * 1024
"""What the driver keeps of a captured launch: graphs of a 70B model, 1,600 launches each, are reported to take about 30 MB. Not
measured here; the log says at the start what the first graphs have taken."""
LAUNCHES_PER_LAYER = 12
"""Four products, two norms, the gated product, keys and values, attention and its reduction, and what adapters add."""
LAUNCHES_PER_STEP = 32
"""Inputs, embedding, angles, last norm, LM head, sampling."""


def estimate_graph_bytes(
    graphs: GraphConfig,
    num_layers: int,
    step_bytes: int,
    max_num_batched_tokens: int,
    num_variants: int = 1,
    lora: bool = False,
    max_num_seqs: int = 0,
    logits_row_bytes: int = 0,
    verifies: bool = False,
    shares: bool = False,
) -> int:
    """Bytes of all graphs that a configuration asks for.

    All share one pool, which the largest has filled: the intermediate tensors of its step, and the logits that a full graph ends
    with. Besides, each keeps its launches.

    Args:
        graphs: As configured.
        num_layers: Of the model.
        step_bytes: What the largest step takes beside weights and cache, of `max_num_batched_tokens` tokens.
        max_num_batched_tokens: Of that step.
        num_variants: Of full graphs of one size.
        lora: Whether each is there twice, with adapters and without.
        max_num_seqs: Requests of a step at most, each of which has a row of logits.
        logits_row_bytes: What such a row takes.
        verifies: Whether there are full graphs of steps with drafts, too, whose tokens all have such a row.
        shares: Whether there are full graphs of decodes that read a shared prefix apart, too, once for each size.
    """
    if graphs.mode == "NONE" or not graphs.capture_sizes:
        return 0
    full = {"FULL": 2 * num_variants, "FULL_AND_PIECEWISE": num_variants}.get(graphs.mode, 0)
    few = len(FEW_REQUESTS) if graphs.mode == "FULL" else 0
    kinds = full + (verifies and full > 0) + (graphs.mode != "FULL")
    each = LAUNCHES_PER_LAYER * num_layers + LAUNCHES_PER_STEP
    launches = len(graphs.capture_sizes) * (kinds * (1 + lora) + (shares and full > 0) + few) * each
    largest = max(graphs.capture_sizes)
    pool = step_bytes * min(1.0, largest / max_num_batched_tokens)
    rows = 0 if not full else largest if verifies else min(largest, max_num_seqs)
    return int(pool) + rows * logits_row_bytes + launches * BYTES_PER_LAUNCH
