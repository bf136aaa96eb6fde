"""Runs the model on one rank: what the scheduler plans, the runner executes."""

import gc
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.engine.attention.context import ForwardContext
from penstock.engine.cache.layout import KVLayer, KVLayout, kv_layout
from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.core.executor import StepFailed
from penstock.engine.core.plan import Admission, Bool, Int32, SampleInputs, StepPlan, StepResult, empty
from penstock.engine.loading.checkpoint import read_json, resolve
from penstock.engine.loading.safetensors import check_weights, load_weights
from penstock.engine.models.build import Build
from penstock.engine.models.config import parse_decoder_config
from penstock.engine.models.layers.linear_method import linear_method
from penstock.engine.models.layers.shard import Shard
from penstock.engine.models.registry import model_class
from penstock.engine.runner.choose import choose
from penstock.engine.runner.host_memory import return_free_memory
from penstock.engine.runner.input_batch import InputBatch, StepInputs
from penstock.engine.runner.memory_profile import peak_activation_bytes
from penstock.engine.runner.not_finite import name_first_part
from penstock.engine.runner.profile import RunnerProfile
from penstock.engine.runner.prompt_logprobs import PromptScores, score_prompts
from penstock.engine.runner.sampler.custom import load_processors
from penstock.engine.sampling import SamplingParams
from penstock.kernels.ops import ops_for

log = logging.getLogger(__name__)

# What asks the most memory of the sampler.
_COSTLY = SamplingParams(
    max_tokens=1, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=20, prompt_logprobs=20, repetition_penalty=1.1
)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ExecuteState(NamedTuple):
    """What `execute` leaves for `sample`."""

    plan: StepPlan
    inputs: StepInputs
    ctx: ForwardContext
    logits: torch.Tensor
    """[m, vocab], float32."""
    prompts: PromptScores


