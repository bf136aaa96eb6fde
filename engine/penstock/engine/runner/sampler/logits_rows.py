"""What the rows of a step's logits stand for, for stages that look at a request's tokens."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.engine.core.plan import Int32
from penstock.engine.runner.sampler.row_lists import spread


class LogitsRows(NamedTuple):
    """m choices of a token; a request may have several."""

    request_rows: Int32
    """[m]: which request each belongs to."""
    positions: Int32
    """[m]: in the request, of the token that is chosen."""
    prompt_lengths: Int32
    """[rows]: tokens of all requests' prompts, by request row."""
    token_ids: Int32
    """[rows, max_model_len]: the tokens of all requests, by request row; a choice depends on those before its position."""

    @property
    def num_prompt_tokens(self) -> Int32:
        """[m]."""
        return self.prompt_lengths[self.request_rows]

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
        return self._replace(request_rows=self.request_rows[at], positions=self.positions[at])
