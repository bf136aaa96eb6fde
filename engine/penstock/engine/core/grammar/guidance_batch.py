"""Many matchers of llguidance at once: few of Python's operations for each, and several threads where there are enough."""

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


class GuidanceBatcher:
    """A `Batcher` of guides whose matchers are llguidance's.

    Args:
        eos_token_ids: The model's.
    """

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        bits: dict[int, int] = {}
        for token in eos_token_ids:
            bits[token // 32] = bits.get(token // 32, 0) | 1 << token % 32
        self._eos = [(word, np.uint32(of).view(np.int32)) for word, of in bits.items()]
        self._executor: LLExecutor | None = None

    def batch(self, guides: "Sequence[GrammarGuide]") -> "GuidanceBatch":
        """A batch of guides that are all in their answers, [m]."""
        return GuidanceBatch(self, guides)

    def ends(self, masks: Int32) -> list[int]:
        """Which of some masks, [m, words], may allow an EOS token. The mask of a matcher that has failed allows those alone."""
        words, found = masks.shape[1], list[int]()
        if not any(word < words for word, _ in self._eos):
            return list(range(len(masks)))
        for word, bits in self._eos:
            if word < words:
                found += (masks[:, word] & bits).nonzero()[0].tolist()
        return found

    def executor(self) -> "LLExecutor":
        """The library's threads."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(min(max((os.cpu_count() or 1) // 2, 1), _MAX_THREADS))
        return self._executor


class GuidanceBatch:
    """A `GuideBatch`.

    Args:
        batcher: Whose it is.
        guides: All of them in their answers.
    """

    def __init__(self, batcher: GuidanceBatcher, guides: "Sequence[GrammarGuide]") -> None:
        self._batcher, self._guides = batcher, guides
        matchers: list[GuidanceMatcher] = [guide.matcher for guide in guides]  # pyright: ignore[reportAssignmentType]
        self._inner, self._num_words = [matcher.inner for matcher in matchers], matchers[0].num_words
        # To find a method of a matcher takes as long as some of them do.
        self._compute = [matcher.compute for matcher in matchers]
        self._consume = [matcher.consume for matcher in matchers]
        self._stopped = [matcher.stopped for matcher in matchers]
        self._forced = [matcher.forced for matcher in matchers]
        self._adds_stops = [at for at, guide in enumerate(guides) if guide.adds_stops]

    def fill(self, masks: Int32) -> None:
        """Writes the masks of the next tokens, [m, words], whole."""
        words = masks.shape[1]
        if words == self._num_words:
            self._fill(masks)
        else:  # the tokenizer has more tokens than the model has logits
            wide = np.empty((len(masks), self._num_words), np.int32)
            self._fill(wide)
            masks[:] = wide[:, :words]
        # Inside an answer there is nothing to do, which is cheaper to see than to do.
        if some := self._batcher.ends(masks) + self._adds_stops:
            for at in set(some):
                self._guides[at].complete(masks, at)

    def _fill(self, masks: Int32) -> None:
        # numpy's `ctypes.data` takes longer than most masks.
        at, size = masks.__array_interface__["data"][0], masks.strides[0]
        if len(masks) >= PARALLEL_MASKS:
            pairs = [(matcher, place) for place, matcher in enumerate(self._inner)]
            self._batcher.executor().unsafe_compute_mask_ptr(pairs, at, size, len(masks))
            return
        for compute in self._compute:
            compute(at, size)
            at += size

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """Advances each by a token, [m]; returns which of the answers are complete or have failed."""
        for consume, token in zip(self._consume, token_ids, strict=True):
            consume(token)
        # A matcher that has refused its token is stopped, too.
        ends = [at for at, stopped in enumerate(self._stopped) if stopped()]
        for at in ends:
            self._guides[at].check(token_ids[at])
        return ends

    def forced(self) -> list[Sequence[int]]:
        """What must come next of each, as far as there is no choice."""
        return [forced() for forced in self._forced]
