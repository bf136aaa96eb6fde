"""Runs the model on one rank on a CPU: what the scheduler plans, the runner executes."""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import cast

import msgspec
import numpy as np
import torch

from penstock.engine.attention.context import ForwardContext
from penstock.engine.config import EngineConfig, SpeculativeConfig
from penstock.engine.core.memory import Memory, measure_memory
from penstock.engine.core.plan import NONE, Int32, SampledTokens, SampleInputs, StepPlan, StepResult
from penstock.engine.core.scheduling.guides import MAX_FORCED_TOKENS
from penstock.engine.host_memory import return_free_memory
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.model import Model
from penstock.engine.models.vision.config import Qwen3Config
from penstock.engine.parallel.expert_group import ExpertGroup
from penstock.engine.parallel.group import Group
from penstock.engine.parallel.relay import Relay
from penstock.engine.runner.base import RunnerBase
from penstock.engine.runner.device.host import HostRuntime
from penstock.engine.runner.draft_head import TappedModel
from penstock.engine.runner.draft_model import Sight
from penstock.engine.runner.follower import Follower
from penstock.engine.runner.host_step import HostStep
from penstock.engine.runner.image_positions import ImagePositions
from penstock.engine.runner.images import Images
from penstock.engine.runner.input_batch import MAX_TAPED_TOKENS, StepArrays, StepInputs
from penstock.engine.runner.memory_profile import peak_activation_bytes
from penstock.engine.runner.own_drafts import measured_drafts
from penstock.engine.runner.pending import PendingStep
from penstock.engine.runner.pooling import Pooler
from penstock.engine.runner.prompt_logprobs import PromptRows
from penstock.engine.runner.proposers import Drafter, new_drafter, states_of_target, tapped
from penstock.engine.runner.sampler.sampler import Sampler
from penstock.engine.runner.staged_model import StagedModel
from penstock.engine.runner.step_tapes import StepTapes
from penstock.engine.runner.turns import Forward, Launched
from penstock.engine.runner.verification import PlannedDrafts
from penstock.engine.spec.filling import Filling, to_few_sizes
from penstock.engine.spec.lookup import lookup_proposer
from penstock.engine.spec.proposer import Proposer
from penstock.kernels.ops import Ops, ops_for
from penstock.kernels.prepare_kv.reference import Rotary
from penstock.kernels.sampling.ops import cpu_sampling_ops

log = logging.getLogger(__name__)

_LONG_S = 0.1
"""To record the tape of a step that takes longer adds little to it."""


