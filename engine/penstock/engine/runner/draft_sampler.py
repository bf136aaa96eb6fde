"""How a draft model or a head chooses its drafts: the likeliest token, or one drawn at the request's own temperature."""

import numpy as np
import torch

from penstock.engine.core.plan import Bool, Int32
from penstock.engine.runner.sampler.sampler import param_words
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling.params import GREEDY
from penstock.kernels.sampling.rejection import draw_drafts


class DraftSampler:
    """Remembers what drafts were drawn from, until they are verified.

    Requests that are greedy, or whose client has given a seed, get the likeliest token: their tokens must not depend on drafts.

    Args:
        max_num_seqs: Rows.
        vocab_size: The target's.
        device: Where the logits of drafts are.
        draws: Whether drafts are drawn at all.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device, *, draws: bool) -> None:
        self._vocab_size, self._device, self._may_draw = vocab_size, device, draws
        self._params = np.tile(GREEDY, (max_num_seqs, 1))
        self.draws: Bool = np.zeros(max_num_seqs, np.bool_)
        """[rows]: whether the request's drafts are drawn."""
        self._left: dict[int, dict[int, torch.Tensor]] = {}
        """Row → place among its drafts → logits of the target's vocabulary, as of `draw_drafts`."""

    def admit(self, row: int, params: SamplingParams) -> None:
        """Another request has the row."""
        self._params[row] = param_words(params)
        self.draws[row] = self._may_draw and not params.greedy and not params.seeded

    def release(self, row: int) -> None:
        """Its request has left."""
        self._left.pop(row, None)

    def choose(
        self, logits: torch.Tensor, rows: Int32, positions: Int32, place: int, vocabulary: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A draft for each row.

        Args:
            logits: [m, draft vocabulary].
            rows: [m].
            positions: [m]: in the request, of the token that is drafted.
            place: Of this draft among the row's, from 0.
            vocabulary: [draft vocabulary], int64: the target's ids; None: the same.

        Returns:
            [m], int32: ids of the target, on the device.
        """
        # A CPU finds the greatest of 16 bits each more slowly than it widens them.
        chosen, at = logits.float().argmax(dim=-1), np.flatnonzero(self.draws[rows])
        if len(at):
            of = rows[at]
            index, *given = (torch.from_numpy(array).to(self._device) for array in (at, of, positions[at], self._params))
            drawn, left = draw_drafts(logits[index], *given)
            chosen[index] = drawn
            if vocabulary is not None:
                left = left.new_full((len(at), self._vocab_size), float("-inf")).index_copy_(1, vocabulary, left)
            for row, one in zip(of.tolist(), left, strict=True):
                self._left.setdefault(row, {})[place] = one
        return (chosen if vocabulary is None else vocabulary[chosen]).to(torch.int32)

    def left_of(self, rows: Int32, places: Int32) -> torch.Tensor:
        """[d, vocab]: what the drafts in these places, [d], of these rows, [d], were drawn from: logits, -inf for what could not
        come."""
        return torch.stack([self._left[row][place] for row, place in zip(rows.tolist(), places.tolist(), strict=True)])
