"""Changes to the rows, the inputs of a step, and what a step leaves: in torch, on any device and without a look at values."""

import torch

from penstock.kernels.step_state.batch import NO_SLOT, PAD_SLOT, RowState, StepInputs, StepRequest, Targets


def apply_changes(page: torch.Tensor, begin: int, count: int, targets: Targets) -> None:
    """Copies runs of numbers to where they belong.

    Args:
        page: [size], int32, on the targets' device.
        begin: Where in it the runs are described, four numbers each: which target, the first element there, how many, and where
            in the page they lie.
        count: Runs; none overlap.
        targets: Changed.
    """
    for target, first, length, source in page[begin : begin + 4 * count].view(-1, 4).tolist():
        targets.tensors[target].view(-1)[first : first + length] = page[source : source + length]


def prepare_inputs(step: StepRequest, state: RowState, out: StepInputs) -> None:
    """Derives a step's inputs.

    Args:
        step: Of the r requests.
        state: As it was left by the steps before.
        out: Of n tokens, those from `query_start_loc[r]` on being padding. Changed.
    """
    starts, last = step.query_start_loc, step.rows.shape[0] - 1
    tokens = torch.arange(out.input_ids.shape[0], dtype=torch.int32, device=step.rows.device)
    request = torch.searchsorted(starts[1:], tokens, right=True)
    inside, request = request <= last, request.clamp(max=last)
    rows = step.rows[request].long()
    live = inside & (rows != state.spare_row)
    positions = torch.where(live, state.num_computed[rows] + tokens - starts[request], 0).long()
    out.positions.copy_(positions)
    out.input_ids.copy_(torch.where(live, state.token_ids[rows, positions], 0))
    out.token_slots.copy_(torch.where(live, state.lora_slots[rows], NO_SLOT))
    for group in range(state.block_tables.shape[0]):
        size = state.block_sizes[group]
        slots = state.block_tables[group][rows, positions // size].long() * size + positions % size
        out.slot_mapping[group].copy_(torch.where(live, slots, PAD_SLOT))
    lengths = state.num_computed[step.rows.long()] + starts[1:] - starts[:-1]
    out.seq_lens.copy_(torch.where(step.rows != state.spare_row, lengths, 0))
    out.logits_indices.copy_((starts[1:] - 1).clamp(min=0))


def commit_step(sampled: torch.Tensor, step: StepRequest, inputs: StepInputs, state: RowState, results: torch.Tensor) -> None:
    """Writes a step's sampled tokens where the next step finds them, moves the rows on, and leaves the host its result.

    Args:
        sampled: [r, c], int32: first a token of the vocabulary, of rows that do not sample as well; then whatever the host is to
            know.
        step: Of the r requests.
        inputs: Derived from it.
        state: Changed. A sampled token beyond `max_model_len` has no place and is left out.
        results: [slots, at least r, c], int32: `sampled` goes to slot `step.result`. Changed.
    """
    rows, tokens = step.rows.long(), sampled[:, 0]
    live = step.rows != state.spare_row
    writes = live & (step.samples != 0) & (inputs.seq_lens < state.token_ids.shape[1])
    # Whoever writes nothing writes 0 to a place of nobody: a row is in a step once, and only padding shares the spare row.
    owners, places = torch.where(writes, rows, state.spare_row), torch.where(writes, inputs.seq_lens.long(), 0)
    state.token_ids[owners, places] = torch.where(writes, tokens, 0)
    state.num_computed[rows] = torch.where(live, inputs.seq_lens, 0)
    at = step.result.long() * results.shape[1] + torch.arange(rows.shape[0], device=rows.device)
    results.view(-1, results.shape[2])[at] = sampled
