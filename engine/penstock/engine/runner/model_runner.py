"""Runs the model on one rank: what the scheduler plans, the runner executes."""

import logging
import threading
from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.attention.context import ForwardContext
from penstock.engine.cache.layout import KVLayer, KVLayout, kv_layout
from penstock.engine.config import EngineConfig
from penstock.engine.core.plan import Admission, SampledLogprobs, SampleInputs, StepPlan, StepResult, empty
from penstock.engine.loading.checkpoint import read_json
from penstock.engine.loading.safetensors import load_weights
from penstock.engine.models.build import Build
from penstock.engine.models.config import parse_decoder_config
from penstock.engine.models.layers.linear_method import linear_method
from penstock.engine.models.layers.shard import Shard
from penstock.engine.models.registry import model_class
from penstock.engine.runner.input_batch import InputBatch, StepInputs
from penstock.engine.runner.prompt_logprobs import PromptScores, score_prompts
from penstock.engine.runner.sampler.adjustments import describe_nothing_left
from penstock.engine.runner.sampler.logprobs import gather_logprobs
from penstock.engine.runner.sampler.params import NO_LOGPROBS, SamplingBatch
from penstock.engine.runner.sampler.sampler import describe_not_finite, sample
from penstock.engine.sampling import SamplingParams
from penstock.kernels.ops import ops_for

log = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ExecuteState(NamedTuple):
    """What `execute` leaves for `sample`."""

    plan: StepPlan
    inputs: StepInputs
    logits: torch.Tensor
    """[m, vocab], float32."""
    prompts: PromptScores


