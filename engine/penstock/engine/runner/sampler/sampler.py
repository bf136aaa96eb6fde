"""From a step's logits to its tokens: parameters by request row, which lie on the device, and the launches that read them."""

from typing import Final, NamedTuple

import numpy as np
import torch

from penstock.engine.core.plan import Int32
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling.buffers import Path, SamplingBuffers
from penstock.kernels.sampling.ops import SamplingOps
from penstock.kernels.sampling.params import GREEDY, pack

PATHS: Final = tuple(Path)


class ParamChanges(NamedTuple):
    """Rows whose parameters are to be written to the device."""

    rows: Int32
    """[a], each once."""
    words: Int32
    """[a, WORDS]."""


class Sampler:
    """Sampling parameters of `max_num_seqs` request rows and a spare one for padding, which is greedy.

    Args:
        max_num_seqs: Request rows; the spare row is the one after the last.
        max_logits_rows: Rows of logits at a time at most.
        vocab_size: Logits of a row.
        device: Where they are.
        ops: What runs there.
    """

    def __init__(self, max_num_seqs: int, max_logits_rows: int, vocab_size: int, device: torch.device, ops: SamplingOps) -> None:
        self.ops = ops
        self._host = np.tile(GREEDY, (max_num_seqs + 1, 1))
        self._paths = np.full(max_num_seqs + 1, Path.GREEDY, np.int8)
        self._changed: dict[int, None] = {}
        self.params = torch.from_numpy(self._host.copy()).to(device)
        """[max_num_seqs + 1, WORDS], int32, on the device."""
        self.buffers = SamplingBuffers.allocate(max_logits_rows, vocab_size if ops.tiles else 0, device)

    def admit(self, row: int, params: SamplingParams) -> None:
        """Takes in what a row's new request asks for; the device learns of it with the next changes."""
        self._host[row] = param_words(params)
        self._paths[row] = path_of(params)
        self._changed[row] = None

    def take_changes(self) -> ParamChanges:
        """What has been admitted since the last call, to be staged with the plan's other changes."""
        rows = np.fromiter(self._changed, np.int32, len(self._changed))
        self._changed.clear()
        return ParamChanges(rows, self._host[rows])

    def apply_changes(self) -> None:
        """The same where the device's memory is the host's: writes them at once."""
        if self._changed:
            rows, words = self.take_changes()
            self.params.numpy()[rows] = words

    def path(self, request_rows: Int32) -> Path:
        """The least that serves rows [r], as the host knows them."""
        return PATHS[int(self._paths[request_rows].max(initial=Path.GREEDY))]

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        path: Path = Path.FILTERED,
        masked: bool = False,
        params: torch.Tensor | None = None,
        masks: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Chooses a token a row; a CUDA graph may capture it: launches depend on m, `path` and `masked` alone.

        Args:
            logits: [m, vocab], as the model gave them or as they have been changed.
            rows: [m], int32: request rows.
            positions: [m], int32: in the request, of the token that is chosen.
            path: At least `path` of these rows.
            masked: Whether -inf stands for a token that cannot be chosen; else it is no number.
            params: In place of the rows' own.
            masks: As of `SamplingOps.takes_masks`; None: there are none.

        Returns:
            [m, RESULT], int32: see `Column`; the same memory in every call.
        """
        params = self.params if params is None else params
        given = {} if masks is None else {"masks": masks}
        return self.ops.sample(logits, rows, positions, params, self.buffers, path, masked, **given)


def param_words(params: SamplingParams) -> Int32:
    """A request's row of the table, [WORDS]."""
    return pack(params.seed, 0.0 if params.greedy else params.temperature, params.top_k, params.top_p, params.min_p)


def path_of(params: SamplingParams) -> Path:
    """The least that serves a request."""
    if params.greedy:
        return Path.GREEDY
    return Path.FILTERED if params.top_k > 0 or params.top_p < 1 or params.min_p > 0 else Path.RANDOM
