"""What the rows of a step's logits stand for, for stages that look at a request's tokens."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.engine.core.plan import Int32
from penstock.engine.runner.sampler.row_lists import spread


@dataclass(frozen=True)
class LogitsRows:
    """m choices of a token; a request may have several."""

    request_rows: Int32
    """[m]: which request each belongs to."""
    positions: Int32
    """[m]: in the request, of the token that is chosen."""
    num_prompt_tokens: Int32
    """[m]."""
    token_ids: Int32
    """[rows, max_model_len]: the tokens of all requests, by request row; a choice depends on those before its position."""

    @property
    def num_output_tokens(self) -> Int32:
        """[m]: tokens generated before this one."""
        return self.positions - self.num_prompt_tokens

    def tokens(self, begin: Int32) -> tuple[npt.NDArray[np.int64], Int32]:
        """The tokens from position `begin`, [m], to the one that is chosen, one row's after the other.

        Returns:
            [n]: to which of the m each belongs; and [n]: the tokens.
        """
        owners, places = spread(self.positions - begin)
        return owners, self.token_ids[self.request_rows[owners], begin[owners] + places]

    def take(self, at: npt.NDArray[np.int64]) -> "LogitsRows":
        """Those at some indexes, [k]."""
        return LogitsRows(self.request_rows[at], self.positions[at], self.num_prompt_tokens[at], self.token_ids)
