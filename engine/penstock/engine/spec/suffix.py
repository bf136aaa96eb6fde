"""Drafts from the request's own text and from what other requests were answered (SuffixDecoding, arXiv 2411.04975)."""

from penstock.engine.config import SpeculativeConfig
from penstock.engine.core.plan import Int32
from penstock.engine.core.row_table import RowTable
from penstock.engine.spec.proposer import Proposer
from penstock.kernels.drafting.ops import DraftingOps

_TOKENS_PER_REQUEST = 256
"""Room for each cached output on average: 10,000 of them take about 34 MB."""


class SuffixProposer(Proposer):
    """A draft is as long as what it rests on is, and ends where its tokens become unlikely."""

    looks_up = True

    def __init__(self, config: SpeculativeConfig, ops: DraftingOps) -> None:
        outputs = config.suffix_decoding_max_cached_requests
        self._history = ops.history(outputs, max(outputs, 1) * _TOKENS_PER_REQUEST, config.suffix_decoding_max_tree_depth)
        self._limits = (
            config.num_speculative_tokens,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
        self._keeps = outputs > 0

    def propose(self, table: RowTable, rows: Int32, known: Int32, most: int) -> Int32:
        """Drafts of the tokens that follow."""
        return self._history.drafts(table.token_ids, rows, known, *self._limits)

    def ended(self, output: Int32) -> None:
        """Takes in what a request has generated, [n], now that it has left its row."""
        if self._keeps and len(output):
            self._history.add(output)
