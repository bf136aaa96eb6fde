"""Where drafts come from."""

from typing import Protocol

from penstock.engine.config import SpeculativeConfig
from penstock.engine.core.plan import Int32
from penstock.engine.spec.ngram import NgramProposer
from penstock.engine.spec.suffix import SuffixProposer
from penstock.kernels.cpu.isa import IsaName
from penstock.kernels.drafting.ops import drafting_ops


class Proposer(Protocol):
    """Guesses how rows go on. A guess may be wrong: the model verifies each one."""

    def propose(self, token_ids: Int32, rows: Int32, lengths: Int32) -> Int32:
        """Drafts of the tokens that follow.

        Args:
            token_ids: [R, L]: all rows' tokens.
            rows: [m]: indexes into `token_ids`.
            lengths: [m]: known tokens of each of these rows.

        Returns:
            [m, K]: the drafts of each, then -1.
        """
        ...

    def ended(self, output: Int32) -> None:
        """Takes in what a request has generated, [n], now that it has left its row."""
        ...


def make_proposer(config: SpeculativeConfig, isa: IsaName | None) -> Proposer:
    """The proposer of a method.

    Args:
        config: The method and its limits.
        isa: The CPU's instruction set; None: the best that it has.
    """
    ops = drafting_ops(isa)
    if config.method == "ngram":
        return NgramProposer(config, ops)
    return SuffixProposer(config, ops)
