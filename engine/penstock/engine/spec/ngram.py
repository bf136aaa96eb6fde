"""Drafts from the request's own text: what followed where its last tokens stood earlier (prompt lookup decoding)."""

from penstock.engine.config import SpeculativeConfig
from penstock.engine.core.plan import Int32
from penstock.engine.core.row_table import RowTable
from penstock.engine.spec.proposer import Proposer
from penstock.kernels.drafting.ops import DraftingOps


class NgramProposer(Proposer):
    """Of several earlier occurrences the longest counts, and of equally long ones the earliest."""

    looks_up = True

    def __init__(self, config: SpeculativeConfig, ops: DraftingOps) -> None:
        self._ops = ops
        self._limits = (config.prompt_lookup_min, config.prompt_lookup_max, config.num_speculative_tokens)

    def propose(self, table: RowTable, rows: Int32, known: Int32, most: int) -> Int32:
        """Drafts of the tokens that follow."""
        return self._ops.ngram_drafts(table.token_ids, rows, known, *self._limits)
