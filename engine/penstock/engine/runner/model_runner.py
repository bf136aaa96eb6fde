"""Runs the model on one rank on a CPU: what the scheduler plans, the runner executes."""

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, cast

import msgspec
import numpy as np
import torch

from penstock.engine.attention.context import ForwardContext
from penstock.engine.config import EngineConfig, SpeculativeConfig
from penstock.engine.core.memory import Memory, measure_memory
from penstock.engine.core.plan import Admission, Int32, SampleInputs, StepPlan, StepResult
from penstock.engine.core.scheduling.guides import MAX_FORCED_TOKENS
from penstock.engine.models.draft_head import DraftHead
from penstock.engine.models.model import Model, VisionModel
from penstock.engine.multimodal.normalization import normalized
from penstock.engine.multimodal.pixels import Pixels
from penstock.engine.parallel.group import Group
from penstock.engine.runner.base import RunnerBase
from penstock.engine.runner.device.host import HostRuntime
from penstock.engine.runner.draft_head import HeadProposer, TappedModel
from penstock.engine.runner.draft_model import DraftModel
from penstock.engine.runner.draft_sampler import DraftSampler
from penstock.engine.runner.host_memory import return_free_memory
from penstock.engine.runner.images import Images
from penstock.engine.runner.input_batch import InputBatch, StepArrays, StepInputs
from penstock.engine.runner.memory_profile import PeakMemory, peak_activation_bytes
from penstock.engine.runner.not_finite import Again, Suspect
from penstock.engine.runner.own_drafts import OwnDrafts, measure_steps
from penstock.engine.runner.pending import PendingStep
from penstock.engine.runner.pooling import PooledStep, Pooler
from penstock.engine.runner.prompt_logprobs import prompt_rows
from penstock.engine.runner.sampler.custom import load_processors
from penstock.engine.runner.sampler.scores import PromptParts, pairs
from penstock.engine.runner.step_tapes import StepTapes
from penstock.engine.runner.verification import planned_drafts, verify
from penstock.engine.sampling import SamplingParams
from penstock.engine.spec.lookup import lookup_proposer
from penstock.engine.spec.proposer import Proposer
from penstock.kernels.ops import Ops, ops_for
from penstock.kernels.sampling.buffers import RESULT, Column

log = logging.getLogger(__name__)

_NOTHING_SAMPLED = np.zeros((0, RESULT), np.int32)


class ExecuteState(NamedTuple):
    """What `execute` leaves for `sample`."""

    plan: StepPlan
    inputs: StepInputs
    suspect: Suspect
    logits: torch.Tensor | None
    """[m, vocab], float32; None: no row samples."""
    prompts: PromptParts | None
    """Of prompt tokens that requests want scored."""
    pooled: PooledStep | None = None
    """None: the engine generates."""
    drafts: Int32 | None = None
    """[r, K]: as of `planned_drafts`; None: the step has none."""
    transfer_s: tuple[float, float] = (0.0, 0.0)
    """Seconds that stores and loads of pages took."""
    failed: dict[int, str] = {}  # noqa: RUF012 - of a tuple, and nobody writes to it
    """Index into the plan's rows → why that row's images cannot be computed."""
    encoder_s: float = 0.0
    """Seconds that the plan's images took."""


