"""Names the part of the model in which a request's numbers first ceased to be finite, on a device.

Off the path of steps: whoever reads a result with such a request runs its tokens of that step once more, kernel by kernel, and
looks at each part. Behind the steps that have been launched meanwhile, which have left what it needs: tokens stay in the row's
table, keys and values in its blocks, and nothing is written there.
"""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.engine.attention.backends.interface import AttentionBackend, StepLengths
from penstock.engine.core.plan import Int32, Int64, StepPlan
from penstock.engine.runner.device.graphs.step import Loaded
from penstock.engine.runner.device.program import Step, StepProgram, StepShape
from penstock.engine.runner.device.runtime import DeviceRuntime
from penstock.engine.runner.device.uploads import upload
from penstock.engine.runner.not_finite import located, name_first_part
from penstock.kernels.step_state.batch import PAD_SLOT, StepRequest

log = logging.getLogger(__name__)

ELSEWHERE = "not looked for, as the request has lost its blocks since"


class _Requests(NamedTuple):
    """Some of a step's, [k] each."""

    rows: Int32
    starts: Int32
    """The first token that the step computed."""
    counts: Int32
    """Tokens that it computed."""


class Suspect(NamedTuple):
    """A step whose result is still to come."""

    finder: "NotFinite"
    plan: StepPlan
    starts: Int32
    tenants: Int64

    def explain(self, broken: Mapping[int, str]) -> dict[int, str]:
        """Of requests whose logits are not finite, by index into the plan's rows, those that nobody has been told of yet: what is
        wrong, and where it began."""
        return self.finder.explain(self, broken)


class NotFinite:
    """One runner's.

    Args:
        runtime: The device.
        program: Whose rows are run again.
        loaded: What steps run on.
        attention: Told of each run.
        max_num_seqs: Rows.
    """

    def __init__(
        self, runtime: DeviceRuntime, program: StepProgram, loaded: Loaded, attention: AttentionBackend, max_num_seqs: int
    ) -> None:
        self._runtime, self._program, self._loaded, self._attention = runtime, program, loaded, attention
        self._tenants = np.zeros(max_num_seqs, np.int64)
        self._told = np.full(max_num_seqs, -1, np.int64)

    def watch(self, plan: StepPlan, starts: Int32) -> Suspect:
        """Takes in a plan that has been applied; `starts`: the first new token of each of its rows."""
        self._tenants[plan.released] += 1
        return Suspect(self, plan, starts, self._tenants[plan.rows])

    @torch.inference_mode()
    def explain(self, step: Suspect, broken: Mapping[int, str]) -> dict[int, str]:
        """See Suspect."""
        # A step that was in flight when a request broke has it once more.
        fresh = [at for at in broken if self._told[step.plan.rows[at]] != step.tenants[at]]
        self._told[step.plan.rows[fresh]] = step.tenants[fresh]
        there = [at for at in fresh if self._tenants[step.plan.rows[at]] == step.tenants[at]]
        parts = self._looked_for(step, there) if there else {}
        return {at: located(broken[at], parts.get(at, ELSEWHERE)) for at in fresh}

    def _looked_for(self, step: Suspect, at: list[int]) -> dict[int, str]:
        """Whatever goes wrong in the look alone ends nobody: the step that it explains is over."""
        try:
            return self._parts(step, at)
        except Exception as error:
            # A step that has no room says so itself; the look needs more than steps were measured to need.
            if self._runtime.failure(error) is not None and not isinstance(error, torch.OutOfMemoryError):
                raise
            log.exception("where a request's numbers ceased to be finite could not be looked for")
            return dict.fromkeys(at, f"not found: {type(error).__name__}")

    def _parts(self, step: Suspect, at: list[int]) -> dict[int, str]:
        plan = step.plan
        requests = _Requests(plan.rows[at], step.starts[at], plan.num_new_tokens[at])
        with self._runtime.main_stream():
            again, begins = self._again(requests)
            tokens = {index: slice(begins[k], begins[k + 1]) for k, index in enumerate(at)}
            return name_first_part(self._loaded.model, again.inputs.input_ids, again.inputs.positions, again.ctx, tokens)

    def _again(self, requests: _Requests) -> tuple[Step, list[int]]:
        """The tokens of some requests as a step that writes no keys and values, and where each request's begin."""
        rows, starts, counts = requests
        state, loaded = self._program.state, self._loaded
        begins = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=begins[1:])
        lengths = StepLengths(rows, begins, starts + counts)
        of = np.repeat(rows, counts).astype(np.int64)
        positions = np.arange(begins[-1]) - np.repeat(begins[:-1] - starts, counts)
        arrays: list[Any] = [rows, begins, lengths.seq_lens, of, positions, of * state.token_ids.shape[1] + positions]
        there = upload(self._runtime, *arrays)
        rows_there, begins_there, seq_lens, of_there, positions_there, places = there
        request = StepRequest(rows=rows_there, query_start_loc=begins_there, samples=rows_there, result=rows_there)
        shape = StepShape(int(begins[-1]), len(rows), int(counts.max()))
        step = self._program.step(shape, request, loaded.ops, loaded.kv_caches)
        step.inputs.seq_lens.copy_(seq_lens)
        step.inputs.positions.copy_(positions_there)
        step.inputs.input_ids.copy_(state.token_ids.view(-1).index_select(0, places))
        step.inputs.token_slots.copy_(state.lora_slots.index_select(0, of_there))
        step.inputs.slot_mapping.fill_(PAD_SLOT)
        self._attention.begin_step(lengths)
        return step, begins.tolist()
