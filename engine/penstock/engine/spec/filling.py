"""How steps with drafts are filled up with guesses: steps of few sizes run from few tapes or graphs."""

from collections.abc import Callable
from typing import Final

_SIZES: Final = 8
"""Of filled steps up to so many tokens, all; above, four for each power of two."""

Filling = Callable[[int, int], int]
"""Rows and tokens of a step with drafts → the tokens that it is filled up to with guesses."""


def unfilled(rows: int, tokens: int) -> int:
    """No more than there are."""
    del rows
    return tokens


def to_few_sizes(most: int) -> Filling:
    """A few more tokens, up to `most`."""

    def fill(rows: int, tokens: int) -> int:
        del rows
        if tokens <= _SIZES or tokens > most:
            return tokens
        apart = 1 << ((tokens - 1).bit_length() - _SIZES.bit_length() + 1)
        return -(-tokens // apart) * apart

    return fill


def to_whole_rows(drafts: int, most: int) -> Filling:
    """So many drafts of each row, up to `most` tokens: a device has graphs of such steps alone."""

    def fill(rows: int, tokens: int) -> int:
        whole = rows * (1 + drafts)
        return whole if whole <= most else tokens

    return fill
