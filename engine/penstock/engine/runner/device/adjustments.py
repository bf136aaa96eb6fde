"""What requests ask to be changed in the logits, on a device: the CPU's stages with their state by request row, applied there.

The host knows who asks and where each request stands, and says so in one copy a stage; tokens are read from the device's table,
which has those that were sampled a step ago before the host does. Nothing waits, but processors of one's own: these see the
tokens on the host, at the cost of a wait for the device.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.core.plan import Bool, Int32
from penstock.engine.runner.device.runtime import DeviceRuntime
from penstock.engine.runner.device.uploads import upload
from penstock.engine.runner.sampler.allowed_token_ids import AllowedTokenIds
from penstock.engine.runner.sampler.bad_words import BadWords
from penstock.engine.runner.sampler.custom import GuardedProcessor
from penstock.engine.runner.sampler.logit_bias import LogitBias
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.min_tokens import MinTokens
from penstock.engine.runner.sampler.stage import MASKED
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling.ops import SamplingOps

Int64 = npt.NDArray[np.int64]

_PENALISED_AT_ONCE = 64
"""Rows whose tokens are counted at a time: a number for each token of the vocabulary."""


class Tokens(NamedTuple):
    """Where the tokens of all requests are."""

    device: torch.Tensor
    """[rows, max_model_len], int32: with all that have been sampled."""
    host: Int32
    """The same, without the tokens that are still on their way."""


class DeviceStage(Protocol):
    """As `LogitsStage`, on a device."""

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        """See LogitsStage."""
        ...

    def wants(self, rows: LogitsRows) -> Bool:
        """See LogitsStage."""
        ...

    def change(self, logits: torch.Tensor, at: Int64, rows: LogitsRows, tokens: Tokens) -> None:
        """Changes rows `at`, [k], of [m, vocab], float32 and contiguous, in place; `rows` says what those k stand for."""
        ...


class _Allowed(AllowedTokenIds):
    def __init__(self, runtime: DeviceRuntime, max_num_seqs: int, vocab_size: int) -> None:
        super().__init__(max_num_seqs, vocab_size)
        self._runtime = runtime

    def change(self, logits: torch.Tensor, at: Int64, rows: LogitsRows, tokens: Tokens) -> None:
        del tokens
        owners, allowed = self._allowed.of(rows.request_rows)
        there, places = upload(self._runtime, at, _places(at[owners], allowed, logits))
        kept = logits.view(-1).index_select(0, places)
        logits.index_fill_(0, there, MASKED)
        logits.view(-1).index_copy_(0, places, kept)


class _BadWords(BadWords):
    def __init__(self, runtime: DeviceRuntime, max_num_seqs: int, vocab_size: int) -> None:
        super().__init__(max_num_seqs, vocab_size)
        self._runtime = runtime

    def change(self, logits: torch.Tensor, at: Int64, rows: LogitsRows, tokens: Tokens) -> None:
        owners, words = self._words.of(rows.request_rows)
        long_enough = words["length"] <= rows.num_output_tokens[owners]
        owners, words = owners[long_enough], words[long_enough]
        width = words["prefix"].shape[1]
        columns = (rows.positions[owners, None] + np.arange(-width, 0)).clip(0)
        recent = rows.request_rows[owners, None].astype(np.int64) * tokens.device.shape[1] + columns
        # No token is -1: any will do there.
        before = np.arange(width) < width - words["length"][:, None]
        prefixes = np.where(before, np.int32(-1), words["prefix"])
        recent, prefixes, places = upload(self._runtime, recent, prefixes, _places(at[owners], words["last"], logits))
        found = tokens.device.view(-1).index_select(0, recent.view(-1)).view(prefixes.shape)
        ends = ((found == prefixes) | (prefixes < 0)).all(1)
        # Several words may end in one token.
        limits = torch.where(ends, MASKED, -MASKED)
        logits.view(-1).scatter_reduce_(0, places, limits, "amin")


class _MinTokens(MinTokens):
    def __init__(self, runtime: DeviceRuntime, max_num_seqs: int, vocab_size: int) -> None:
        super().__init__(max_num_seqs, vocab_size)
        self._runtime = runtime

    def change(self, logits: torch.Tensor, at: Int64, rows: LogitsRows, tokens: Tokens) -> None:
        del tokens
        owners, stops = self._stops.of(rows.request_rows)
        (places,) = upload(self._runtime, _places(at[owners], stops, logits))
        logits.view(-1).index_fill_(0, places, MASKED)


class _LogitBias(LogitBias):
    def __init__(self, runtime: DeviceRuntime, max_num_seqs: int, vocab_size: int) -> None:
        super().__init__(max_num_seqs, vocab_size)
        self._runtime = runtime

    def change(self, logits: torch.Tensor, at: Int64, rows: LogitsRows, tokens: Tokens) -> None:
        del tokens
        owners, biases = self._biases.of(rows.request_rows)
        bias = np.ascontiguousarray(biases["bias"])
        places, bias = upload(self._runtime, _places(at[owners], biases["token"], logits), bias)
        logits.view(-1).index_add_(0, places, bias)


class _Own:
    """A processor of one's own; what it is told of the tokens is fetched from the device first."""

    def __init__(self, processor: GuardedProcessor, runtime: DeviceRuntime) -> None:
        self._processor, self._runtime = processor, runtime
        self.admit, self.wants = processor.admit, processor.wants

    def change(self, logits: torch.Tensor, at: Int64, rows: LogitsRows, tokens: Tokens) -> None:
        (there,) = upload(self._runtime, rows.request_rows)
        longest = int(rows.positions.max())
        tokens.host[rows.request_rows, :longest] = tokens.device[:, :longest].index_select(0, there).cpu().numpy()
        known = LogitsRows(rows.request_rows, rows.positions, rows.num_prompt_tokens, tokens.host)
        self._processor.apply(logits, torch.from_numpy(at), known)


