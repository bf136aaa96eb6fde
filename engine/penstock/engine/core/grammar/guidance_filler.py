"""The masks of many requests in one call of llguidance, in several threads where there are enough of them."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.engine.core.plan import Int32

if TYPE_CHECKING:
    from llguidance import LLExecutor

    from penstock.engine.core.grammar.guidance import GuidanceMatcher
    from penstock.engine.core.grammar.guide import GrammarGuide

PARALLEL_MASKS: Final = 64
"""Masks from which on to hand them to threads costs less than to fill them one after the other (`make bench-structured`)."""
_MAX_THREADS: Final = 8


class GuidanceFiller:
    """A `Filler` of guides whose matchers are llguidance's.

    Args:
        eos_token_ids: The model's.
    """

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        bits: dict[int, int] = {}
        for token in eos_token_ids:
            bits[token // 32] = bits.get(token // 32, 0) | 1 << token % 32
        self._eos = [(word, np.uint32(of).view(np.int32)) for word, of in bits.items()]
        self._executor: LLExecutor | None = None

    def fill(self, guides: "Sequence[GrammarGuide]", masks: Int32, places: Sequence[int]) -> None:
        """Writes the masks; see `Filler`."""
        matchers: list[GuidanceMatcher] = [guide.matcher for guide in guides]  # pyright: ignore[reportAssignmentType]
        words, of_tokenizer = masks.shape[1], matchers[0].num_words
        if words == of_tokenizer:
            self._compute(matchers, masks, places)
        else:  # the tokenizer has more tokens than the model has logits
            wide = np.empty((len(guides), of_tokenizer), np.int32)
            self._compute(matchers, wide, range(len(guides)))
            masks[places] = wide[:, :words]
        ends = {place for word, bits in self._eos if word < words for place in (masks[:, word] & bits).nonzero()[0].tolist()}
        # Inside an answer there is nothing to do, which is cheaper to see than to do.
        for guide, place in zip(guides, places, strict=True):
            if guide.adds_stops or (place in ends and guide.changes_ends) or guide.matcher.inner.is_error():  # pyright: ignore
                guide.complete(masks, place)

    def _compute(self, matchers: "Sequence[GuidanceMatcher]", masks: Int32, places: Sequence[int]) -> None:
        # numpy's `ctypes.data` takes longer than most masks.
        begin, size = masks.__array_interface__["data"][0], masks.strides[0]
        if len(matchers) < PARALLEL_MASKS:
            for matcher, place in zip(matchers, places, strict=True):
                matcher.compute(begin + place * size, size)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(min(max((os.cpu_count() or 1) // 2, 1), _MAX_THREADS))
        pairs = [(matcher.inner, place) for matcher, place in zip(matchers, places, strict=True)]
        self._executor.unsafe_compute_mask_ptr(pairs, begin, size, len(masks))
