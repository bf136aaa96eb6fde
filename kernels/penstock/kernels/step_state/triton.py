"""The same on a GPU: one launch for a step's changes, one for its inputs, one for what it leaves.

    changes      one program a run of at most RUN numbers
    inputs       programs of TOKENS tokens, which look for their requests, then programs of TOKENS requests
    commit       programs of TOKENS requests

A launch depends on numbers of tokens, requests and runs alone, never on lengths, so that one graph serves every step of a shape.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# Triton types a launch without its options, and its loops not at all.

import torch
import triton
import triton.language as tl

from penstock.kernels.dependent_launch import early, wait
from penstock.kernels.step_state.batch import NO_SLOT, PAD_SLOT, RowState, StepInputs, StepRequest, Targets

RUN = 1024
"""Numbers in a run at most."""
TOKENS = 128


@triton.jit(do_not_specialize=["begin"])
def _apply_changes_kernel(page, begin, addresses, RUN: tl.constexpr):
    run = page + begin + tl.program_id(0) * 4
    target, first = tl.load(run), tl.load(run + 1).to(tl.int64)
    length, source = tl.load(run + 2), tl.load(run + 3)
    base = tl.load(addresses + target).to(tl.pointer_type(tl.int32))
    at = tl.arange(0, RUN)
    tl.store(base + first + at, tl.load(page + source + at, at < length, 0), at < length)


def apply_changes(page: torch.Tensor, begin: int, count: int, targets: Targets) -> None:
    """See the reference; a run has at most `RUN` numbers."""
    if count:
        _apply_changes_kernel[(count,)](page, begin, targets.addresses, RUN=RUN, num_warps=4)


@triton.jit(do_not_specialize=["n", "r"])
def _prepare_inputs_kernel(
    rows, query_start_loc, token_ids, num_computed, block_tables, block_sizes, lora_slots,
    input_ids, positions, slot_mapping, token_slots, seq_lens, logits_indices,
    n, r, spare_row, max_model_len, table_stride, group_stride, slot_stride,
    GROUPS: tl.constexpr, STEPS: tl.constexpr, PAD: tl.constexpr, NONE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token_programs = tl.cdiv(n, BLOCK)
    if tl.program_id(0) < token_programs:
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        written = token < n
        # How many requests end at or before the token.
        low = tl.zeros([BLOCK], tl.int32)
        high = tl.zeros([BLOCK], tl.int32) + r
        for _ in range(STEPS):
            searching, middle = low < high, (low + high) // 2
            ended = tl.load(query_start_loc + middle + 1, searching, 0) <= token
            low = tl.where(searching & ended, middle + 1, low)
            high = tl.where(searching & ~ended, middle, high)
        inside = written & (low < r)
        row = tl.load(rows + low, inside, spare_row)
        live = inside & (row != spare_row)
        position = tl.load(num_computed + row, live, 0) + token - tl.load(query_start_loc + low, live, 0)
        position = tl.where(live, position, 0)
        wide = row.to(tl.int64)
        tl.store(input_ids + token, tl.load(token_ids + wide * max_model_len + position, live, 0), written)
        tl.store(positions + token, position.to(tl.int64), written)
        tl.store(token_slots + token, tl.load(lora_slots + row, live, NONE), written)
        for group in tl.static_range(GROUPS):
            size = tl.load(block_sizes + group)
            block = tl.load(block_tables + group * group_stride + wide * table_stride + position // size, live, 0)
            slot = block.to(tl.int64) * size + position % size
            tl.store(slot_mapping + group * slot_stride + token, tl.where(live, slot, PAD), written)
    else:
        request = (tl.program_id(0) - token_programs) * BLOCK + tl.arange(0, BLOCK)
        inside = request < r
        row = tl.load(rows + request, inside, spare_row)
        begin = tl.load(query_start_loc + request, inside, 0)
        end = tl.load(query_start_loc + request + 1, inside, 0)
        live = inside & (row != spare_row)
        length = tl.load(num_computed + row, live, 0) + end - begin
        tl.store(seq_lens + request, tl.where(live, length, 0), inside)
        tl.store(logits_indices + request, tl.maximum(end - 1, 0).to(tl.int64), inside)


def prepare_inputs(step: StepRequest, state: RowState, out: StepInputs) -> None:
    """See the reference."""
    n, r = out.input_ids.shape[0], step.rows.shape[0]
    groups = state.block_tables.shape[0]
    _prepare_inputs_kernel[(triton.cdiv(n, TOKENS) + triton.cdiv(r, TOKENS),)](
        step.rows, step.query_start_loc, state.token_ids, state.num_computed, state.block_tables, state.block_sizes,
        state.lora_slots, out.input_ids, out.positions, out.slot_mapping, out.token_slots, out.seq_lens, out.logits_indices,
        n, r, state.spare_row, state.token_ids.shape[1],
        state.block_tables.stride(1), state.block_tables.stride(0), out.slot_mapping.stride(0),
        GROUPS=groups, STEPS=state.spare_row.bit_length(), PAD=PAD_SLOT, NONE=NO_SLOT, BLOCK=TOKENS,
        **early(state.token_ids.device, overlaps_last=False), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["r"])
def _commit_step_kernel(
    sampled, rows, samples, result, seq_lens, token_ids, num_computed, results,
    r, spare_row, max_model_len, slot_stride,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < r
    row = tl.load(rows + request, inside, spare_row)
    live = inside & (row != spare_row)
    length = tl.load(seq_lens + request, inside, 0)
    token = tl.load(sampled + request * COLUMNS, inside, 0)
    writes = live & (tl.load(samples + request, inside, 0) != 0) & (length < max_model_len)
    tl.store(token_ids + row.to(tl.int64) * max_model_len + length, token, writes)
    tl.store(num_computed + row, length, live)
    left = results + tl.load(result).to(tl.int64) * slot_stride + request * COLUMNS
    for column in tl.static_range(COLUMNS):
        tl.store(left + column, tl.load(sampled + request * COLUMNS + column, inside, 0), inside)


def commit_step(sampled: torch.Tensor, step: StepRequest, inputs: StepInputs, state: RowState, results: torch.Tensor) -> None:
    """See the reference; `sampled` and `results` contiguous."""
    r = step.rows.shape[0]
    _commit_step_kernel[(triton.cdiv(r, TOKENS),)](
        sampled, step.rows, step.samples, step.result, inputs.seq_lens, state.token_ids, state.num_computed, results,
        r, state.spare_row, state.token_ids.shape[1], results.stride(0),
        COLUMNS=results.shape[2], BLOCK=TOKENS, **early(results.device), num_warps=4,
    )  # fmt: skip
