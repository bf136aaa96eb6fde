"""What a step costs by arithmetic alone, from the model's shape and the step's rows.

Divided by time and by what a device can do, operations and bytes are its MFU (Chowdhery et al., 2022) and MBU. Counted are matrix
products and attention, two operations a multiply-add, and each byte once that must move: the weights once a step, a row's keys
and values once, whatever the number of its queries. Norms, activations, embeddings and sampling are left out.
"""

import numpy as np

from penstock.engine.core.plan import Int32
from penstock.engine.cost import ModelCost, StepCost


def step_cost(model: ModelCost, new: Int32, ends: Int32, num_sampled: int) -> StepCost:
    """What one step costs.

    Args:
        model: The model.
        new: [r]: tokens that each row computes.
        ends: [r]: the row's tokens after that; the first new one is at `ends - new`.
        num_sampled: Rows that pass the LM head.
    """
    num_tokens = int(new.sum())
    attention = kv_read = kv_write = 0
    for group in model.windows:
        pairs, keys = _attended(new, ends, num_tokens, group.window)
        attention += pairs * group.flops_per_pair
        kv_read += keys * group.kv_bytes_per_token
        kv_write += num_tokens * group.kv_bytes_per_token
    return StepCost(
        linear_flops=num_tokens * model.linear_flops_per_token,
        attention_flops=attention,
        lm_head_flops=num_sampled * model.lm_head_flops_per_row,
        weight_bytes=model.layer_weight_bytes + (model.lm_head_bytes if num_sampled else 0),
        kv_read_bytes=kv_read,
        kv_write_bytes=kv_write,
    )


def _attended(new: Int32, ends: Int32, num_tokens: int, window: int | None) -> tuple[int, int]:
    """Over all rows, the pairs of a query and a key that it sees, and the keys that any query of the row sees."""
    upto = ends.astype(np.int64)
    if window is None and num_tokens == len(new):  # a token each
        return (total := int(upto.sum())), total
    counts = new.astype(np.int64)
    if window is None:
        # The token at position p sees p + 1: an arithmetic series from `upto - counts + 1` to `upto`.
        return int((counts * (2 * upto - counts + 1)).sum()) // 2, int(upto.sum())
    growing = np.clip(window - (upto - counts), 0, counts)  # tokens that still see all before them
    pairs = growing * (2 * (upto - counts) + growing + 1) // 2 + (counts - growing) * window
    return int(pairs.sum()), int(np.minimum(upto, window + counts - 1).sum())
