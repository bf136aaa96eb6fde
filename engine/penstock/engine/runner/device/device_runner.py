"""Runs the model on one rank on a device: the host says what a step consists of, launches it, and does not wait.

What a row's next step needs is on the device before the host knows of it: sampled tokens go into the rows' table there. So a
step is launched as soon as it is planned, and the host waits once, for the results of the oldest.
"""

import gc
import logging
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from penstock.engine.attention.backends.interface import StepLengths
from penstock.engine.config import EngineConfig, SpeculativeConfig
from penstock.engine.core.executor import Pending
from penstock.engine.core.memory import Memory
from penstock.engine.core.plan import Bool, GraphReport, Int32, SampleInputs, StepPlan, StepResult
from penstock.engine.core.scheduling.guides import most_forced
from penstock.engine.loading.loader import Source
from penstock.engine.lora.runner import device_lora_runner
from penstock.engine.models.model import Model
from penstock.engine.roofline import Ceilings
from penstock.engine.runner.base import RunnerBase
from penstock.engine.runner.device.arrays import DeviceArrays
from penstock.engine.runner.device.ceilings import measure_ceilings
from penstock.engine.runner.device.drafts import StepDrafts
from penstock.engine.runner.device.graphs.capture import GraphManager
from penstock.engine.runner.device.graphs.cuda import CudaGraphs
from penstock.engine.runner.device.graphs.descriptor import GraphMode, effective_mode
from penstock.engine.runner.device.graphs.dispatcher import Batch, Dispatch, GraphDispatcher
from penstock.engine.runner.device.graphs.estimate import estimate_graph_bytes
from penstock.engine.runner.device.graphs.runtime import GraphRuntime
from penstock.engine.runner.device.graphs.step import FEW, LOGITS, SERVED_BY, SHARING, VARIANTS, VERIFICATION, CapturableStep
from penstock.engine.runner.device.launched import LaunchedStep, Parts, results_of
from penstock.engine.runner.device.memory import DeviceAccount
from penstock.engine.runner.device.offload import HostCopy
from penstock.engine.runner.device.program import StepBuffers, StepProgram
from penstock.engine.runner.device.proposing import ProposingStep
from penstock.engine.runner.device.rows import new_rows, stage_rows, targets
from penstock.engine.runner.device.runtime import CudaRuntime, DeviceRuntime
from penstock.engine.runner.device.shared_prefix import PrefixSharing
from penstock.engine.runner.device.staging import Staging
from penstock.engine.runner.own_drafts import measured_drafts
from penstock.engine.runner.pending import PendingStep
from penstock.engine.runner.prompt_logprobs import PromptRows
from penstock.engine.runner.proposers import Drafter, new_drafter, states_of_target, tapped
from penstock.engine.runner.sampler.sampler import Sampler
from penstock.engine.runner.turns import Forward
from penstock.engine.runner.verification import PlannedDrafts
from penstock.engine.sampling import SamplingParams
from penstock.engine.spec.filling import to_whole_rows
from penstock.engine.spec.lookup import lookup_proposer
from penstock.engine.spec.proposer import Proposer
from penstock.kernels.ops import Ops, ops_for
from penstock.kernels.paged_attention.launch import attention_steps
from penstock.kernels.prepare_kv.cache_rows import FLOATS_OF_EIGHT_BITS
from penstock.kernels.sampling.ops import SamplingOps, sampling_ops
from penstock.kernels.sampling.params import WORDS
from penstock.kernels.step_state.ops import StepOps, triton_step_ops

log = logging.getLogger(__name__)

GRAPHS_OVER_ESTIMATE = 2
"""How often CUDA graphs may take what was estimated: it comes from what `--gpu-memory-utilization` leaves to others."""


class DeviceForms(NamedTuple):
    """The forms of everything that a step launches."""

    model: Ops
    step: StepOps
    sampling: SamplingOps


class _Tapped:
    """A runner as what graphs are captured of: the model, which leaves its states where a head finds them.

    Args:
        runner: As it is at each step.
    """

    def __init__(self, runner: "DeviceRunner") -> None:
        self._runner = runner

    @property
    def model(self) -> Model:
        return self._runner.target

    @property
    def ops(self) -> Ops:
        return self._runner.ops

    @property
    def kv_caches(self) -> list[torch.Tensor]:
        return self._runner.kv_caches


