"""Drafts from the request's own text: what followed where its last tokens stood earlier (prompt lookup decoding)."""

from penstock.engine.config import SpeculativeConfig
from penstock.engine.core.plan import Int32
from penstock.kernels.drafting.ops import DraftingOps


class NgramProposer:
    """See `Proposer`. Of several earlier occurrences the longest counts, and of equally long ones the earliest."""

    def __init__(self, config: SpeculativeConfig, ops: DraftingOps) -> None:
        self._ops = ops
        self._limits = (config.prompt_lookup_min, config.prompt_lookup_max, config.num_speculative_tokens)

    def propose(self, token_ids: Int32, rows: Int32, lengths: Int32) -> Int32:
        """See Proposer."""
        return self._ops.ngram_drafts(token_ids, rows, lengths, *self._limits)

    def ended(self, output: Int32) -> None:
        """See Proposer: each request has its own text alone."""
