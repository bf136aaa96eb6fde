"""Steps in the null block, whose content nobody reads: to warm up, and to measure what a step takes."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from penstock.engine.cache.layout import KVLayout
from penstock.engine.config import EngineConfig
from penstock.engine.core.plan import NONE, Admission, Bool, Int32, StepPlan, StepResult, empty
from penstock.engine.sampling import SamplingParams

# What asks the most memory of the sampler.
_COSTLY = SamplingParams(
    max_tokens=1, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=20, prompt_logprobs=20, repetition_penalty=1.1
)


class NullSteps(ABC):
    """A part of every runner, which runs steps for nobody."""

    config: EngineConfig
    _layout: KVLayout
    _lora: Any

    @abstractmethod
    def _run(self, plan: StepPlan) -> StepResult:
        """A step from its plan to its result."""

    @abstractmethod
    def _reset(self) -> None:
        """No row has a request."""

    def _dummy_step(self, num_tokens: int, num_rows: int, num_drafts: int = 0) -> None:
        """Runs prompts of so many tokens, of which so many rows sample with everything that costs memory, in the null block. No
        more tokens than all rows can have between them. So many of a row's last tokens count as drafts, if it has more."""
        longest = self.config.model.max_model_len - 1
        num_tokens = min(num_tokens, self.config.scheduler.max_num_seqs * longest)
        rows = max(num_rows, -(-num_tokens // longest))
        lengths = np.full(rows, num_tokens // rows, np.int32)
        lengths[: num_tokens % rows] += 1
        samples = np.arange(rows) < num_rows
        drafts = np.where(samples & (lengths > num_drafts), np.int32(num_drafts), np.int32(0)) if num_drafts else NONE
        self.run_null_step(lengths, samples, _COSTLY, drafts)

    def run_null_step(self, lengths: Int32, samples: Bool, sampling: SamplingParams, num_drafts: Int32 = NONE) -> None:
        """Runs prompts in the null block, and forgets them.

        Args:
            lengths: [r]: tokens of each.
            samples: [r]: whether it samples.
            sampling: Of all of them.
            num_drafts: [r]: how many of its tokens count as drafts; NONE: none do.
        """
        admissions = [
            Admission(
                row=row,
                token_ids=np.zeros(length, np.int32),
                num_prompt_tokens=length,
                num_computed_tokens=0,
                sampling=sampling,
                lora_slot=self._lora.dummy_slot,
            )
            for row, length in enumerate(lengths.tolist())
        ]
        self._run(self._null_plan(admissions, lengths, samples, num_drafts))
        self._reset()

    def _null_decodes(self, rows: int, drafts: int) -> StepPlan:
        """A step of so many greedy decodes with so many drafts of all together, in the null block."""
        greedy, token = SamplingParams(max_tokens=1, temperature=0.0), np.zeros(1, np.int32)
        admissions = [
            Admission(row=row, token_ids=token, num_prompt_tokens=1, num_computed_tokens=0, sampling=greedy)
            for row in range(rows)
        ]
        each = drafts // rows + (np.arange(rows) < drafts % rows).astype(np.int32)
        return self._null_plan(admissions, 1 + each, np.ones(rows, np.bool_), each if drafts else NONE)

    def warm_up(self) -> None:
        """Makes a prompt's step and a decode step for real, in the null block; RuntimeError where what comes of them is not
        finite."""
        self._reset()  # a row keeps the blocks of whoever was in it
        config = self.config
        length = min(config.cache.block_size, config.model.max_model_len - 1, config.scheduler.max_num_batched_tokens)
        params = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, logprobs=1)
        prompt = Admission(
            row=0, token_ids=np.zeros(length, np.int32), num_prompt_tokens=length, num_computed_tokens=0, sampling=params
        )
        # An embedding ends with its prompt.
        decodes = [] if config.model.pooling is not None else [(list[Admission](), 1)]
        for admissions, count in ([prompt], length), *decodes:
            failed = self._run(self._null_plan(admissions, np.array([count], np.int32), samples=np.ones(1, np.bool_))).failed
            if failed:
                raise RuntimeError(f"warm-up: {failed[0]}; are the checkpoint's weights finite in {self.config.model.dtype}?")
        self._reset()

    def _null_plan(self, admissions: list[Admission], num_new_tokens: Int32, samples: Bool, num_drafts: Int32 = NONE) -> StepPlan:
        """Of the first rows, whose blocks all are the null block."""
        return StepPlan(
            step_id=0,
            released=empty(),
            admissions=admissions,
            append_rows=[empty() for _ in self._layout.groups],
            append_blocks=[empty() for _ in self._layout.groups],
            rows=np.arange(len(num_new_tokens), dtype=np.int32),
            num_new_tokens=num_new_tokens,
            samples=samples,
            num_drafts=num_drafts,
        )
