"""Runs some tokens of an earlier step once more, on a device.

Steps launched since have left what that needs: tokens stay in the row's table, keys and values in its blocks. The rerun writes
nothing there.
"""

from typing import Any

import numpy as np

from penstock.engine.attention.backends.interface import StepLengths
from penstock.engine.attention.backends.phases import AttentionPhases
from penstock.engine.core.plan import Int32, StepPlan
from penstock.engine.runner.device.graphs.step import Loaded
from penstock.engine.runner.device.program import StepProgram, StepShape
from penstock.engine.runner.device.runtime import DeviceRuntime
from penstock.engine.runner.device.uploads import upload
from penstock.engine.runner.not_finite import Again
from penstock.kernels.step_state.batch import PAD_SLOT, StepRequest


def rerun(
    runtime: DeviceRuntime,
    program: StepProgram,
    loaded: Loaded,
    attention: AttentionPhases,
    plan: StepPlan,
    starts: Int32,
    at: list[int],
) -> Again:
    """Prepares the tokens of some requests of a step.

    Args:
        runtime: The device.
        program: Whose rows are run again.
        loaded: What steps run on.
        attention: Told of the run.
        plan: The step's.
        starts: [r]: the first token that the step computed of each of the plan's rows.
        at: Indexes into the plan's rows.
    """
    rows, starts, counts = plan.rows[at], starts[at], plan.num_new_tokens[at]
    state = program.state
    begins = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=begins[1:])
    lengths = StepLengths(rows, begins, starts + counts)
    of = np.repeat(rows, counts).astype(np.int64)
    positions = np.arange(begins[-1]) - np.repeat(begins[:-1] - starts, counts)
    arrays: list[Any] = [rows, begins, lengths.seq_lens, of, positions, of * state.token_ids.shape[1] + positions]
    rows_there, begins_there, seq_lens, of_there, positions_there, places = upload(runtime, *arrays)
    request = StepRequest(rows=rows_there, query_start_loc=begins_there, samples=rows_there, result=rows_there, shared=rows_there)
    shape = StepShape(int(begins[-1]), len(rows), int(counts.max()))
    step = program.step(shape, request, loaded.ops, loaded.kv_caches)
    step.inputs.seq_lens.copy_(seq_lens)
    step.inputs.positions.copy_(positions_there)
    step.inputs.input_ids.copy_(state.token_ids.view(-1).index_select(0, places))
    step.inputs.token_slots.copy_(state.lora_slots.index_select(0, of_there))
    step.inputs.slot_mapping.fill_(PAD_SLOT)
    attention.begin_step(lengths)
    tokens = {index: slice(begins[k], begins[k + 1]) for k, index in enumerate(at)}
    return Again(loaded.model, step.inputs.input_ids, step.inputs.positions, step.ctx, tokens)
