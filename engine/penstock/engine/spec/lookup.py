"""Proposers that look drafts up in text."""

from penstock.engine.config import SpeculativeConfig
from penstock.engine.spec.ngram import NgramProposer
from penstock.engine.spec.proposer import Proposer
from penstock.engine.spec.suffix import SuffixProposer
from penstock.kernels.cpu.isa import IsaName
from penstock.kernels.drafting.ops import drafting_ops


def lookup_proposer(config: SpeculativeConfig, isa: IsaName | None) -> Proposer:
    """The proposer of the methods ngram and suffix.

    Args:
        config: The method and its limits.
        isa: The CPU's instruction set; None: the best that it has.
    """
    ops = drafting_ops(isa)
    return NgramProposer(config, ops) if config.method == "ngram" else SuffixProposer(config, ops)