class _Penalties:
    """Repetition, frequency and presence penalties, whose counts are made anew in each step."""

    def __init__(self, runtime: DeviceRuntime, ops: SamplingOps, max_num_seqs: int) -> None:
        self._runtime, self._ops = runtime, ops
        self._penalties = np.tile(np.array([1, 0, 0], np.float32), (max_num_seqs, 1))

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        del token_ids, num_prompt_tokens
        self._penalties[row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        return bool((self._penalties[row] != [1, 0, 0]).any())

    def wants(self, rows: LogitsRows) -> Bool:
        return (self._penalties[rows.request_rows] != [1, 0, 0]).any(1)

    def change(self, logits: torch.Tensor, at: Int64, rows: LogitsRows, tokens: Tokens) -> None:
        for start in range(0, len(at), _PENALISED_AT_ONCE):
            part = slice(start, start + _PENALISED_AT_ONCE)
            of, begins, ends = rows.request_rows[part], rows.num_prompt_tokens[part], rows.positions[part]
            there = upload(self._runtime, at[part].astype(np.int32), of, begins, ends, self._penalties[of])
            index, of_device, begins_device, ends_device, penalties = there
            self._ops.penalise(
                logits, index, tokens.device, of_device, begins_device, ends_device, penalties, int(ends.max(initial=0))
            )


class DeviceAdjustments:
    """The stages in the CPU's order. A step none of whose rows asks for any does without all of this.

    Args:
        runtime: The device.
        ops: What runs there.
        max_num_seqs: Request rows.
        vocab_size: Logits of a row.
        tokens: Of all requests.
        processors: Of one's own; those that leave the likeliest token the likeliest wait for `change_invariant`.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        ops: SamplingOps,
        max_num_seqs: int,
        vocab_size: int,
        tokens: Tokens,
        processors: Sequence[GuardedProcessor] = (),
    ) -> None:
        self._processors, self._tokens = processors, tokens
        self._invariant = [_Own(processor, runtime) for processor in processors if processor.argmax_invariant]
        self._stages: tuple[DeviceStage, ...] = (
            _Allowed(runtime, max_num_seqs, vocab_size),
            _BadWords(runtime, max_num_seqs, vocab_size),
            _MinTokens(runtime, max_num_seqs, vocab_size),
            _LogitBias(runtime, max_num_seqs, vocab_size),
            *(_Own(processor, runtime) for processor in processors if not processor.argmax_invariant),
            _Penalties(runtime, ops, max_num_seqs),
        )
        self._asked = np.zeros(max_num_seqs, np.bool_)
        self._asked_invariant = np.zeros(max_num_seqs, np.bool_)

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Takes in a row's new request; arguments as in `LogitsStage.admit`."""
        # Every stage hears of it, so that none keeps what the row's last request asked for.
        asked = [stage.admit(row, token_ids, num_prompt_tokens, params) for stage in self._stages]
        invariant = [stage.admit(row, token_ids, num_prompt_tokens, params) for stage in self._invariant]
        self._asked[row], self._asked_invariant[row] = any(asked), any(invariant) and not params.greedy

    def asked(self, request_rows: Int32) -> bool:
        """Whether any of rows [r] asks for anything."""
        return bool(self._asked[request_rows].any() or self._asked_invariant[request_rows].any())

    def change(self, logits: torch.Tensor, at: Int64, rows: LogitsRows) -> None:
        """Changes logits [m, vocab], float32 and contiguous, in place: its rows `at`, [k], as `rows` asks; masked entries become
        -inf."""
        for stage in self._stages:
            _change(stage, logits, at, rows, self._tokens)

    def invariant(self, rows: LogitsRows) -> Bool:
        """[k]: which rows `change_invariant` is for."""
        return self._asked_invariant[rows.request_rows]

    def change_invariant(self, logits: torch.Tensor, at: Int64, rows: LogitsRows) -> None:
        """The same after temperature and min-p, of rows that are not greedy."""
        for stage in self._invariant:
            _change(stage, logits, at, rows, self._tokens)

    def failures(self, rows: LogitsRows) -> dict[int, str]:
        """Index into the rows → what went wrong in a processor."""
        broken = {row: message for processor in self._processors for row, message in processor.failures.items()}
        return {index: broken[row] for index, row in enumerate(rows.request_rows.tolist()) if row in broken}


def _change(stage: DeviceStage, logits: torch.Tensor, at: Int64, rows: LogitsRows, tokens: Tokens) -> None:
    wanting = np.flatnonzero(stage.wants(rows))
    if len(wanting):
        stage.change(logits, at[wanting], rows.take(wanting), tokens)


def _places(rows: Int64, token_ids: Int32, logits: torch.Tensor) -> Int64:
    """Of tokens [n] in rows [n] of the flat logits."""
    return rows * logits.shape[1] + token_ids
