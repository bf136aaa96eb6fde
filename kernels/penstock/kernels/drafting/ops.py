"""The form of drafting that this machine can run."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from penstock.kernels.cpu.build import CACHE, BuildError, library
from penstock.kernels.cpu.isa import IsaName, choose
from penstock.kernels.drafting.native import NativeDrafting
from penstock.kernels.drafting.reference import Int32, SuffixHistory, ngram_drafts

log = logging.getLogger(__name__)


class History(Protocol):
    """See the reference's `SuffixHistory`."""

    def add(self, token_ids: Int32) -> None:
        """See the reference."""
        ...

    def drafts(self, token_ids: Int32, rows: Int32, lengths: Int32, most: int, factor: float, min_probability: float) -> Int32:
        """See the reference."""
        ...


@dataclass(frozen=True)
class DraftingOps:
    """See the reference."""

    form: str
    ngram_drafts: Callable[[Int32, Int32, Int32, int, int, int], Int32]
    history: Callable[[int, int, int], History]


REFERENCE = DraftingOps("reference", ngram_drafts, SuffixHistory)


def drafting_ops(isa: IsaName | None = None) -> DraftingOps:
    """The compiled form, or the reference where there is none.

    Args:
        isa: The CPU's instruction set; None: the best that it has.
    """
    try:
        native = NativeDrafting(library(choose(isa), CACHE.expanduser()))
    except BuildError as error:
        log.warning("drafting: plain Python, many times slower than compiled (%s)", error)
        return REFERENCE
    return DraftingOps("native", native.ngram_drafts, native.history)