class ModelRunner:
    """Weights, KV cache and rows of one rank.

    In order: `load`, `initialize_kv_cache`, `warm_up`; then `execute` and `sample` in turn. One thread at a time.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.decoder_config = parse_decoder_config(read_json(config.model.path / "config.json"))
        self._dtype = _DTYPES[config.model.dtype]
        self._state: ExecuteState | None = None
        self._thread: int | None = None
        self._layout = self._kv_layout()
        self._layer_groups = self._layout.layer_groups
        self._batch = self._new_batch()

    def load(self) -> None:
        """Builds the model and reads its weights; ConfigError where the checkpoint does not fit."""
        self._limit_threads()
        self._ops = ops_for(self.config.device, self._dtype)
        build = Build(
            ops=self._ops,
            linear_method=linear_method(self._dtype),
            dtype=self._dtype,
            max_model_len=self.config.model.max_model_len,
            shard=Shard(rank=0, world=1),
        )
        self.model = model_class(self.config.model.architecture)(self.decoder_config, build)
        with torch.inference_mode():
            load_weights(self.model, self.config.model.path)
            self.model.finish()
        log.info("kernels: %s; threads: %d", self._ops.form, self.config.threads)

    def kv_layout(self) -> KVLayout:
        """How the layers share the cache's pages."""
        return self._layout

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocates the cache, block 0 (the null block) included.

        One page holds a block of all layers of a group, so that a block is one range of bytes wherever it travels; layers see
        strided views.
        """
        layout, config = self._layout, self.decoder_config
        # numpy takes zeroed memory from the system, which hands out a page when it is first written; torch would write it all.
        memory = torch.from_numpy(np.zeros(num_blocks * layout.page_bytes, np.uint8))
        pages = memory.view(self._dtype).view(num_blocks, layout.num_slots, -1)
        self.kv_caches = [pages[:, 0]] * config.num_layers
        for group in layout.groups:
            for slot, layer in enumerate(group.layers):
                shape = (num_blocks, 2, config.num_kv_heads, group.block_size, config.head_size)
                self.kv_caches[layer] = pages[:, slot].view(shape)

    def warm_up(self) -> None:
        """Makes a prompt's step and a decode step for real, in the null block; RuntimeError where the logits are not finite."""
        length = min(self.config.cache.block_size, self.config.model.max_model_len - 1)
        params = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, logprobs=1)
        prompt = Admission(
            row=0, token_ids=np.zeros(length, np.int32), num_prompt_tokens=length, num_computed_tokens=0, sampling=params
        )
        for admissions, count in (([prompt], length), ([], 1)):
            plan = StepPlan(
                step_id=0,
                released=empty(),
                admissions=admissions,
                append_rows=[empty() for _ in self._layout.groups],
                append_blocks=[empty() for _ in self._layout.groups],
                rows=np.zeros(1, np.int32),
                num_new_tokens=np.array([count], np.int32),
                samples=np.ones(1, np.bool_),
            )
            self.execute(plan)
            failed = self.sample(SampleInputs(step_id=0)).failed
            if failed:
                raise RuntimeError(f"warm-up: {failed[0]}; are the checkpoint's weights finite in {self.config.model.dtype}?")
        self._batch = self._new_batch()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Applies a plan and runs the forward pass; `sample` must follow before the next.

        Raises:
            RuntimeError: The last step has not been sampled: its tokens are not there for this one.
        """
        if self._state is not None:
            raise RuntimeError(f"step {plan.step_id}: step {self._state.plan.step_id} has not been sampled yet")
        self._limit_threads()
        inputs = self._batch.apply(plan)
        logits, prompts = torch.empty(0, self.decoder_config.vocab_size), PromptScores()
        if len(plan.rows):
            ctx = ForwardContext(self._ops, self.kv_caches, [inputs.groups[number] for number in self._layer_groups])
            hidden = self.model.forward(inputs.input_ids, inputs.positions, ctx)
            if len(inputs.sampled_rows):
                logits = self.model.compute_logits(hidden[inputs.logits_indices])
            if prompt_rows := self._batch.prompt_rows(plan, inputs):
                prompts = score_prompts(self.model.compute_logits, hidden, prompt_rows)
        self._state = ExecuteState(plan, inputs, logits, prompts)

    @torch.inference_mode()
    def sample(self, inputs: SampleInputs) -> StepResult:
        """Samples the step that `execute` has run and writes the tokens into their rows.

        Raises:
            RuntimeError: No step waits for it, or another one does.
        """
        if self._state is None or self._state.plan.step_id != inputs.step_id:
            waiting = "none" if self._state is None else f"step {self._state.plan.step_id}"
            raise RuntimeError(f"sampling step {inputs.step_id}: {waiting} waits for it")
        (plan, step, logits, prompts), self._state = self._state, None
        token_ids = np.full((len(plan.rows), 1), -1, np.int32)
        failed = self._batch.refused(plan) | prompts.failed
        logprobs = None
        if len(step.sampled_rows):
            not_finite = describe_not_finite(logits)
            # Their own tokens count for nothing; zeros keep them from disturbing what is computed over all rows.
            logits[list(not_finite)] = 0.0
            params = self._batch.sampling_batch(plan, step)
            adjusted = self._batch.adjustments.apply(logits, self._batch.logits_rows(plan, step))
            nothing_left = describe_nothing_left(adjusted) if adjusted is not logits else {}
            adjusted[list(nothing_left)] = 0.0
            failed |= {int(step.sampled_rows[row]): message for row, message in (nothing_left | not_finite).items()}
            tokens = sample(adjusted, params)
            token_ids[step.sampled_rows, 0] = tokens.numpy()
            self._batch.write_sampled(plan, step, token_ids[step.sampled_rows, 0])
            logprobs = _logprobs(logits, tokens, params, step)
        counts = plan.samples.astype(np.int32)
        counts[list(failed)] = 0
        return StepResult(plan.step_id, token_ids, counts, logprobs, failed, prompts.logprobs)

    def _limit_threads(self) -> None:
        """OpenMP counts per calling thread, and an executor may run steps in another thread than the one that loaded."""
        if self._thread != threading.get_ident():
            torch.set_num_threads(self.config.threads)
            self._thread = threading.get_ident()

    def _new_batch(self) -> InputBatch:
        scheduler, model = self.config.scheduler, self.config.model
        return InputBatch(scheduler.max_num_seqs, model.max_model_len, self._layout.groups, self.decoder_config.vocab_size)

    def _kv_layout(self) -> KVLayout:
        config, longest = self.decoder_config, self.config.model.max_model_len
        layers = [
            KVLayer(
                num_kv_heads=config.num_kv_heads,
                head_size=config.head_size,
                dtype_bytes=self._dtype.itemsize,
                # A window over everything is none, and caches prefixes better.
                window=window if window is not None and window < longest else None,
            )
            for window in config.windows
        ]
        return kv_layout(layers, self.config.cache.block_size)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, params: SamplingBatch, step: StepInputs) -> SampledLogprobs | None:
    """Of the rows that asked."""
    asked = (params.logprobs != NO_LOGPROBS).nonzero().squeeze(-1)
    if not asked.numel():
        return None
    found = gather_logprobs(logits[asked], tokens[asked], params.logprobs[asked])
    return SampledLogprobs(
        plan_rows=step.sampled_rows[asked.numpy()],
        sampled=found.sampled.numpy(),
        ranks=found.ranks.numpy().astype(np.int32),
        top_ids=found.top_ids.numpy().astype(np.int32),
        top_logprobs=found.top_logprobs.numpy(),
    )
