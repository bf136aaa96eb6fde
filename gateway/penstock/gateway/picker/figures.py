"""What is known of each replica of a model, as columns of numbers, and what all of them show together."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Rows = NDArray[np.intp]

FEW: Final = 16
"""Up to this many rows a Python loop is quicker than array operations, each of which costs about a microsecond."""

PRIOR_PREFILL_TOKENS_PER_S = 2_000.0
PRIOR_STEP_S = 0.03
PRIOR_QUEUE_S = 0.25
"""Queue of a replica that has never said a word, at least."""
PRIOR_OUTPUT_TOKENS = 256.0
PRIOR_TRANSFER = 0.005, 5e-6
"""Seconds to set it up, and for each token: 128 KiB of KV cache at 25 GB/s."""


class Figures(NamedTuple):
    """One column a figure, each float64 [rows]. A new figure is a line here and a write where it becomes known; where nothing is
    known it is 0."""

    pool: Floats
    """Number of the replica's pool and rank in `Columns.pools`."""
    heard_at: Floats
    """When the newest report came; -inf without one."""
    running: Floats
    waiting: Floats
    batch: Floats
    """What ran when the step was measured: some of it may have ended since."""
    rows: Floats
    """Requests that fit into a batch."""
    rows_free: Floats
    """Free rows after those that run. inf if the width is unknown."""
    kv_usage: Floats
    kv_blocks: Floats
    blocks_free: Floats
    """KV blocks that can be had; inf where their number is unknown."""
    held_blocks: Floats
    """KV blocks of an average running request."""
    backlog_tokens: Floats
    measured_tokens_per_s: Floats
    measured_step_s: Floats
    s_per_token: Floats
    """Prefill, as measured; where it was not, the model's common rate."""
    step_s: Floats
    """Likewise."""
    lora_slots: Floats
    lora_free: Floats
    """Slots that no adapter holds."""
    lora_idle: Floats
    """LoRA slots with idle adapters."""
    booked_requests: Floats
    booked_tokens: Floats
    """Booked tokens to prefill."""
    booked_transfers: Floats
    """Tokens whose KV blocks come from a prefill replica."""
    transfer_s: Floats
    """What it takes to fetch a prompt's KV blocks from a prefill replica, whatever their number: as measured, else a prior."""
    transfer_s_per_token: Floats
    """Likewise."""
    kv_layout: Floats
    """A number that only equal layouts of the KV cache share; 0: unknown."""
    promised_s: Floats
    """Times to the first token as they were estimated, summed up and fading; see `correction`."""
    taken_s: Floats
    """The same ones as they came about."""
    correction: Floats
    """Factor on the times that the replica promises."""
    ejected_until: Floats
    """Until this time the replica is a last resort; see `Outliers`."""
    allowance: Floats
    """Requests on their way to it from which on it is a last resort; inf off probation."""


class Rates(msgspec.Struct, frozen=True):
    """What the replicas of a model show together: stands in for what one of them has not measured."""

    prefill_tokens_per_s: float = PRIOR_PREFILL_TOKENS_PER_S
    step_s: float = PRIOR_STEP_S
    queue_s: float = PRIOR_QUEUE_S
    """Mean queue of those whose reports are fresh, and `itl_s` their mean inter-token time with one request more: what is
    assumed of the others."""
    itl_s: float = PRIOR_STEP_S
    output_tokens: float = PRIOR_OUTPUT_TOKENS
    """Mean length of the answers that have ended lately."""
    requests: float = 0.0
    """Mean of those that run and wait at the replicas that have reported."""
    arrivals: float = 0.0
    """Requests a second that were lately sent to each of those that may be picked."""


def at(column: NDArray[Any], rows: Sequence[int]) -> list[Any]:
    """What stands in `rows` of a column, as Python's own numbers."""
    if len(column) > FEW:
        return column.take(rows).tolist()
    values = column.tolist()
    return [values[row] for row in rows]
