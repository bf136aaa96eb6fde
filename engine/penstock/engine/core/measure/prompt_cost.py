"""What prompts cost by their length. Pure."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

_KEEP: Final = 1 - 1 / 32
"""Weight of what is known beside the next step."""
_APART: Final = 0.01
"""Of a part, in which it must differ from the others over the steps: otherwise nothing tells one from another."""


class PromptCost:
    """Seconds of a step that computes tokens of prompts: some for the step, for each token, and for each that a token attends to.

    The three are fitted to the steps of late by least squares of the relative error, and none is negative. Where the steps do not
    tell them apart, it is the tokens that cost.
    """

    def __init__(self) -> None:
        self._products: NDArray[np.float64] = np.zeros((3, 3))
        self._sums: NDArray[np.float64] = np.zeros(3)
        self._parts: NDArray[np.float64] | None = None

    def observe(self, tokens: int, pairs: float, seconds: float) -> None:
        """Takes in a step of `seconds`.

        Args:
            tokens: Of prompts that it has computed.
            pairs: Of such a token and one that it attends to.
            seconds: That it took.
        """
        parts = np.array((tokens, pairs, 1.0)) / seconds
        self._products = _KEEP * self._products + np.outer(parts, parts)
        self._sums = _KEEP * self._sums + parts
        self._parts = None

    def seconds(self, start: int, tokens: int) -> float | None:
        """Return what a step with `tokens` behind `start` others of a prompt takes; None: unknown."""
        if not self._sums[0]:
            return None
        if self._parts is None:
            self._parts = self._fit()
        return float(self._parts @ (tokens, chunk_pairs(start + tokens, tokens), 1.0))

    def _fit(self) -> NDArray[np.float64]:
        """Seconds of a token, of a pair and of a step."""
        scale = np.sqrt(self._products.diagonal())
        scale[scale == 0] = np.inf
        alike, sums = self._products / np.outer(scale, scale), self._sums / scale
        kept = [0]
        for part in (1, 2):
            others = alike[np.ix_(kept, kept)]
            if alike[part, part] - alike[part, kept] @ np.linalg.solve(others, alike[kept, part]) > _APART:
                kept.append(part)
        found = np.linalg.solve(alike[np.ix_(kept, kept)], sums[kept])
        while found.min() < 0:
            del kept[int(found.argmin())]
            found = np.linalg.solve(alike[np.ix_(kept, kept)], sums[kept])
        parts = np.zeros(3)
        parts[kept] = found / scale[kept]
        return parts


def chunk_pairs(end: int, tokens: int) -> float:
    """Return in how many pairs the last `tokens` of the first `end` of a prompt attend to one."""
    return tokens * (end - (tokens - 1) / 2)