@dataclass(frozen=True)
class TickingContext(ForwardContext):
    """Of a rank that divides no layer with others: it says at each layer that it has come further."""

    tick: Callable[[], None]

    def attend(
        self,
        layer: Attention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the step's keys and values, then attends."""
        self.tick()
        return super().attend(layer, q, k, v, rotary, out)


class ModelRunner(RunnerBase[HostRuntime, HostStep, StepResult]):
    """Of a CPU: each step is over when `sample` returns."""

    def __init__(self, config: EngineConfig, group: Group | None = None, expert_group: ExpertGroup | None = None) -> None:
        super().__init__(config, HostRuntime(), group, expert_group)
        self._tapes: StepTapes | None = None
        self._warm = False
        pooling = config.model.pooling
        scheduler, longest, groups = config.scheduler, config.model.max_model_len, self._layout.groups
        most = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        drafts = max(scheduler.num_speculative_tokens, MAX_FORCED_TOKENS)
        self._max_logits_rows = scheduler.max_num_seqs * (1 + drafts)
        self._arrays = StepArrays(most, scheduler.max_num_seqs, longest, groups, self._max_logits_rows)
        vocab_size = self.decoder_config.vocab_size
        sampling = cpu_sampling_ops(config.cpu_isa)
        self.sampler = Sampler(scheduler.max_num_seqs, self._max_logits_rows, vocab_size, self.runtime.device, sampling)
        self._results: Int32 = self.sampler.buffers.result.numpy()
        self._max_num_tokens = most
        self._states = states_of_target(self._drafter, most, self._dtype, self.runtime.device)
        self._proposer: Proposer | None = None
        self._drafting: Drafter | None = None
        self._images = Images(config.model.images, lambda: self.model, encodes=self._stage.first)
        self._draft_images: Images | None = None
        if self._drafter is not None and self._drafter.images is not None:
            self._draft_images = Images(self._drafter.images, lambda: cast("Model", self.draft_model))
        self._all_images = [self._images] if self._draft_images is None else [self._images, self._draft_images]
        self._positions = ImagePositions(scheduler.max_num_seqs) if self.decoder_config.ropes[0].sections else None
        self._relay: Relay | None = None
        self._follower: Follower | None = None
        if not self._stage.last:
            self._follower = Follower(scheduler.max_num_seqs, scheduler.num_speculative_tokens)
        self._pooler = Pooler(pooling.tokens, pooling.size) if pooling is not None and self._stage.last else None
        self._reset()

    def load(self) -> None:
        """See the base class. A pipeline stage is connected to those beside it."""
        super().load()
        if (group := self._group) is not None and self._stage.world > 1 and self._relay is None:
            assert self._stage_layers is not None
            vision = self.decoder_config.vision
            deep = len(vision.tower.deep_layers) if isinstance(vision, Qwen3Config) else 0
            parts = 2 + deep + len(self._aux_layers) + self._head_sees
            shape = parts, self._max_num_tokens, self.decoder_config.hidden_size
            aux = sum(layer < self._stage_layers.start for layer in self._aux_layers)
            ends, far = (group.before, group.after), (group.wires.before, group.wires.after)
            self._relay = Relay(self._stage, *ends, shape, self._dtype, self.config.depth, group.timeout, far, aux)

    def _make_ops(self) -> Ops:
        return ops_for(self.config.device, self._dtype, self.config.cpu_isa)

    def _zeroed(self, size: int) -> torch.Tensor:
        # numpy takes zeroed memory from the system, which hands out a page when it is first written; torch would write it all.
        return torch.from_numpy(np.zeros(size, np.uint8))

    def _run(self, plan: StepPlan) -> StepResult:
        with self._alone():
            self.execute(plan)
            return self.sample(SampleInputs(plan.step_id))

    def _alone(self) -> AbstractContextManager[None]:
        """Steps in the null block concern no other stage."""
        return nullcontext() if self._relay is None else self._relay.alone()

    def _reset(self) -> None:
        super()._reset()
        for images in self._all_images:
            images.reset()
        if self._positions is not None:
            self._positions.reset()

    def sleep(self, level: int) -> None:
        """Gives the KV cache's memory back to the system; at level 2 the model's too. Where the weights are in the host's memory
        anyway, level 1 has nowhere to move them and leaves them there."""
        self._drop_pages()
        self._forget_images()
        self._tapes = None
        if self._drafting is not None:
            self._drafting.proposer.release()
        if level == 2 and hasattr(self, "model"):
            self._lora.detach()
            del self.model
            self._share_experts()
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
            self._share_experts()
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
        self._forget_images()
        super().reload_weights(path)
        self._bind_drafter()

    def _forget_images(self) -> None:
        for images in self._all_images:
            images.forget()

    def warm_up(self) -> None:
        """See the base class. From then on steps are what they will be."""
        super().warm_up()
        for images in self._all_images:
            if (found := images.blank()) is not None and not found.isfinite().all():
                raise RuntimeError("warm-up: an image's embeddings are not finite; are the checkpoint's weights?")
        self._warm = True
        if (config := self.config.speculative) is not None and self._stage.last:
            self._proposer = self._make_proposer(config)
            self._bind_drafter()
            fill = to_few_sizes(MAX_TAPED_TOKENS)
            if self._step_tapes() is not None:
                self._record_tapes(config.num_speculative_tokens, fill)
            sizes = self.config.scheduler, self.decoder_config.vocab_size, fill, self._draft_clock
            sampler = None if self._drafting is None else self._drafting.sampler
            self._own_drafts = measured_drafts(config, self._proposer, self._time_decodes, *sizes, sampler)
        if self._exchange is not None:
            self._exchange.open()

    def _record_tapes(self, num_drafts: int, fill: Filling) -> None:
        """Runs a step of each size that steps with drafts are filled up to. Who comes first would otherwise wait for its tape,
        and drafts would seem to cost as much."""
        scheduler, tokens = self.config.scheduler, 2
        while tokens <= min(MAX_TAPED_TOKENS, scheduler.max_num_batched_tokens, scheduler.max_num_seqs * (1 + num_drafts)):
            rows, began = -(-tokens // (1 + num_drafts)), self._clock()
            self._decode_alone(self._null_decodes(rows, tokens - rows))
            self._reset()
            if self._comm.agree(self._clock() - began) > _LONG_S:
                break
            tokens = fill(rows, tokens + 1)

    @torch.inference_mode()
    def serve_others(self) -> None:
        """Takes part in a step of other cores without tokens of its own."""
        assert self._exchange is not None, "only ranks that divide experts have others to serve"
        if self._exchange.begin(0):
            self._exchange.serve()

    def _make_proposer(self, config: SpeculativeConfig) -> Proposer:
        if self._drafter is None:
            return lookup_proposer(config, self.config.cpu_isa)
        scheduler, longest, groups = self.config.scheduler, self.config.model.max_model_len, self._layout.groups
        self._drafting = new_drafter(
            *(self.config, self.decoder_config, self._drafter, self.draft_ops),
            *(self._layer_groups[self.decoder_config.num_layers :], groups),
            lambda most: StepArrays(most, scheduler.max_num_seqs, longest, groups, scheduler.max_num_seqs),
            *(self._states, self.runtime.device),
        )
        return self._drafting.proposer

    def _bind_drafter(self) -> None:
        """Gives the proposer its model and cache, once all of them are there."""
        if self._drafting is not None and self.kv_caches and hasattr(self, "model") and hasattr(self, "draft_model"):
            caches = self.kv_caches[self.decoder_config.num_layers :]
            draft = self._drafter
            sections = draft is not None and draft.config.ropes[0].sections
            sight = Sight(self._draft_images, self._positions if sections else None)
            self._drafting.bind(self.draft_model, self.model, caches, self._following if self._head_sees else None, sight)

    def _following(self, rows: Int32, starts: Int32, counts: Int32, embed: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """What a draft head sees of images; see `Images.following`."""
        carry = None if self._relay is None else self._relay.carry
        return self._images.following(rows, starts, counts, embed, None if carry is None else carry.following)

    def _clock(self) -> float:
        """Of the CPU: who else uses it makes long steps wait more often than short ones, which says nothing of what they cost."""
        return time.process_time()

    def _decode_alone(self, plan: StepPlan) -> StepInputs:
        """Runs a step in the null block, without the other stages of a pipeline."""
        with self._alone():
            self.execute(plan)
            assert self._launched is not None
            inputs = self._launched.step.inputs
            self.sample(SampleInputs(plan.step_id))
        return inputs

    def _time_decodes(self, rows: int, drafts: int) -> float:
        """Seconds of a step of so many decodes in the null block, with so many drafts of all together, which are proposed."""
        plan = self._null_decodes(rows, drafts)
        assert self._proposer is not None
        for row in range(rows):
            self._proposer.begins(row, 0)
        began, table = self._clock(), self._requests.rows
        step = self._decode_alone(plan)
        table.room[plan.rows] = self.config.model.max_model_len  # the null block takes any position
        if drafts:
            self._proposer.follow(table, plan.rows, step.placed, np.ones(rows, np.bool_))
            self._proposer.propose(table, plan.rows, table.num_tokens[plan.rows], -(-drafts // rows))
        seconds = self._clock() - began
        self._reset()
        return self._comm.agree(seconds)

    def ceilings(self) -> None:
        """Not measured: a CPU's depend on who else uses it."""

    def measure_memory(self) -> Memory:
        """The rank's part of the host's memory, which all ranks of all cores share."""
        parallel = self.config.parallel
        return measure_memory().among(len(parallel.local_cores) * (1 if self._group is None else self._group.ranks))

    def profile_memory(self) -> int:
        """Bytes that the largest step takes beside weights and KV cache, which need not be there yet."""
        scheduler = self.config.scheduler
        self.initialize_kv_cache(1)
        self._reset()
        step = peak_activation_bytes(self._dummy_step, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        if self._exchange is not None:
            step += self._exchange.moving_bytes()
        return step + sum(images.bytes(scheduler.encoder_cache_size) for images in self._all_images)

    def _begin(self, plan: StepPlan, starts: Int32, drafts: PlannedDrafts | None, asked: PromptRows | None) -> HostStep:
        """Brings the inputs of a step to the device."""
        requests = self._requests
        if drafts is not None:
            requests.write_drafts(plan, starts, drafts)
        self.sampler.apply_changes()
        inputs = self._arrays.of_plan(plan, requests.rows, starts, drafts)
        self._lora.apply(plan)
        for images in self._all_images:
            images.take_in(plan)
        if self._positions is not None:
            self._positions.take_in(plan)
            if (three := self._positions.apply(plan.rows, starts, plan.num_new_tokens, inputs.positions.numpy())) is not None:
                inputs = dataclasses.replace(inputs, positions=torch.from_numpy(three))
        ends = self._images.ends(plan.rows, starts, plan.num_new_tokens)
        of_layers = inputs.groups.of_layers(self._layer_groups[: self.decoder_config.num_layers], ends)
        scales = self._own_kv_scales
        ctx = ForwardContext(self.ops, self.kv_caches, of_layers, kv_scales=scales)
        if (group := self._group) is not None and group.world == 1:
            group.memory.tick(0)  # a tape says nothing at its layers
            ctx = TickingContext(ctx.ops, ctx.kv_caches, of_layers, partial(group.memory.tick, 0), kv_scales=scales)
        given = self.model, inputs, ctx, inputs.input_ids
        return HostStep(plan, self.runtime, requests.rows, *given, starts, asked, self._results)

    def _forward(self, step: HostStep) -> Forward:
        """See Turns: the forward pass is over when this returns."""
        if self._relay is None or not len(step.plan.rows):
            return self._moved_and_run(step)
        with self._relay.passing(step.plan.step_id):
            return self._moved_and_run(step)

    def _moved_and_run(self, step: HostStep) -> Forward:
        """Encodes images and runs the layers while pages are copied: a stage that fails in any of it tells the next one."""
        copies = self._copies(step.plan)
        try:
            return self._encoded_and_run(step)
        finally:
            if copies is not None:
                step.transfer_s = copies.result()

    def _encoded_and_run(self, step: HostStep) -> Forward:
        plan, inputs = step.plan, step.inputs
        began = time.perf_counter()
        for images in self._all_images:
            images.encode(plan)
        step.encoder_s = time.perf_counter() - began if plan.encoder_runs else 0.0
        tokens = plan.rows, step.starts, plan.num_new_tokens
        merged, failed = self._images.merge(*tokens, lambda: self.model.embed(inputs.input_ids))
        if merged is not None:
            step.given = merged
        if failed and not self._stage.last:
            raise RuntimeError("; ".join(failed.values()))
        found = self._states_of(step)
        return found._replace(failed=failed) if failed else found

    def _states_of(self, step: HostStep) -> Forward:
        """Runs the model, from a tape where there can be one."""
        plan, inputs, ctx, given = step.plan, step.inputs, step.ctx, step.given
        if self._exchange is not None:
            some = self._exchange.begin(len(inputs.input_ids) if len(plan.rows) else 0)
            if some and not len(plan.rows):
                self._exchange.serve()
        if self._pooler is not None and not len(plan.rows):
            return Forward(pooled=self._pooler.pool(plan, step.starts, torch.empty(0)))
        if self._relay is not None:
            return self._stage_states(step, self._relay)
        if self._pooler is not None:
            return Forward(pooled=self._pooler.pool(plan, step.starts, self.model.forward(given, inputs.positions, ctx)))
        samples = len(inputs.sampled_rows) > 0
        tapes = self._step_tapes() if step.asked is None and given is inputs.input_ids else None
        if tapes is not None and (taped := tapes.run(inputs, ctx)) is not None:
            return Forward(taped if samples else None)
        if not len(plan.rows):
            return Forward()
        hidden = self._target().forward(given, inputs.positions, ctx)
        return self._score(hidden, inputs.logits_indices if samples else None, step.asked)

    def _stage_states(self, step: HostStep, relay: Relay) -> Forward:
        """Runs the layers of a pipeline stage."""
        plan, inputs = step.plan, step.inputs
        if not len(plan.rows):
            return Forward()
        step.carry = relay.receive(plan.step_id, len(inputs.input_ids))
        # A tape knows neither the embeddings of images nor what they add to layers.
        plain = step.given is inputs.input_ids and not (step.carry is not None and step.carry.deep)
        tapes = self._step_tapes() if plain and step.asked is None and self._pooler is None and not relay.is_alone else None
        taped = None if tapes is None else tapes.run(inputs, step.ctx)
        samples = len(inputs.sampled_rows) > 0
        model, given = self._staged(relay), (step.given, inputs.positions, step.ctx)
        if not self._stage.last:
            carry = model.advance(*given) if taped is None else model.passed(taped)
            relay.send(plan.step_id, carry._replace(following=self._following_of(step)))
            return Forward()
        if taped is not None:
            return Forward(taped if samples else None)
        hidden = model.forward(*given)
        if self._pooler is not None:
            return Forward(pooled=self._pooler.pool(plan, step.starts, hidden))
        return self._score(hidden, inputs.logits_indices if samples else None, step.asked)

    def _following_of(self, step: HostStep) -> torch.Tensor | None:
        """What a head in the last stage must be told of images; see `Carry`."""
        if not self._head_sees:
            return None
        if not self._stage.first:
            return None if step.carry is None else step.carry.following
        plan, shape = step.plan, (len(step.inputs.input_ids), self.decoder_config.hidden_size)
        nothing = partial(torch.zeros, *shape, dtype=self._dtype)
        return self._images.following(plan.rows, step.starts, plan.num_new_tokens, nothing)

    def _sample(self, launched: Launched[HostStep], inputs: SampleInputs) -> StepResult:
        """See Turns. An earlier stage of a pipeline passes the step on in place of sampling it."""
        if self._follower is None:
            return super()._sample(launched, inputs)
        if self._relay is None or not self._relay.is_alone:
            self._follower.passed(launched.plan, launched.step.starts, launched.suspect)
        return StepResult(launched.plan.step_id, NONE, NONE, encoder_s=launched.step.encoder_s)

    def follow(self, sampled: SampledTokens) -> None:
        """Takes in the tokens of a step that this stage has passed on."""
        assert self._follower is not None, "the last stage has sampled it"
        self._follower.take(sampled, self._requests.rows)

    @property
    def _next_drafts(self) -> Int32 | None:
        return super()._next_drafts if self._follower is None else self._follower.drafts

    def _ended(self, step: HostStep, pending: PendingStep) -> StepResult:
        """See Turns: the step is over, and its tokens are in their rows."""
        plan, own = step.plan, self._own_drafts
        with self._failing(plan):
            result = pending.result()
            if plan.transfers is not None or plan.encoder_runs:
                result = msgspec.structs.replace(result, transfer_s=step.transfer_s, encoder_s=step.encoder_s)
            if own is not None:
                drafts = own.propose(plan, step.inputs.placed, result.counts, self._requests.rows)
                result = result if drafts is None else msgspec.structs.replace(result, drafts=drafts)
            return result

    def _target(self) -> "Model | TappedModel":
        """The model, which leaves its states where a head finds them."""
        return tapped(self.model, self._drafter, self._states, self._stage_layers)

    def _staged(self, relay: Relay) -> StagedModel:
        """The layers of a pipeline stage."""
        assert self._stage_layers is not None
        layers, last = self._stage_layers, self._stage.last
        return StagedModel(self._target(), lambda: relay.carry, layers, self._aux_layers, last=last)

    def _step_tapes(self) -> StepTapes | None:
        """Where the step can run from a tape: a profile wants to see the parts."""
        if self.ops.tape is None or self._profile is not None or not self._warm:
            return None
        if self._exchange is not None:  # sizes follow from what routers choose
            return None
        if self._tapes is None:
            target = self._target() if self._relay is None else self._staged(self._relay)
            self._tapes = StepTapes(target, self.ops, has_logits=self._stage.last)
        return self._tapes
