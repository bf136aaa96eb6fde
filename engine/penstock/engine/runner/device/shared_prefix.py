"""Which prefix the requests of a step share, read off their block tables, and whether to read it apart. Pure."""

from collections.abc import Sequence

import numpy as np

from penstock.engine.attention.backends.interface import AttentionBackend, AttentionNeeds
from penstock.engine.cache.layout import KVGroup
from penstock.engine.core.plan import Int32, StepPlan
from penstock.engine.core.row_table import RowTable
from penstock.kernels.paged_attention.launch import AttentionShape
from penstock.kernels.paged_attention.prefix import SHARED_STEP, pays
from penstock.kernels.prepare_kv.cache_rows import row_size

_FIRST_LOOK = 8
"""Blocks that are compared first: most steps differ in them, and are done."""


def shared_blocks(table: Int32, rows: Int32, whole: int) -> int:
    """How many first blocks are the same in all rows.

    Args:
        table: [rows, blocks].
        rows: [r]: at least one.
        whole: Blocks to look at, at most.
    """
    count, width, first = 0, _FIRST_LOOK, table[rows[0]]
    while count < whole:
        end = min(count + width, whole)
        same = (table[rows, count:end] == first[count:end]).all(axis=0)
        if not same.all():
            return count + int(np.argmin(same))
        count, width = end, 2 * width
    return count


def shared_tokens(table: Int32, rows: Int32, settled: Int32, block_size: int) -> int:
    """Tokens at the beginning of all rows that lie in the same blocks, whose keys are there whatever steps are in flight.

    Args:
        table: [rows, blocks]: the block tables.
        rows: [r]: that run.
        settled: [rows]: tokens of each row with keys, as far as steps have ended.
        block_size: Tokens a block.
    """
    if len(rows) < 2:
        return 0
    found = shared_blocks(table, rows, int(settled[rows].min()) // block_size)
    return found * block_size // SHARED_STEP * SHARED_STEP


class PrefixSharing:
    """What decides of each step of a model.

    Args:
        needs: Of its layers.
    """

    def __init__(self, needs: AttentionNeeds) -> None:
        heads, kept = (needs.num_heads, needs.num_kv_heads, needs.head_size), needs.kv_dtype
        self._shape = AttentionShape(*heads, needs.dtype.itemsize)
        self._token_bytes = 2 * needs.num_kv_heads * row_size(needs.head_size, kept) * kept.itemsize
        [self._block_size] = needs.block_sizes

    @staticmethod
    def of(backend: AttentionBackend, groups: Sequence[KVGroup]) -> "PrefixSharing | None":
        """Of a model whose layers have one group of blocks, which are never dropped; None: its requests read all keys each."""
        able = backend.shares and len(groups) == 1 and groups[0].window is None
        return PrefixSharing(backend.needs) if able else None

    def tokens(self, plan: StepPlan, table: RowTable) -> int:
        """First tokens that a step reads apart, of one new token a request; 0: its requests share none, or too few to pay.

        Args:
            plan: The step's.
            table: To which it has been applied.
        """
        found = shared_tokens(table.block_tables[0], plan.rows, table.num_settled, self._block_size)
        return found if found and pays(self._shape, self._token_bytes, len(plan.rows), found) else 0
