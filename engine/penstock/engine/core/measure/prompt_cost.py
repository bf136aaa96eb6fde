"""What prompts cost by their length. Pure."""

from typing import Final

_KEEP: Final = 1 - 1 / 32
"""Weight of what is known beside the next step."""
_APART: Final = 0.01
"""Of what two shapes have in common, in which they must differ: otherwise nothing tells the two kinds of work apart."""


class PromptCost:
    """Seconds to compute tokens of prompts: some for each token, and some for each token before it that it attends to.

    Both are fitted to the steps of late by least squares.
    """

    def __init__(self) -> None:
        self._tokens2 = self._pairs2 = self._both = 0.0
        self._tokens_s = self._pairs_s = 0.0

    def observe(self, tokens: int, pairs: float, seconds: float) -> None:
        """Takes in a step of `seconds`.

        Args:
            tokens: Of prompts that it has computed.
            pairs: Of such a token and one that it attends to.
            seconds: That it took.
        """
        self._tokens2 = _KEEP * self._tokens2 + tokens * tokens
        self._pairs2 = _KEEP * self._pairs2 + pairs * pairs
        self._both = _KEEP * self._both + tokens * pairs
        self._tokens_s = _KEEP * self._tokens_s + tokens * seconds
        self._pairs_s = _KEEP * self._pairs_s + pairs * seconds

    def seconds(self, start: int, tokens: int) -> float:
        """Return what it takes to compute `tokens` behind `start` others of a prompt; 0: unknown."""
        each, pair = self._fit()
        return each * tokens + pair * chunk_pairs(start + tokens, tokens)

    def _fit(self) -> tuple[float, float]:
        """Seconds of a token, and of a pair."""
        if not self._tokens2:
            return 0.0, 0.0
        apart = self._tokens2 * self._pairs2 - self._both**2
        alone = self._tokens_s / self._tokens2, 0.0
        if apart <= _APART * self._tokens2 * self._pairs2:
            return alone
        each = (self._tokens_s * self._pairs2 - self._pairs_s * self._both) / apart
        pair = (self._pairs_s * self._tokens2 - self._tokens_s * self._both) / apart
        if pair < 0:
            return alone
        return (each, pair) if each >= 0 else (0.0, self._pairs_s / self._pairs2)


def chunk_pairs(end: int, tokens: int) -> float:
    """Return in how many pairs the last `tokens` of the first `end` of a prompt attend to one."""
    return tokens * (end - (tokens - 1) / 2)