class DeviceRunner(RunnerBase[DeviceRuntime, LaunchedStep, Pending]):
    """Of a GPU. `sample` returns before the step is over; whoever wants its result waits for it.

    Args:
        config: The engine's.
        runtime: The device; None: the CUDA device.
        forms: What runs there; None: the best there is.
        graphs: What captures; None: CUDA's graphs.
    """

    def __init__(
        self,
        config: EngineConfig,
        runtime: DeviceRuntime | None = None,
        forms: DeviceForms | None = None,
        graphs: GraphRuntime | None = None,
    ) -> None:
        self._graph_runtime: GraphRuntime = CudaGraphs() if graphs is None else graphs
        most = config.scheduler.max_num_seqs
        # One for each request and each of its drafts, and those of forced tokens.
        self._max_logits_rows = most * (1 + config.scheduler.num_speculative_tokens) + most_forced(most)
        super().__init__(config, CudaRuntime() if runtime is None else runtime)
        self._account = DeviceAccount(self.runtime, config.cache)
        self._ceilings: Ceilings | None = None
        self._asleep: HostCopy | None = None
        self._empty = True
        """Whether the model waits for weights, as after sleep at level 2."""
        self._given = forms
        self._proposer: Proposer | None = None
        self._drafting: Drafter | None = None

    def _make_ops(self) -> Ops:
        scheduler, model, device = self.config.scheduler, self.config.model, self.runtime.device
        self.forms = self._given or DeviceForms(ops_for(self.config.device, self._dtype), triton_step_ops(), sampling_ops(device))
        groups, most = self._layout.groups, scheduler.max_num_seqs
        self.state = new_rows(groups, most, model.max_model_len, device)
        self.sampler = Sampler(most, self._max_logits_rows, self.decoder_config.vocab_size, device, self.forms.sampling)
        changing = [*targets(self.state), self.sampler.params]
        self._staging = Staging(self.runtime, self.forms.step, most, self.config.depth, changing)
        scales = self._new_kv_scales()
        self.program = StepProgram(self.forms.step, self.state, self.buffers, groups, self._layer_groups, scales)
        results = results_of(self.buffers.results, self.runtime.pinned(*self.buffers.results.shape))
        self._parts = Parts(self.runtime, self.program, self._staging, results, self, self.attention)
        self._make_graphs()
        self._reset()
        return self.forms.model

    def _new_kv_scales(self) -> torch.Tensor | None:
        """Where steps find the scales of all layers, 1.0 until they are read; None: the cache's dtype has none."""
        if self._kv_dtype not in FLOATS_OF_EIGHT_BITS:
            return None
        return torch.ones(self.decoder_config.num_layers, 2, self._kv_heads().size, device=self.runtime.device)

    def _make_graphs(self) -> None:
        tokens = len(self.buffers.inputs.input_ids)
        self._states = states_of_target(self._drafter, tokens, self._dtype, self.runtime.device)
        graphs, most, lora = self.config.graphs, self.config.scheduler.max_num_seqs, self.config.lora is not None
        length = self._max_decode_tokens
        mode, why = effective_mode(graphs.mode, self.attention.graph_support, length)
        if why is not None:
            log.warning("--cudagraph-mode %s becomes %s: %s", graphs.mode, mode, why)
        self._sharing = PrefixSharing.of(self.attention.decode, self._layout.groups)
        self._capturable = CapturableStep(_Tapped(self), self.program, self._staging, self.sampler, self.runtime)
        lens: dict[Hashable, int] = {VERIFICATION: length} if length > 1 else {}
        self.dispatcher = GraphDispatcher(mode, graphs.capture_sizes, most, lens, SERVED_BY)
        self.graphs = GraphManager(
            *(self.runtime, self._graph_runtime, self._capturable, self.dispatcher),
            lora=lora,
            variants=(*VARIANTS, *lens),
            sharing=SHARING if self._sharing else None,
            few=FEW,
        )

    def _make_lora(self) -> Any:
        scheduler, groups = self.config.scheduler, self._layout.groups
        # Padding of a step of few tokens may go beyond the most that are planned.
        tokens = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        most, slots = scheduler.max_num_seqs, self.config.depth + 1
        self.buffers = StepBuffers(tokens, most, self._max_logits_rows, len(groups), slots, self.runtime.device)
        return device_lora_runner(self.config.lora, scheduler.max_num_seqs, self.buffers.lora, self.runtime.pinned)

    def _uploader(self) -> DeviceRuntime:
        return self.runtime

    def _to_fill(self) -> Model:
        """The model itself: there may be no room for another."""
        return self.model

    def _adopt(self, model: Model) -> None:
        self._empty = True
        super()._adopt(model)

    def _fill(self, source: Source) -> None:
        self._empty = True
        super()._fill(source)
        if (scales := self.program.kv_scales) is not None:
            with self.runtime.main_stream():
                scales.fill_(1.0) if self._own_kv_scales is None else scales.copy_(torch.stack(self._own_kv_scales))
        self._empty = False

    def _zeroed(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.runtime.device)

    def _run(self, plan: StepPlan) -> StepResult:
        self.execute(plan)
        return self.sample(SampleInputs(plan.step_id)).result()

    def _device_tokens(self) -> torch.Tensor:
        return self.state.token_ids

    def load(self) -> None:
        """See RunnerBase. The ceilings are measured first, while there is room for it."""
        if self.runtime.device.type == "cuda":
            self._ceilings = measure_ceilings(self.runtime, self._dtype)
        super().load()

    def sleep(self, level: int) -> None:
        """Gives the KV cache's memory back to the device, and the model's: at level 1 the weights go to the host's, at level 2
        nowhere."""
        self.graphs.clear()
        self._capturable.forget()
        self._drop_pages()
        if self._drafting is not None:
            self._drafting.proposer.release()
            if hasattr(self, "draft_model"):
                del self.draft_model
        if level == 1 and self._asleep is None and hasattr(self, "model"):
            self._asleep = HostCopy(self.runtime, self.model)
        elif level == 2:
            self._asleep, self._empty = None, True
            if hasattr(self, "model"):
                self._lora.detach()
                del self.model
        gc.collect()
        self.runtime.return_free_memory()

    def wake_up(self, tags: Sequence[str]) -> None:
        """Allocates again what sleeps, of `commands.TAGS`: the model with its weights, or after level 2 without; the cache."""
        if "weights" in tags and self._asleep is not None:
            with self.runtime.main_stream():
                self._asleep.restore()
            self._asleep = None
        elif "weights" in tags and not hasattr(self, "model"):
            self._adopt(self._new_model())
        if "weights" in tags and self._drafter is not None and not hasattr(self, "draft_model"):
            # It is small beside the model, and read again.
            self._load_draft_model(self._drafter)
        if "kv_cache" in tags:
            self.initialize_kv_cache(self._num_blocks)
        self._bind_drafter()
        self._capture_first()

    def reload_weights(self, path: str | None) -> None:
        """See RunnerBase. The new weights come where the old ones are, so that graphs stay what they are."""
        super().reload_weights(path)
        self._bind_drafter()
        self._capture_first()

    def warm_up(self) -> None:
        """Makes the first steps, as every runner does. Then runs each kind of step that has attention kernels of its own, and
        captures the graphs that are to be there before the first request."""
        super().warm_up()
        scheduler, longest = self.config.scheduler, self.config.model.max_model_len - 1
        with self.dispatcher.profile():
            for lengths in attention_steps(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, longest):
                self.run_null_step(
                    np.array(lengths, np.int32), np.ones(len(lengths), np.bool_), SamplingParams(max_tokens=1, temperature=0.0)
                )
        self._capture_first()
        if (config := self.config.speculative) is not None:
            self._proposer = self._make_proposer(config)
            self._bind_drafter()
            fill = to_whole_rows(config.num_speculative_tokens, self.dispatcher.most_tokens(VERIFICATION))
            sizes = scheduler, self.decoder_config.vocab_size, fill, self._draft_clock
            sampler = None if self._drafting is None else self._drafting.sampler
            self._own_drafts = measured_drafts(config, self._proposer, self._time_decodes, *sizes, sampler, apart=True)

    def _make_proposer(self, config: SpeculativeConfig) -> Proposer:
        if self._drafter is None:
            return lookup_proposer(config, self.config.cpu_isa)
        rows, longest, groups = self.config.scheduler.max_num_seqs, self.config.model.max_model_len, self._layout.groups
        on_device = self.runtime, self.state.block_tables, self.draft_attention
        self._drafting = new_drafter(
            *(self.config, self.decoder_config, self._drafter, self.draft_ops),
            *(self._layer_groups[self.decoder_config.num_layers :], groups),
            lambda most: DeviceArrays(most, rows, longest, groups, *on_device),
            *(self._states, self.runtime.device),
        )
        return self._drafting.proposer

    def _bind_drafter(self) -> None:
        """Gives the proposer its model and cache, once all of them are there."""
        if self._drafting is not None and self.kv_caches and hasattr(self, "model") and hasattr(self, "draft_model"):
            self._drafting.bind(self.draft_model, self.model, self.kv_caches[self.decoder_config.num_layers :])

    @property
    def target(self) -> Model:
        """The model, which leaves its states where a head finds them."""
        return cast("Model", tapped(self.model, self._drafter, self._states))

    @torch.inference_mode()
    def _time_decodes(self, rows: int, drafts: int) -> float:
        """Seconds of a step of so many decodes in the null block, with so many drafts of all together, which are proposed."""
        assert self._proposer is not None
        plan, table = self._null_decodes(rows, drafts), self._requests.rows
        for row in range(rows):
            self._proposer.begins(row, 0)
        began = self._clock()
        self.execute(plan)
        self.sample(SampleInputs(plan.step_id)).result()
        table.room[plan.rows] = self.config.model.max_model_len  # the null block takes any position
        if drafts:
            with self.runtime.main_stream():
                if self._drafting is not None:
                    placed = self._drafting.arrays.place(table, plan.rows, np.zeros(rows, np.int32), plan.num_new_tokens)
                    self._proposer.follow(table, plan.rows, placed, np.ones(rows, np.bool_))
                self._proposer.propose(table, plan.rows, table.num_tokens[plan.rows], -(-drafts // rows))
        seconds = self._clock() - began
        self._reset()
        return seconds

    def capture_graph(self) -> GraphReport | None:
        """See Runner: this device has no graphs."""
        if self.dispatcher.mode == "NONE":
            return None
        self._limit_threads()
        self.graphs.capture_next()
        return self.graphs.report()

    def _capture_first(self) -> None:
        if self.kv_caches and self._asleep is None and not self._empty:
            self.graphs.capture_first()

    def ceilings(self) -> Ceilings | None:
        """What the device can do."""
        return self._ceilings

    def profile_memory(self) -> int:
        """Bytes that the largest step takes beside weights and KV cache, which need not be there yet: it is run."""
        scheduler = self.config.scheduler
        self.initialize_kv_cache(1)
        with self.dispatcher.profile():
            most = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
            drafts = self._max_logits_rows // scheduler.max_num_seqs - 1
            peak = self._account.peak_of(lambda: self._dummy_step(*most, num_drafts=drafts))
        self._step_bytes = peak
        return peak + self._draft_bytes()

    def _draft_bytes(self) -> int:
        """What drafts that are drawn keep of their distributions, if each row has as many as it may."""
        config, most = self.config.speculative, self.config.scheduler.max_num_seqs
        if config is None or config.draft_sample_method != "probabilistic":
            return 0
        return 4 * most * config.num_speculative_tokens * self.decoder_config.vocab_size

    def measure_memory(self) -> Memory:
        """The device's."""
        tokens, layers = self.config.scheduler.max_num_batched_tokens, self.decoder_config.num_layers
        kinds = {
            "num_variants": len(VARIANTS),
            "lora": self.config.lora is not None,
            "max_num_seqs": self.config.scheduler.max_num_seqs,
            "logits_row_bytes": self.decoder_config.vocab_size * self._dtype.itemsize,
            "verifies": self.config.scheduler.num_speculative_tokens > 0,
            "shares": self._sharing is not None,
        }
        graphs = estimate_graph_bytes(self.config.graphs, layers, self._step_bytes, tokens, **kinds)
        self.graphs.max_bytes = GRAPHS_OVER_ESTIMATE * graphs
        return self._account.measure(graphs)

    # --- a step ---

    def _begin(self, plan: StepPlan, starts: Int32, drafts: PlannedDrafts | None, asked: PromptRows | None) -> LaunchedStep:
        """See Turns: in one copy."""
        self._write_inputs(plan, starts, drafts)
        tokens = int(plan.num_new_tokens.sum())
        found, shared, step = *self._dispatch(plan, tokens, asked), None
        rows, begins, samples = self._padded(plan, found)
        slot = self._staging.send(rows, begins, samples, shared)
        judged = None if drafts is None else StepDrafts.of_plan(self.runtime, plan, drafts)
        if len(plan.rows):
            if found.mode is GraphMode.FULL:
                step = self._capturable.replayed(found.descriptor)
            else:
                self.attention.begin_step(StepLengths(plan.rows, begins, starts + plan.num_new_tokens))
                step = self._capturable.at(found.descriptor, len(rows), int(plan.num_new_tokens.max()))
        return LaunchedStep(plan, self._parts, slot, step, found, judged, starts, asked, tokens)

    def _forward(self, step: LaunchedStep) -> Forward:
        """See Turns: launches the model, in graphs where there are any, and does not wait."""
        found, running, drafts = step.found, step.step, step.drafts
        if running is None:
            return Forward()
        if found.mode is GraphMode.FULL:
            logits = self.graphs.replay_full(found.descriptor)
            return Forward(logits if drafts is None else logits[: len(drafts.of)], sampled=step.whole)
        if found.mode is GraphMode.PIECEWISE:
            self.program.prepare(running)
            hidden = self.graphs.replay_forward(found.descriptor)
        else:
            hidden = self.program.forward(running, self.target)
        indices = running.inputs.logits_indices if drafts is None else drafts.logits_indices
        return self._score(hidden, indices if step.plan.samples.any() else None, step.asked)

    def _ended(self, step: LaunchedStep, pending: PendingStep) -> Pending:
        """See Turns: the result is on its way."""
        if self._own_drafts is None:
            return pending
        arrays = None if self._drafting is None else self._drafting.arrays
        return ProposingStep(pending, self._own_drafts, step.starts, arrays)

    def _dispatch(self, plan: StepPlan, tokens: int, asked: PromptRows | None) -> tuple[Dispatch, int]:
        """How the step of so many tokens is launched, given the prompt tokens that it scores, and how many tokens its requests
        share. A step in which some requests have fewer drafts than others needs rows of logits that no full graph leaves."""
        reqs = len(plan.rows)
        uniform = 1 if tokens == reqs else None
        path = self._requests.chooser.plain(plan.rows[plan.samples])
        variant: Hashable = LOGITS if path is None else path
        if asked is not None or len(plan.num_drafts):
            variant = "hidden states"  # which no whole step leaves
        most = self.config.scheduler.num_speculative_tokens
        if asked is None and len(plan.num_drafts) and (plan.num_drafts == most).all() and plan.samples.all():
            # No request has more tokens, if they have just so many together.
            uniform, variant = (1 + most, VERIFICATION) if tokens == reqs * (1 + most) else (None, variant)
        shared = self._sharing.tokens(plan, self._requests.rows) if self._sharing and uniform == 1 else 0
        batch = Batch(tokens, reqs, uniform, self._lora.is_used(plan), variant, shared > 0)
        return self.dispatcher.dispatch(batch), shared

    def _padded(self, plan: StepPlan, found: Dispatch) -> tuple[Int32, Int32, Bool]:
        """The plan's rows, where each one's tokens begin, and which sample; with the requests of nobody that a full graph has."""
        rows, counts, samples = plan.rows, plan.num_new_tokens, plan.samples
        missing = (found.descriptor.num_reqs or len(rows)) - len(rows) if found.mode is GraphMode.FULL else 0
        if missing:
            rows = np.append(rows, np.full(missing, self.state.spare_row, np.int32))
            counts = np.append(counts, np.full(missing, found.descriptor.uniform_query_len or 0, np.int32))
            samples = np.append(samples, np.zeros(missing, np.bool_))
        starts = np.zeros(len(rows) + 1, np.int32)
        counts.cumsum(out=starts[1:])
        return rows, starts, samples

    def _write_inputs(self, plan: StepPlan, starts: Int32, drafts: PlannedDrafts | None) -> None:
        """What the device must learn of the plan beside its rows."""
        changes = self._staging.changes
        stage_rows(changes, plan, self._requests.rows, self.state)
        if drafts is not None:
            rows, positions, tokens = self._requests.write_drafts(plan, starts, drafts)
            changes.scatter(self.state.token_ids, rows * np.int32(self.state.token_ids.shape[1]) + positions, tokens)
        if plan.admissions:
            for row, words in zip(*self.sampler.take_changes(), strict=True):
                changes.write(self.sampler.params, int(row) * WORDS, words)
        self._lora.apply(plan)