class ModelRunner:
    """Weights, KV cache and rows of one rank.

    In order: `load`, `profile_memory`, `initialize_kv_cache`, `warm_up`; then `execute` and `sample` in turn. One thread at a
    time.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.decoder_config = parse_decoder_config(read_json(config.model.path / "config.json"))
        self._dtype = _DTYPES[config.model.dtype]
        self._state: ExecuteState | None = None
        self._profile: RunnerProfile | None = None
        self._thread: int | None = None
        self._layout = self._kv_layout()
        self._layer_groups = self._layout.layer_groups
        self._batch = self._new_batch()

    def load(self) -> None:
        """Builds the model and reads its weights; ConfigError where the checkpoint does not fit."""
        self._limit_threads()
        self.ops = ops_for(self.config.device, self._dtype)
        self._linear_method = linear_method(self._dtype)
        self.model = self._new_model()
        self._fill(self.config.model.path)
        log.info("kernels: %s; threads: %d", self.ops.form, self.config.threads)

    def sleep(self, level: int) -> None:
        """Gives the KV cache's memory back to the system; at level 2 the model's too. Where the weights are in the host's memory
        anyway, level 1 has nowhere to move them and leaves them there."""
        self.kv_caches = []
        if level == 2 and hasattr(self, "model"):
            del self.model
        return_free_memory()

    def wake_up(self, tags: Sequence[str]) -> None:
        """Allocates again what sleeps, of `messages.TAGS`: an empty KV cache; after level 2 a model with its tables (computed
        again, which gives the same bits) and without weights."""
        if "kv_cache" in tags:
            self.initialize_kv_cache(self._num_blocks)
        if "weights" in tags and not hasattr(self, "model"):
            self.model = self._new_model()

    def reload_weights(self, path: str | None) -> None:
        """Reads the weights again: from `path`, or from where they were read last. The old ones are gone before the new ones
        come, so that there is never memory for both.

        Raises:
            ConfigError: Another architecture, or other tensors; nothing has changed.
        """
        self._limit_threads()
        try:
            folder, fresh = self._check_checkpoint(path)
        except ConfigError:
            raise
        except Exception as error:  # whatever a strange file leads to: the weights that are there stay
            raise ConfigError(f"{path or self._weights_path} cannot be read: {type(error).__name__}: {error}") from error
        self.model = fresh
        return_free_memory()
        self._fill(folder)

    def _check_checkpoint(self, path: str | None) -> tuple[Path, Any]:
        """The folder of weights that fit, and a model to be filled with them; any error where they do not."""
        folder, fresh = self._weights_path if path is None else resolve(path), self._new_model()
        if parse_decoder_config(read_json(folder / "config.json")) != self.decoder_config:
            raise ConfigError(f"{folder}: its config.json describes another model than the one that is served")
        check_weights(fresh, folder)
        return folder, fresh

    @property
    def kernels(self) -> str:
        """Which form of the model's operations runs."""
        return self.ops.form

    def start_profile(self) -> None:
        """Profiles every step from the next one on."""
        self._profile = RunnerProfile(self, self.model, self.decoder_config)

    def stop_profile(self, folder: Path) -> str:
        """Ends the profile that was started; returns the file that it was written to."""
        profile, self._profile = self._profile, None
        if profile is None:
            raise RuntimeError("no profile was started")
        try:
            return str(profile.end(folder))
        finally:
            # A second of steps is tens of megabytes, in cycles that no collection would find for long.
            del profile
            gc.collect()
            return_free_memory()

    def kv_layout(self) -> KVLayout:
        """How the layers share the cache's pages."""
        return self._layout

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocates the cache, block 0 (the null block) included.

        One page holds a block of all layers of a group, so that a block is one range of bytes wherever it travels; layers see
        strided views.
        """
        self._num_blocks = num_blocks
        layout, config = self._layout, self.decoder_config
        # numpy takes zeroed memory from the system, which hands out a page when it is first written; torch would write it all.
        memory = torch.from_numpy(np.zeros(num_blocks * layout.page_bytes, np.uint8))
        pages = memory.view(self._dtype).view(num_blocks, layout.num_slots, -1)
        self.kv_caches = [pages[:, 0]] * config.num_layers
        for group in layout.groups:
            for slot, layer in enumerate(group.layers):
                shape = (num_blocks, 2, config.num_kv_heads, group.block_size, config.head_size)
                self.kv_caches[layer] = pages[:, slot].view(shape)

    def profile_memory(self) -> int:
        """Bytes that the largest step takes beside weights and KV cache, which need not be there yet."""
        scheduler = self.config.scheduler
        self.initialize_kv_cache(1)
        self._batch = self._new_batch()
        return peak_activation_bytes(self._dummy_step, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)

    def _dummy_step(self, num_tokens: int, num_rows: int) -> None:
        """Runs prompts of so many tokens, of which so many rows sample with everything that costs memory, in the null block."""
        rows = max(num_rows, -(-num_tokens // (self.config.model.max_model_len - 1)))
        lengths = np.full(rows, num_tokens // rows, np.int32)
        lengths[: num_tokens % rows] += 1
        admissions = [
            Admission(
                row=row,
                token_ids=np.zeros(length, np.int32),
                num_prompt_tokens=length,
                num_computed_tokens=0,
                sampling=_COSTLY,
            )
            for row, length in enumerate(lengths.tolist())
        ]
        self.execute(self._null_plan(admissions, lengths, samples=np.arange(rows) < num_rows))
        self.sample(SampleInputs(step_id=0))
        self._batch = self._new_batch()

    def warm_up(self) -> None:
        """Makes a prompt's step and a decode step for real, in the null block; RuntimeError where the logits are not finite."""
        length = min(self.config.cache.block_size, self.config.model.max_model_len - 1)
        params = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, logprobs=1)
        prompt = Admission(
            row=0, token_ids=np.zeros(length, np.int32), num_prompt_tokens=length, num_computed_tokens=0, sampling=params
        )
        for admissions, count in (([prompt], length), ([], 1)):
            self.execute(self._null_plan(admissions, np.array([count], np.int32), samples=np.ones(1, np.bool_)))
            failed = self.sample(SampleInputs(step_id=0)).failed
            if failed:
                raise RuntimeError(f"warm-up: {failed[0]}; are the checkpoint's weights finite in {self.config.model.dtype}?")
        self._batch = self._new_batch()

    def _null_plan(self, admissions: list[Admission], num_new_tokens: Int32, samples: Bool) -> StepPlan:
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
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Applies a plan and runs the forward pass; `sample` must follow before the next.

        Raises:
            RuntimeError: The last step has not been sampled: its tokens are not there for this one.
            StepFailed: The forward pass did not get through.
        """
        if self._state is not None:
            raise RuntimeError(f"step {plan.step_id}: step {self._state.plan.step_id} has not been sampled yet")
        self._limit_threads()
        inputs = self._batch.apply(plan)
        ctx = ForwardContext(self.ops, self.kv_caches, [inputs.groups[number] for number in self._layer_groups])
        with _failing(plan):
            self._state = ExecuteState(plan, inputs, ctx, *self._forward(plan, inputs, ctx))

    @torch.inference_mode()
    def sample(self, inputs: SampleInputs) -> StepResult:
        """Samples the step that `execute` has run and writes the tokens into their rows.

        Raises:
            RuntimeError: No step waits for it, or another one does.
            StepFailed: The sampling did not get through.
        """
        if self._state is None or self._state.plan.step_id != inputs.step_id:
            waiting = "none" if self._state is None else f"step {self._state.plan.step_id}"
            raise RuntimeError(f"sampling step {inputs.step_id}: {waiting} waits for it")
        (plan, step, ctx, logits, prompts), self._state = self._state, None
        with _failing(plan):
            token_ids, counts = np.full((len(plan.rows), 1), -1, np.int32), plan.samples.astype(np.int32)
            failed, not_finite, logprobs = self._batch.refused(plan), prompts.not_finite, None
            if len(step.sampled_rows):
                choice = choose(self._batch, plan, step, logits, self.config.logprobs_mode)
                token_ids[step.sampled_rows, 0], logprobs = choice.token_ids, choice.logprobs
                failed, not_finite = failed | choice.failed, not_finite | choice.not_finite
            if not_finite:
                parts = name_first_part(self.model, step, ctx, list(not_finite))
                failed |= {row: f"{message}; the first values that are not: {parts[row]}" for row, message in not_finite.items()}
            counts[list(failed)] = 0
            return StepResult(plan.step_id, token_ids, counts, logprobs, failed, prompts.logprobs, len(not_finite))

    def _forward(self, plan: StepPlan, inputs: StepInputs, ctx: ForwardContext) -> tuple[torch.Tensor, PromptScores]:
        """Logits of the rows that sample, and the prompts' scores."""
        logits, prompts = torch.empty(0, self.decoder_config.vocab_size), PromptScores()
        if len(plan.rows):
            hidden = self.model.forward(inputs.input_ids, inputs.positions, ctx)
            if len(inputs.sampled_rows):
                logits = self.model.compute_logits(hidden[inputs.logits_indices])
            if prompt_rows := self._batch.prompt_rows(plan, inputs):
                raw = self.config.logprobs_mode.endswith("logits")
                prompts = score_prompts(self.model.compute_logits, hidden, prompt_rows, normalised=not raw)
        return logits, prompts

    def _limit_threads(self) -> None:
        """OpenMP counts per calling thread, and an executor may run steps in another thread than the one that loaded."""
        if self._thread != threading.get_ident():
            torch.set_num_threads(self.config.threads)
            self._thread = threading.get_ident()

    def _new_model(self) -> Any:
        """Without weights: their memory is the system's until they are written."""
        build = Build(
            ops=self.ops,
            linear_method=self._linear_method,
            dtype=self._dtype,
            max_model_len=self.config.model.max_model_len,
            shard=Shard(rank=0, world=1),
        )
        return model_class(self.config.model.architecture)(self.decoder_config, build)

    def _fill(self, path: Path) -> None:
        with torch.inference_mode():
            load_weights(self.model, path)
            self.model.finish()
        self._weights_path = path

    def _new_batch(self) -> InputBatch:
        scheduler, model = self.config.scheduler, self.config.model
        vocab_size = self.decoder_config.vocab_size
        processors = load_processors(model.logits_processors, scheduler.max_num_seqs, vocab_size)
        return InputBatch(scheduler.max_num_seqs, model.max_model_len, self._layout.groups, vocab_size, processors)

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


@contextmanager
def _failing(plan: StepPlan) -> Iterator[None]:
    """What goes wrong in here is the step's failure alone: the plan has been applied, and releasing its rows undoes the rest."""
    try:
        yield
    except Exception as error:
        raise StepFailed(f"step {plan.step_id} failed: {type(error).__name__}: {error}") from error
