"""Logits processors of one's own: classes that `--logits-processors module:Class` names, each kept from harming anybody but the
request that it fails for."""

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

import numpy as np
import torch

from penstock.engine.config import ConfigError
from penstock.engine.core.plan import Bool, Int32, Int64
from penstock.engine.runner.device.runtime import Copies
from penstock.engine.runner.device.uploads import upload
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.stage import MASKED, Tokens
from penstock.engine.sampling import SamplingParams

_log = logging.getLogger(__name__)


class LogitsProcessor(Protocol):
    """What such a class has. Its constructor takes `max_num_seqs` and `vocab_size`; it keeps what it likes by request row.

    A row's outcome must be a function of its own logits, parameters and tokens.
    """

    argmax_invariant: bool
    """Whether the likeliest token always stays the likeliest. Then only rows that are not greedy pass, after temperature and
    before top-k; else all rows pass, after logit_bias and before the penalties."""

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        """Takes in a row's new request, in place of the last one's; says whether it is to be applied to it.

        Args:
            row: The request's row, below `max_num_seqs`.
            token_ids: [n]: all tokens known, the prompt and, after a preemption, output.
            num_prompt_tokens: How many of them are the prompt's.
            params: What the request asks for; `params.extra_args` holds its `vllm_xargs`.
        """
        ...

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Changes the logits of the rows that asked.

        Args:
            logits: [k, vocab], float32; -inf where masked. May be changed; what is masked stays masked.
            rows: What they stand for: request rows, positions, and all tokens before those.

        Returns:
            [k, vocab], float32, without NaN and +inf.
        """
        ...


class GuardedProcessor:
    """A processor as a stage, whose exceptions and unfit values are errors of the requests that they concern.

    Args:
        processor: What is guarded.
        name: As the flag has it, for messages.
        runtime: The device.
        max_num_seqs: Request rows.
    """

    def __init__(self, processor: LogitsProcessor, name: str, runtime: Copies, max_num_seqs: int) -> None:
        self.argmax_invariant = bool(processor.argmax_invariant)
        self.failures: dict[int, str] = {}
        """Request row → what went wrong, until the row's next admission."""
        self._processor, self._name, self._runtime = processor, name, runtime
        self._asked = np.zeros(max_num_seqs, np.bool_)

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        self.failures.pop(row, None)
        self._asked[row] = False
        try:
            self._asked[row] = self._processor.admit(row, token_ids, num_prompt_tokens, params)
        except Exception as error:  # noqa: BLE001 (a plug-in may raise anything)
            self._fail(row, error)
        return bool(self._asked[row])

    def wants(self, rows: LogitsRows) -> Bool:
        return self._asked[rows.request_rows]

    def apply(self, logits: torch.Tensor, at: Int64, rows: LogitsRows, positions: torch.Tensor, tokens: Tokens) -> None:
        del positions
        if not self._runtime.shares_memory:
            # The one stage that waits for the device: a processor sees the tokens on the host.
            (there,) = upload(self._runtime, rows.request_rows)
            longest = int(rows.positions.max())
            tokens.host[rows.request_rows, :longest] = tokens.device[:, :longest].index_select(0, there).cpu().numpy()
        self._pass(logits, torch.from_numpy(at), rows._replace(token_ids=tokens.host))

    def _pass(self, logits: torch.Tensor, at: torch.Tensor, rows: LogitsRows) -> None:
        try:
            changed = self._processor.apply(logits[at], rows)
            self._check(changed, len(at), logits.shape[1])
        except Exception as error:  # noqa: BLE001 (as above)
            if len(at) == 1:
                self._fail(int(rows.request_rows[0]), error)
                return
            # Whose error it is shows when each passes alone.
            for place in range(len(at)):
                self._pass(logits, at[place : place + 1], rows.take(np.array([place])))
            return
        # On the host, wherever the logits are.
        unfit = (changed.isnan() | changed.isposinf()).any(-1).cpu()
        masked = logits[at].isneginf()
        logits[at[~unfit]] = changed.masked_fill(masked, MASKED)[~unfit]
        for row in rows.request_rows[unfit.numpy()].tolist():
            self._fail(row, ValueError("apply returned NaN or infinity"))

    def _check(self, changed: torch.Tensor, count: int, vocab_size: int) -> None:
        if changed.shape != (count, vocab_size) or changed.dtype != torch.float32:
            raise ValueError(f"apply returned {changed.dtype} {list(changed.shape)}, not float32 {[count, vocab_size]}")

    def _fail(self, row: int, error: Exception) -> None:
        _log.error("the logits processor %s failed", self._name, exc_info=error)
        self._asked[row] = False
        self.failures[row] = f"the logits processor {self._name} failed: {type(error).__name__}: {error}"


def load_processors(names: Sequence[str], runtime: Copies, max_num_seqs: int, vocab_size: int) -> list[GuardedProcessor]:
    """Imports and makes the processors; ConfigError, naming the flag, where one cannot be had."""
    return [GuardedProcessor(_load(name, max_num_seqs, vocab_size), name, runtime, max_num_seqs) for name in names]


def _load(name: str, max_num_seqs: int, vocab_size: int) -> LogitsProcessor:
    module, separator, attribute = name.partition(":")
    if not separator:
        raise ConfigError(f"--logits-processors {name}: expected module:Class")
    try:
        processor = getattr(import_module(module), attribute)(max_num_seqs, vocab_size)
    except Exception as error:
        raise ConfigError(f"--logits-processors {name}: {type(error).__name__}: {error}") from error
    missing = [what for what in ("argmax_invariant", "admit", "apply") if not hasattr(processor, what)]
    if missing:
        raise ConfigError(f"--logits-processors {name} lacks {', '.join(missing)}")
    return processor
