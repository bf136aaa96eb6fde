"""A step on a CPU: its inputs come from the host's rows, and its tokens go there."""

from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.engine.attention.context import ForwardContext
from penstock.engine.core.plan import Int32, StepPlan
from penstock.engine.core.row_table import RowTable
from penstock.engine.models.model import Carry, Model
from penstock.engine.runner.device.host import HostRuntime
from penstock.engine.runner.device.runtime import Transfer
from penstock.engine.runner.input_batch import StepInputs
from penstock.engine.runner.not_finite import Again
from penstock.engine.runner.prompt_logprobs import PromptRows
from penstock.engine.runner.sampler.choice import Choosing
from penstock.kernels.sampling.buffers import RESULT, Column

_NOTHING = np.zeros((0, RESULT), np.int32)
_NOTHING.flags.writeable = False


@dataclass
class HostStep:
    """A step on a CPU."""

    plan: StepPlan
    runtime: HostRuntime
    rows: RowTable
    model: Model
    inputs: StepInputs
    ctx: ForwardContext
    given: torch.Tensor
    """[n] token ids that the model reads, or [n, hidden] embeddings."""
    starts: Int32
    """[r]: the position of each row's first token."""
    asked: PromptRows | None
    """The prompt tokens to score."""
    results: Int32
    """[at least m, RESULT]: where the sampler writes, as the host sees it."""
    transfer_s: tuple[float, float] = (0.0, 0.0)
    """Seconds that stores and loads of pages took."""
    encoder_s: float = 0.0
    """Seconds that the plan's images took."""
    carry: Carry | None = None
    """From the pipeline stage before; None: there is none."""
    sampled: Int32 = field(default_factory=lambda: _NOTHING)
    """[m, RESULT]: what the sampler gave."""

    each_row = False
    graph = None

    def again(self, at: list[int]) -> Again:
        """The whole step once more; it writes the same keys and values to the same places."""
        starts = np.cumsum(self.plan.num_new_tokens) - self.plan.num_new_tokens
        tokens = {row: slice(starts[row], starts[row] + self.plan.num_new_tokens[row]) for row in at}
        return Again(self.model, self.given, self.inputs.positions, self.ctx, tokens, self.carry)

    def chosen(self, choosing: Choosing) -> tuple[torch.Tensor, torch.Tensor]:
        """On the device, the request row and the position of the token that each row of logits chooses."""
        return torch.from_numpy(choosing.rows.request_rows), torch.from_numpy(choosing.rows.positions)

    def keep(self, choosing: Choosing, sampled: torch.Tensor) -> None:
        """See DeviceStep. Tokens after a rejected draft are written, too: the row ends before them."""
        self.sampled, rows = self.results[: sampled.shape[0]], choosing.rows
        token_ids = self.sampled[:, Column.TOKEN]
        # A row whose context is full may sample once more before anybody knows that it ended; that token has no place.
        fits = rows.positions < self.rows.token_ids.shape[1]
        if np.count_nonzero(fits) == len(fits):
            self.rows.write_sampled(rows.request_rows, rows.positions, token_ids)
        else:
            self.rows.write_sampled(rows.request_rows[fits], rows.positions[fits], token_ids[fits])

    def advance(self) -> None:
        """Nothing to do: the host's rows have moved on with the plan."""

    def skip(self) -> None:
        """Likewise."""

    def collect(self, others: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Transfer, Int32]:
        """Begins to copy the results to the host, and other pairs of tensors with them."""
        sampled, count = self.sampled, len(self.plan.rows)
        if not len(self.plan.num_drafts) and len(sampled) < count:
            found, sampled = sampled, np.zeros((count, RESULT), np.int32)
            sampled[self.inputs.sampled_rows[: len(found)]] = found
        return self.runtime.download(others), sampled

    def over(self) -> None:
        """Nothing was pinned."""
