"""One request's place in its grammar."""

from collections.abc import Sequence

import numpy as np

from penstock.engine.core.grammar.libraries import Prototype
from penstock.engine.core.grammar.reasoning import Phase, gate_of
from penstock.engine.core.plan import Int32
from penstock.engine.grammar import ReasoningMarkers

_ALL = -1
"""A word with all bits set."""


class GrammarGuide:
    """A guide, as `scheduling.guides` defines it, with a matcher of its own.

    Args:
        prototype: The compiled grammar.
        stop_token_ids: Tokens that end the request.
        eos_token_ids: The model's EOS tokens, which the matcher allows where the grammar may end.
        reasoning: The reasoning before the answer; None: there is none.
    """

    def __init__(
        self,
        prototype: Prototype,
        stop_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        reasoning: ReasoningMarkers | None = None,
    ) -> None:
        self.num_words = num_words = prototype.num_words
        self.error: str | None = None
        self.matcher = prototype.matcher.copy()
        self._gate, self._batcher = gate_of(reasoning), prototype.batcher
        self.batcher = self._batcher if self._gate.phase is Phase.ANSWER else None
        self._stops = frozenset(stop_token_ids) | frozenset(eos_token_ids)
        self._more_stops = _bits(set(stop_token_ids) - set(eos_token_ids), num_words)
        self._no_stops = _bits(set(eos_token_ids) - set(stop_token_ids), num_words)
        self.adds_stops = self._more_stops is not None
        """Whether `complete` adds tokens that stop the request."""
        self._begin = _bits(() if reasoning is None or reasoning.begin is None else (reasoning.begin,), num_words)

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing can follow."""
        return self._gate.phase is Phase.ANSWER and self.error is None and self.matcher.is_stopped

    @property
    def is_open(self) -> bool:
        """Whether the answer would be no whole one if it ended here."""
        return not self.matcher.is_accepting

    def forced(self) -> Sequence[int]:
        """See `Guide`: as the tokenizer writes them. The model may choose others for the same text, which then count."""
        if self._gate.phase is not Phase.ANSWER or self.error is not None:
            return ()
        return self.matcher.forced()

    def accept(self, token_ids: Sequence[int]) -> None:
        """See `Guide`; a token that the grammar does not allow is an `error`, and so is a mask that could not be made."""
        for token in token_ids:
            if self._gate.phase is not Phase.ANSWER:
                self._gate, of_answer = self._gate.take(token)
                if self._gate.phase is Phase.ANSWER:
                    self.batcher = self._batcher
                if not of_answer:
                    continue
            if self.error is None and not self.matcher.accept(token):
                self._refuse(token)

    def take(self, token_id: int) -> bool:
        """Takes the next token; returns whether the request ends with it."""
        self.accept((token_id,))
        return self.error is not None or self.ended

    def check(self, token_id: int) -> None:
        """After a token with which the matcher has stopped: the request fails where the grammar does not allow it."""
        if self.error is None and self.matcher.error is not None:
            self._refuse(token_id)

    def _refuse(self, token: int) -> None:
        why = self.matcher.error or "the answer was complete before"
        what = "the grammar's limits do not allow to go on after" if _is_limit(why) else "the grammar does not allow"
        self.error = f"{what} token {token}, which was sampled: {why}"

    def fill(self, masks: Int32, drafts: Sequence[int]) -> None:
        """Writes the masks of a step that verifies drafts; the guide stays where it is."""
        gate, advanced = self._gate, 0
        for at, draft in enumerate(drafts):
            if gate.phase is not Phase.REASONING:
                self._fill(masks, at, gate.phase)
            gate, of_answer = gate.take(draft)
            if of_answer and (draft in self._stops or not self.matcher.try_accept(draft)):
                break
            advanced += of_answer
        else:
            if gate.phase is not Phase.REASONING:
                self._fill(masks, len(drafts), gate.phase)
        if advanced:
            self.matcher.rollback(advanced)

    def _fill(self, masks: Int32, at: int, phase: Phase) -> None:
        made, mask = self.matcher.mask(), masks[at]
        mask[:] = made if len(made) == len(mask) else made[: len(mask)]
        self.complete(masks, at)
        if self._begin is not None and phase is Phase.OPENING and self.error is None:
            mask |= self._begin

    def complete(self, masks: Int32, place: int) -> None:
        """Adds the request's stop tokens to a mask that its matcher has written, and takes away EOS tokens that do not stop it.

        Args:
            masks: [m, words]; changed.
            place: Which of the m it is.
        """
        if (error := self.matcher.error) is not None:
            # What is sampled now is not taken: the request fails with the step's result.
            self.error = f"the grammar's limits do not allow a next token to be found: {error}"
            masks[place] = _ALL
            return
        shut = self._no_stops
        if shut is not None and (others := masks[place] & ~shut).any():
            masks[place] = others
        if self._more_stops is not None and self.matcher.is_accepting:
            masks[place] |= self._more_stops


def _is_limit(why: str) -> bool:
    """Whether an error is about the size of what may follow a token, and not about the token."""
    return any(word in why for word in ("max is", "fuel", "limit"))


def _bits(token_ids: Sequence[int] | set[int], num_words: int) -> Int32 | None:
    """A mask of these tokens; None where there are none."""
    bits = np.zeros(num_words * 32, np.uint8)
    within = [token for token in token_ids if token < len(bits)]
    bits[within] = 1
    return np.packbits(bits, bitorder="little").view(np.int32) if within else None