class ModelRunner(RunnerBase[HostRuntime, ExecuteState, StepResult]):
    """Of a CPU: each step is over when `sample` returns."""

    def __init__(self, config: EngineConfig, group: Group | None = None) -> None:
        super().__init__(config, HostRuntime(), group)
        self._tapes: StepTapes | None = None
        self._warm = False
        pooling = config.model.pooling
        scheduler, longest, groups = config.scheduler, config.model.max_model_len, self._layout.groups
        most = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        drafts = max(scheduler.num_speculative_tokens, MAX_FORCED_TOKENS)
        self._arrays = StepArrays(most, scheduler.max_num_seqs, longest, groups, scheduler.max_num_seqs * (1 + drafts))
        self._max_num_tokens, self._states = most, None
        if self._drafter is not None and self._drafter.head is not None:
            self._states = torch.zeros(most, self._drafter.head.states_size, dtype=self._dtype)
        self._proposer: Proposer | None = None
        self._own_drafts: OwnDrafts | None = None
        self._draft_sampler: DraftSampler | None = None
        self._images = Images(self._encode)
        self._pooler = Pooler(pooling.tokens, pooling.size) if pooling is not None else None
        self._reset()

    def _make_ops(self) -> Ops:
        return ops_for(self.config.device, self._dtype, self.config.cpu_isa)

    def _zeroed(self, size: int) -> torch.Tensor:
        # numpy takes zeroed memory from the system, which hands out a page when it is first written; torch would write it all.
        return torch.from_numpy(np.zeros(size, np.uint8))

    def _run(self, plan: StepPlan) -> StepResult:
        self.execute(plan)
        return self.sample(SampleInputs(plan.step_id))

    def _reset(self) -> None:
        super()._reset()
        self._requests = self._new_batch()
        self._images.reset()

    def _new_batch(self) -> InputBatch:
        scheduler, model = self.config.scheduler, self.config.model
        vocab_size = self.decoder_config.vocab_size
        copies, mode = self.runtime, self.config.logprobs_mode
        processors = load_processors(model.logits_processors, copies, scheduler.max_num_seqs, vocab_size)
        groups, most = self._layout.groups, scheduler.max_num_seqs
        return InputBatch(most, model.max_model_len, groups, self._arrays, vocab_size, copies, mode, processors)

    def sleep(self, level: int) -> None:
        """Gives the KV cache's memory back to the system; at level 2 the model's too. Where the weights are in the host's memory
        anyway, level 1 has nowhere to move them and leaves them there."""
        self._drop_pages()
        self._images.forget()
        self._tapes = None
        if isinstance(self._proposer, DraftModel | HeadProposer):
            self._proposer.release()
        if level == 2 and hasattr(self, "model"):
            self._lora.detach()
            del self.model
            if self._drafter is not None:
                del self.draft_model
        return_free_memory()

    def wake_up(self, tags: Sequence[str]) -> None:
        """Allocates again what sleeps, of `commands.TAGS`: an empty KV cache; after level 2 a model with its tables (computed
        again, which gives the same bits) and without weights."""
        if "kv_cache" in tags:
            self.initialize_kv_cache(self._num_blocks)
        if "weights" in tags and not hasattr(self, "model"):
            self.model = self._new_model()
            if self._drafter is not None:
                self._load_draft_model(self._drafter)
        self._bind_drafter()

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """See the base class."""
        self._tapes = None
        super().initialize_kv_cache(num_blocks)

    def reload_weights(self, path: str | None) -> None:
        """See the base class."""
        self._tapes = None
        self._images.forget()
        super().reload_weights(path)
        self._bind_drafter()

    def warm_up(self) -> None:
        """See the base class. From then on steps are what they will be."""
        super().warm_up()
        if self.config.model.images is not None:
            with torch.inference_mode():
                finite = bool(self._encode_blank().isfinite().all())
            if not finite:
                raise RuntimeError("warm-up: an image's embeddings are not finite; are the checkpoint's weights?")
        self._warm = True
        if (config := self.config.speculative) is not None:
            rows, most = self.config.scheduler.max_num_seqs, config.num_speculative_tokens
            fits = min(rows, self.config.scheduler.max_num_batched_tokens // (1 + most))
            self._proposer = self._make_proposer(config)
            self._bind_drafter()
            timings = measure_steps(self._time_decodes, fits, most)
            vocab_size = self.decoder_config.vocab_size
            self._own_drafts = OwnDrafts(config, self._proposer, timings, rows, vocab_size, self._draft_sampler)
            ends = ([it for it in timings if it.drafts == drafts] for drafts in (0, most))
            pairs = zip(*ends, strict=True)
            told = ", ".join(f"{after.seconds / before.seconds:.2f} at {before.rows} requests" for before, after in pairs)
            log.info("steps with %d drafts take, as multiple of those without: %s", most, told)

    def _make_proposer(self, config: SpeculativeConfig) -> Proposer:
        if self._drafter is None:
            return lookup_proposer(config, self.config.cpu_isa)
        groups = self._layer_groups[self.decoder_config.num_layers :], self._layout.groups
        rows, longest, drafts = self.config.scheduler.max_num_seqs, self.config.model.max_model_len, config.num_speculative_tokens
        draws, vocab_size = config.draft_sample_method == "probabilistic", self.decoder_config.vocab_size
        self._draft_sampler = sampler = DraftSampler(rows, vocab_size, draws=draws)
        limits = {"max_num_seqs": rows, "max_model_len": longest, "num_drafts": drafts, "sampler": sampler}
        if self._states is None:
            return DraftModel(self.draft_ops, *groups, max_num_tokens=self._max_num_tokens, **limits)
        return HeadProposer(self.draft_ops, *groups, self._states, hidden_size=self._drafter.config.hidden_size, **limits)

    def _bind_drafter(self) -> None:
        """Gives the proposer its model and cache, once all of them are there."""
        if not self.kv_caches or not hasattr(self, "model") or not hasattr(self, "draft_model"):
            return
        caches, model = self.kv_caches[self.decoder_config.num_layers :], self.draft_model
        if isinstance(self._proposer, HeadProposer):
            head = cast("DraftHead", model)
            head.share(self.model)
            self._proposer.bind(head, caches)
        elif isinstance(self._proposer, DraftModel):
            self._proposer.bind(cast("Model", model), caches)

    def _time_decodes(self, rows: int, drafts: int) -> float:
        """Seconds of a step of so many decodes, each with so many drafts, in the null block."""
        greedy = SamplingParams(max_tokens=1, temperature=0.0)
        plan = self._null_plan(
            [
                Admission(row=row, token_ids=np.zeros(1, np.int32), num_prompt_tokens=1, num_computed_tokens=0, sampling=greedy)
                for row in range(rows)
            ],
            np.full(rows, 1 + drafts, np.int32),
            np.ones(rows, np.bool_),
            np.full(rows, drafts, np.int32),
        )
        assert self._proposer is not None
        for row in range(rows):
            self._proposer.begins(row, 0)
        began = time.perf_counter()
        self.execute(plan)
        assert self._launched is not None
        step, table = self._launched.inputs, self._requests.rows
        self.sample(SampleInputs(plan.step_id))
        table.room[plan.rows] = self.config.model.max_model_len  # the null block takes any position
        self._proposer.follow(table, plan.rows, step, np.full(rows, drafts > 0))
        if drafts:
            self._proposer.propose(table, plan.rows, drafts)
        seconds = time.perf_counter() - began
        self._reset()
        return self._comm.agree(seconds)

    def ceilings(self) -> None:
        """Not measured: a CPU's depend on who else uses it."""

    def measure_memory(self) -> Memory:
        """The rank's part of the host's memory, which all ranks share."""
        return measure_memory().among(self._shard.world)

    def profile_memory(self) -> int:
        """Bytes that the largest step takes beside weights and KV cache, which need not be there yet."""
        scheduler = self.config.scheduler
        self.initialize_kv_cache(1)
        self._reset()
        step = peak_activation_bytes(self._dummy_step, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        return step + self._image_bytes()

    @torch.inference_mode()
    def _image_bytes(self) -> int:
        """What the tower takes for an image, and the embeddings that are kept."""
        if self.config.model.images is None:
            return 0
        with PeakMemory() as memory:
            row = self._encode_blank()[0]
        return memory.peak + row.nbytes * self.config.scheduler.encoder_cache_size

    def _encode_blank(self) -> torch.Tensor:
        """The embeddings of a black image."""
        settings = self.config.model.images
        assert settings is not None
        size = settings.clip.size
        return self._encode(Pixels(size, size, bytes(3 * size * size)))

    def _execute(self, plan: StepPlan) -> ExecuteState:
        """See Turns: the forward pass is over when this returns."""
        self._limit_threads()
        drafts = None
        if self._own_drafts is not None:
            self._own_drafts.apply(plan, self._requests.rows, self._comm.agree(time.perf_counter()))
        if len(plan.num_drafts):
            drafts = planned_drafts(plan, None if self._own_drafts is None else self._own_drafts.drafts)
        inputs = self._requests.apply(plan, drafts)
        self._lora.apply(plan)
        ctx = ForwardContext(self.ops, self.kv_caches, [inputs.groups[number] for number in self._layer_groups])
        self._images.take_in(plan)
        with self._failing(plan):
            seconds = self._transfer(plan)
            began = time.perf_counter()
            self._images.encode(plan)
            encoder_s = time.perf_counter() - began if plan.encoder_runs else 0.0
            given, failed = self._given(plan, inputs)
            suspect = self._not_finite.watch(plan, partial(self._again, plan, inputs, given, ctx))
            state = ExecuteState(
                plan, inputs, suspect, *self._forward(plan, inputs, given, ctx), drafts, seconds, failed, encoder_s
            )
        self._comm.check()
        return state

    def _given(self, plan: StepPlan, inputs: StepInputs) -> tuple[torch.Tensor, dict[int, str]]:
        """What the model reads: token ids, or embeddings where images are; and which rows lack theirs, and why."""
        starts = self._requests.rows.num_computed[plan.rows] - plan.num_new_tokens
        merged, failed = self._images.merge(plan, starts, lambda: self.model.embed(inputs.input_ids))
        return inputs.input_ids if merged is None else merged, failed

    def _encode(self, pixels: Pixels) -> torch.Tensor:
        """An image's embeddings."""
        settings = self.config.model.images
        assert settings is not None, "an image for a model that reads text alone"
        image = torch.from_numpy(normalized(pixels.array(), settings.normalization))
        return cast("VisionModel", self.model).encode_image(image)

    def _again(self, plan: StepPlan, inputs: StepInputs, given: torch.Tensor, ctx: ForwardContext, at: list[int]) -> Again:
        """The whole step once more; it writes the same keys and values to the same places."""
        starts = np.cumsum(plan.num_new_tokens) - plan.num_new_tokens
        tokens = {row: slice(starts[row], starts[row] + plan.num_new_tokens[row]) for row in at}
        return Again(self.model, given, inputs.positions, ctx, tokens)

    def _sample(self, launched: ExecuteState, inputs: SampleInputs) -> StepResult:
        """See Turns: the step is over when this returns."""
        plan, step, suspect, logits, prompts, pooled, drafts, seconds, lacking, encoder_s = launched
        with self._failing(plan):
            sampled, scores, failed, verified = _NOTHING_SAMPLED, None, self._requests.refusals.of(plan) | lacking, None
            if logits is not None:
                choosing = self._requests.choosing(plan, step)
                rows = choosing.rows
                given = logits, torch.from_numpy(rows.request_rows), torch.from_numpy(rows.positions)
                drawn = None if drafts is None or self._own_drafts is None else self._own_drafts.drawn(plan, drafts)
                choice = self._requests.chooser.choose(choosing, *given, inputs, drawn)
                scores, failed, sampled = choice.scores, failed | choice.failed, choice.result.numpy()
                if drafts is None:
                    self._requests.write_sampled(rows, sampled[:, Column.TOKEN])
                else:
                    verified = verify(plan, drafts, sampled)
                    kept = verified.kept.nonzero()[0]
                    self._requests.write_sampled(rows.take(kept), sampled[kept, Column.TOKEN])
                    sampled = verified.judged
            if len(sampled) < len(plan.rows):
                sampled, found = np.zeros((len(plan.rows), RESULT), np.int32), sampled
                sampled[step.sampled_rows[: len(found)]] = found

            result = PendingStep(
                plan=plan,
                runtime=self.runtime,
                suspect=suspect,
                transfer=self.runtime.download(pairs(scores, prompts)),
                sampled=sampled,
                failed=failed,
                scores=scores,
                prompts=prompts,
                vocab_size=self.decoder_config.vocab_size,
                pooled=pooled,
                verified=verified,
            ).result()
            if plan.transfers is not None or plan.encoder_runs:
                result = msgspec.structs.replace(result, transfer_s=seconds, encoder_s=encoder_s)
            if drafts is not None:
                self._requests.rows.reject(plan, result.counts)
            if self._own_drafts is None:
                return result
            goes_on = result.counts > 0
            own = self._own_drafts.propose(plan, step, verified, goes_on, self._requests.rows)
            return result if own is None else msgspec.structs.replace(result, drafts=own)

    def _forward(
        self, plan: StepPlan, inputs: StepInputs, given: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor | None, PromptParts | None, PooledStep | None]:
        """Logits of the rows that sample, and the prompts' scores; or their embeddings. `given`: what the model reads."""
        if self._pooler is not None:
            hidden = self.model.forward(given, inputs.positions, ctx) if len(plan.rows) else torch.empty(0)
            starts = self._requests.rows.num_computed[plan.rows] - plan.num_new_tokens
            return None, None, self._pooler.pool(plan, starts, hidden)
        rows, scored = len(plan.rows), None
        if len(inputs.input_ids) > rows or len(inputs.sampled_rows) < rows:  # decodes alone score no prompt
            scored = prompt_rows(plan, self._requests.rows, self._requests.chooser.prompt_logprobs)
        tapes = self._step_tapes() if scored is None and given is inputs.input_ids else None
        if tapes is not None and (taped := tapes.logits(inputs, ctx)) is not None:
            return (taped if len(inputs.sampled_rows) else None), None, None
        if not rows:
            return None, None, None
        hidden = self._target().forward(given, inputs.positions, ctx)
        return *self._score(
            self._requests.sampler, hidden, inputs.logits_indices if len(inputs.sampled_rows) else None, scored
        ), None

    def _target(self) -> "Model | TappedModel":
        """The model, which leaves its states where a head finds them."""
        head = None if self._drafter is None else self._drafter.head
        return self.model if head is None or self._states is None else TappedModel(self.model, head.aux_layers, self._states)

    def _step_tapes(self) -> StepTapes | None:
        """Where the step can run from a tape: a profile wants to see the parts."""
        if self.ops.tape is None or self._profile is not None or not self._warm:
            return None
        if self._tapes is None:
            self._tapes = StepTapes(self._target(), self.ops)
        return self._tapes
