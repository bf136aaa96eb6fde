"""One request's place in its grammar."""

from collections.abc import Sequence

import numpy as np

from penstock.engine.core.grammar.compiler import Prototype
from penstock.engine.core.grammar.reasoning import Phase, gate_of
from penstock.engine.core.plan import Int32
from penstock.engine.grammar import ReasoningMarkers


class GrammarGuide:
    """A guide, as `scheduling.guides` has it, by a matcher of its own.

    Args:
        prototype: The compiled grammar.
        stop_token_ids: What ends the request.
        eos_token_ids: The model's, which the matcher lets come wherever the grammar may end.
        reasoning: What comes before the answer; None: nothing does.
        forces: Whether tokens without a choice are told, for the runner to verify several in a step.
    """

    def __init__(
        self,
        prototype: Prototype,
        stop_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        reasoning: ReasoningMarkers | None = None,
        *,
        forces: bool = False,
    ) -> None:
        self.num_words = num_words = prototype.num_words
        self.error: str | None = None
        self._forces = forces
        self._matcher = prototype.matcher.deep_copy()
        self._gate = gate_of(reasoning)
        self._stops = frozenset(stop_token_ids) | frozenset(eos_token_ids)
        self._more_stops = _bits(set(stop_token_ids) - set(eos_token_ids), num_words)
        self._no_stops = _bits(set(eos_token_ids) - set(stop_token_ids), num_words)
        self._begin = _bits(() if reasoning is None or reasoning.begin is None else (reasoning.begin,), num_words)
        self._whole = np.empty(prototype.matcher_words, np.int32)

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing can follow."""
        return self._gate.phase is Phase.ANSWER and self.error is None and self._matcher.is_stopped()

    @property
    def is_open(self) -> bool:
        """Whether the answer would be no whole one if it ended here."""
        return not self._matcher.is_accepting()

    def forced(self) -> Sequence[int]:
        """See `Guide`: as the tokenizer writes them. The model may choose others for the same text, which then count."""
        if not self._forces or self._gate.phase is not Phase.ANSWER or self.error is not None or self._matcher.is_stopped():
            return ()
        return self._matcher.compute_ff_tokens()

    def accept(self, token_ids: Sequence[int]) -> None:
        """See `Guide`; a token that the grammar does not allow is an `error`, and so is a mask that could not be made."""
        for token in token_ids:
            self._gate, of_answer = self._gate.take(token)
            if of_answer and self.error is None and not self._matcher.consume_token(token):
                self.error = f"the grammar does not allow token {token}, which was sampled: {self._reason()}"

    def fill(self, masks: Int32, drafts: Sequence[int]) -> None:
        """See `Guide`."""
        gate, advanced = self._gate, 0
        for at, draft in enumerate((*drafts, None)):
            if gate.phase is not Phase.REASONING:
                self._fill(masks[at], gate.phase)
            if draft is None:
                break
            gate, of_answer = gate.take(draft)
            if of_answer and (draft in self._stops or not self._matcher.try_consume_tokens([draft])):
                break
            advanced += of_answer
        if advanced:
            self._matcher.rollback(advanced)

    def _fill(self, mask: Int32, phase: Phase) -> None:
        whole = self._whole if len(self._whole) != len(mask) else mask
        self._matcher.unsafe_compute_mask_ptr(whole.ctypes.data, whole.nbytes)
        if self._matcher.is_error():
            # What is sampled now is not taken: the request fails with the step's result.
            self.error = f"the grammar's limits do not allow a next token to be found: {self._reason()}"
            mask[:] = -1
            return
        if whole is not mask:
            mask[:] = whole[: len(mask)]
        if self._no_stops is not None and (mask & ~self._no_stops).any():
            mask &= ~self._no_stops
        if self._more_stops is not None and self._matcher.is_accepting():
            mask |= self._more_stops
        if self._begin is not None and phase is Phase.OPENING:
            mask |= self._begin

    def _reason(self) -> str:
        return self._matcher.get_error().partition("\n")[0] or "the answer was complete before"


def _bits(token_ids: Sequence[int] | set[int], num_words: int) -> Int32 | None:
    """A mask of these tokens; None where there are none."""
    bits = np.zeros(num_words * 32, np.uint8)
    within = [token for token in token_ids if token < len(bits)]
    bits[within] = 1
    return np.packbits(bits, bitorder="little").view(np.int32) if within else None
