"""What runners on every device do alike: the model, its weights and adapters, and what is asked of the sampler."""

import dataclasses
import gc
import logging
import threading
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from penstock.engine.attention.backends.interface import AttentionNeeds
from penstock.engine.attention.backends.phases import AttentionPhases
from penstock.engine.attention.backends.registry import choose_attention
from penstock.engine.cache.layout import kv_layout
from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.core.executor import AdapterRead
from penstock.engine.core.plan import GraphReport, SampledTokens
from penstock.engine.host_memory import large_blocks_apart, return_free_memory
from penstock.engine.loading.checkpoint import packed_modules, resolve
from penstock.engine.loading.json_files import read_object
from penstock.engine.loading.loader import Source, check, fill
from penstock.engine.loading.pooling import read_pooling
from penstock.engine.loading.stream import Uploader
from penstock.engine.lora.runner import lora_runner
from penstock.engine.models.build import Build
from penstock.engine.models.config import DecoderConfig, parse_decoder_config
from penstock.engine.models.cost import stage_sizes
from penstock.engine.models.draft_head import DraftHead
from penstock.engine.models.heads import draft_head
from penstock.engine.models.kv import kv_layers
from penstock.engine.models.layers.comm import Comm, OneRank
from penstock.engine.models.layers.linear_choice import linear_method
from penstock.engine.models.layers.linear_method import CPU, DeviceLinearMethod, LinearMethodFactory
from penstock.engine.models.layers.shard import Shard, Span, Stage
from penstock.engine.models.model import Model
from penstock.engine.models.moe import MoeForCausalLM
from penstock.engine.models.registry import model_class
from penstock.engine.parallel.expert_exchange import ExpertExchange
from penstock.engine.parallel.expert_group import ExpertGroup
from penstock.engine.parallel.group import Group
from penstock.engine.quant.checkpoint import stored, warn_of_ignored
from penstock.engine.quant.kv_scales import KVScales, read_kv_scales
from penstock.engine.quant.online import quantized
from penstock.engine.quant.parse.config import parse_quantization
from penstock.engine.runner.kv_pages import KVPages
from penstock.engine.runner.not_finite import NotFinite
from penstock.engine.runner.null_steps import NullSteps
from penstock.engine.runner.profile import RunnerProfile
from penstock.engine.runner.prompt_logprobs import PromptRows
from penstock.engine.runner.requests import Requests
from penstock.engine.runner.sampler.custom import load_processors
from penstock.engine.runner.sampler.sampler import Sampler
from penstock.engine.runner.sampler.scores import score_prompts
from penstock.engine.runner.turns import Forward, Runtime, Sampled, Step, Turns
from penstock.engine.spec.checkpoint import DraftCheckpoint
from penstock.engine.stats import ExpertStats
from penstock.kernels.ops import Ops
from penstock.kernels.prepare_kv.cache_rows import FLOATS_OF_EIGHT_BITS

log = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class RunnerBase(Turns[Runtime, Step, Sampled], KVPages, NullSteps):
    """Weights, KV cache and rows of one rank.

    In order: `load`, `profile_memory`, `initialize_kv_cache`, `warm_up`; then `execute` and `sample` in turn. One thread at a
    time. Steps are in `turns.py`, the cache and pages that leave it in `kv_pages.py`, and steps for nobody in `null_steps.py`.
    """

    sampler: Sampler
    """Of the same rows."""

    def __init__(
        self, config: EngineConfig, runtime: Runtime, group: Group | None = None, expert_group: ExpertGroup | None = None
    ) -> None:
        super().__init__(runtime)
        self.config = config
        self._expert_group = expert_group
        self._exchange: ExpertExchange | None = None
        self._group = group
        self._comm: Comm = OneRank()
        self._shard = Shard() if group is None else Shard(group.rank, group.world)
        self._stage = Stage() if group is None else group.stage
        self.decoder_config = parse_decoder_config(read_object(config.model.path / "config.json"))
        self._dtype = _DTYPES[config.model.dtype]
        self._profile: RunnerProfile | None = None
        self._thread: int | None = None
        heads, model = self._shard.kv_heads(self.decoder_config.num_kv_heads).size, config.model
        kv_dtype = model.kv_dtype or model.dtype
        self._kv_layers = kv_layers(self.decoder_config, heads, kv_dtype, model.max_model_len)
        all_heads = self.decoder_config.num_kv_heads
        self._whole_kv_layers = kv_layers(self.decoder_config, all_heads, kv_dtype, model.max_model_len)
        self._same_pages = self._shard.replicas(1 if self.decoder_config.latent else self.decoder_config.num_kv_heads)
        self._kv_dtype: torch.dtype = getattr(torch, self._kv_layers[0].planes[0].dtype)
        drafter = DraftCheckpoint.read(config.speculative, model)
        if drafter is not None:
            whole = drafter.config.num_kv_heads
            drafts = kv_layers(drafter.config, whole, kv_dtype, model.max_model_len)
            self._kv_layers += drafts
            self._whole_kv_layers += drafts
        self._drafter = drafter if self._stage.last else None
        """Where tokens are sampled, and their states are."""
        head = None if drafter is None else drafter.head
        self._aux_layers = () if head is None else head.aux_layers
        fits = head is not None and head.decoder.hidden_size == self.decoder_config.hidden_size
        self._head_sees = fits and model.images is not None
        """Whether a draft head reads the embeddings of images: those of its own width."""
        whole = kv_layout(self._kv_layers, config.cache.block_size)
        self._layer_groups = whole.layer_groups
        self._stage_layers = self._layers_of_stage(drafter)
        self._layout = whole if self._stage_layers is None else whole.part(self._kept_layers(self._stage_layers))
        self._lora = self._make_lora()

    # --- what differs ---

    def _make_lora(self) -> Any:
        """What this rank does about adapters."""
        scheduler = self.config.scheduler
        tokens = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        return lora_runner(self.config.lora, scheduler.max_num_seqs, tokens)

    def _layers_of_stage(self, drafter: DraftCheckpoint | None) -> range | None:
        """The layers of a pipeline stage; None: all of them."""
        if self._stage.world == 1:
            return None
        model = self.config.model
        drafts = 0.0 if drafter is None else drafter.step_bytes(self.config.speculative, model.dtype, self._shard.world)
        given = self.decoder_config, model.dtype, model.weight_quantization, drafts
        return self._stage.layers(stage_sizes(*given, lm_head=model.pooling is None))

    def _kept_layers(self, layers: range) -> set[int]:
        """Of a pipeline stage, whose pages it keeps: behind the target's layers are those of a draft model or a head."""
        return {*layers, *(range(self.decoder_config.num_layers, len(self._kv_layers)) if self._stage.last else ())}

    @abstractmethod
    def _make_ops(self) -> Ops:
        """The operations that the model is built on."""

    def _reset(self) -> None:
        """No row has a request."""
        self._lora.reset()
        self._not_finite = NotFinite(self.runtime, self.config.scheduler.max_num_seqs)
        self._requests = self._new_requests()

    def _new_requests(self) -> Requests:
        scheduler, model = self.config.scheduler, self.config.model
        most, vocab_size = scheduler.max_num_seqs, self.decoder_config.vocab_size
        processors = load_processors(model.logits_processors, self.runtime, most, vocab_size)
        return Requests(
            most,
            model.max_model_len,
            self._layout.groups,
            vocab_size,
            self.runtime,
            self.sampler,
            self._device_tokens(),
            self.config.logprobs_mode,
            processors,
        )

    def _device_tokens(self) -> torch.Tensor | None:
        """[at least rows, max_model_len]: where the device has the rows' tokens; None: where the host has them."""
        return None

    def _uploader(self) -> Uploader | None:
        """The device where the model is; None: in the host's memory."""
        return None

    @property
    def _device(self) -> torch.device:
        uploader = self._uploader()
        return CPU if uploader is None else uploader.device

    def _to_fill(self) -> Model:
        """What takes other weights: another model, since weights that were packed cannot be written again."""
        return self._new_model()

    # --- the model ---

    def load(self) -> None:
        """Builds the model and reads its weights; ConfigError where the checkpoint does not fit."""
        self._limit_threads()
        self.attention = self._choose_attention(self.decoder_config)
        ops = self._make_ops()
        self.ops = self.attention.bind(ops)
        if self._group is not None and self._group.world > 1:
            self._comm = self._group.connect(self.ops)
        if self._expert_group is not None:
            self._exchange = ExpertExchange(self._expert_group, self.ops)
        moves = self.config.parallel.eplb is not None
        self._plain_method = linear_method(self._dtype, self.ops, self.config.threads, self._device, moves=moves)
        method = quantized(self._plain_method, self.config.model.quantization, self.ops, self.config.threads, self._device)
        self._linear_method = self._lora.wrap(self._as_stored(method), self.ops)
        with large_blocks_apart():
            self._adopt(self._new_model())
            if (found := self.config.model.stored_quantization) is not None:
                warn_of_ignored(found, {name.rpartition(".")[0] for name in self.model.weights()})
            self._fill(Source(self.config.model.path, self.config.model.load_format))
        if self._drafter is not None:
            self.draft_attention = self._choose_attention(self._drafter.config)
            self.draft_ops = self.draft_attention.bind(ops)
            self._load_draft_model(self._drafter)
        log.info("kernels: %s; threads: %d", self.ops.form, self.config.threads)

    def _as_stored(self, method: LinearMethodFactory) -> LinearMethodFactory:
        """The same for layers that the checkpoint holds in few bits."""
        found, path = self.config.model.stored_quantization, self.config.model.path
        return method if found is None else stored(method, found, packed_modules(path), self.ops, self._device)

    draft_model: Model | DraftHead

    def _load_draft_model(self, drafter: DraftCheckpoint) -> None:
        """Builds the draft model or the head, and reads its weights. Adapters do not apply to it. Every rank has all of it."""
        method = linear_method(self._dtype, self.draft_ops, self.config.threads, self._device)
        if drafter.in_target:
            method = self._as_stored(method)
        alone = {"shard": Shard(), "comm": OneRank(), "experts": None, "stage": Stage(), "layers": None}
        build = dataclasses.replace(self._build(), ops=self.draft_ops, linear_method=method, lm_head=True, **alone)
        if drafter.head is None:
            self.draft_model = model_class(drafter.architecture)(drafter.config, build)
        else:
            self.draft_model = draft_head(drafter.head, build)
        with torch.inference_mode():
            source = self._source if drafter.in_target else Source(drafter.path, self.config.model.load_format)
            fill(self.draft_model, source, self._dtype, self._uploader())
            self.draft_model.finish()

    def _choose_attention(self, config: DecoderConfig) -> AttentionPhases:
        """For the layers of a model, for good."""
        asked, prefill = self.config.attention_backend, self.config.prefill_attention_backend
        return choose_attention(self._attention_needs(config), asked, prefill, self._max_decode_tokens)

    @property
    def _max_decode_tokens(self) -> int:
        return 1 + self.config.scheduler.num_speculative_tokens

    def _attention_needs(self, config: DecoderConfig) -> AttentionNeeds:
        scheduler, device = self.config.scheduler, self._device
        return AttentionNeeds(
            device=device.type,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            dtype=self._dtype,
            kv_dtype=self._kv_dtype,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            block_sizes=tuple({group.block_size for group in self._layout.groups}),
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            sinks=config.sinks,
            value_size=0 if config.latent is None else config.latent.rank,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_tokens=max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs),
            max_model_len=self.config.model.max_model_len,
        )

    def follow(self, sampled: SampledTokens) -> None:
        """See Runner: only stages of a pipeline are asked, which run on a CPU."""
        raise RuntimeError(f"step {sampled.step_id} was sampled elsewhere, and this is no earlier stage of a pipeline")

    def serve_others(self) -> None:
        """See Runner: only ranks that divide experts are asked, which run on a CPU."""
        raise RuntimeError("no other core needs the experts of this rank")

    def kernels(self) -> str:
        """Which form of the model's operations runs."""
        return self.ops.form

    def reload_weights(self, path: str | None) -> None:
        """Reads the weights again: from `path`, or from where they were read last. The old ones are gone before the new ones
        come, so that there is never memory for both.

        Raises:
            ConfigError: Another architecture, or other tensors; nothing has changed.
        """
        self._limit_threads()
        source, fresh = self._check_checkpoint(path)
        with large_blocks_apart():
            if fresh is not self.model:
                self._adopt(fresh)
                return_free_memory()
            self._fill(source)
        if self._drafter is not None and self._drafter.in_target:
            self._load_draft_model(self._drafter)

    def check_weights(self, path: str | None) -> str | None:
        """Why weights cannot be read again from there; None: nothing is known against it."""
        try:
            self._check_checkpoint(path)
        except ConfigError as error:
            return str(error)
        return None

    def _check_checkpoint(self, path: str | None) -> tuple[Source, Model]:
        """Weights that fit, and a model to be filled with them; ConfigError where they do not."""
        try:
            return self._fitting(path)
        except ConfigError:
            raise
        except Exception as error:  # whatever a strange file leads to: the weights that are there stay
            raise ConfigError(f"{path or self._source.path} cannot be read: {type(error).__name__}: {error}") from error

    def _fitting(self, path: str | None) -> tuple[Source, Model]:
        """The same; any error where they do not."""
        source, fresh = self._source if path is None else Source(resolve(path)), self._to_fill()
        raw, pooling = read_object(source.path / "config.json"), self.config.model.pooling
        if (parse_decoder_config(raw), parse_quantization(raw)) != (self.decoder_config, self.config.model.stored_quantization):
            raise ConfigError(f"{source.path}: its config.json describes another model than the one that is served")
        if pooling is not None and read_pooling(source.path, raw, pooling.size, "pooling") != pooling:
            raise ConfigError(f"{source.path}: its embeddings are pooled otherwise than those of the model that is served")
        check(fresh, source)
        self._read_kv_scales(source)
        if self._drafter is not None and self._drafter.in_target:
            check(self.draft_model, source)
        return source, fresh

    def _new_model(self) -> Model:
        """Without weights: their memory is the system's until they are written."""
        return model_class(self.config.model.architecture)(self.decoder_config, self._build())

    def _build(self) -> Build:
        head = None if self._drafter is None else self._drafter.head
        return Build(
            ops=self.ops,
            linear_method=self._linear_method,
            dtype=self._dtype,
            max_model_len=self.config.model.max_model_len,
            shard=self._shard,
            comm=self._comm,
            stage=self._stage,
            layers=self._stage_layers,
            device=self._device,
            lm_head=self.config.model.pooling is None,
            embedding=head is not None and not head.has_embedding,
            plain_method=self._plain_method,
            experts=self._exchange,
        )

    def _adopt(self, model: Model) -> None:
        """Serves with another model, whose weights are yet to come."""
        self.model = model
        self._share_experts()
        with torch.inference_mode():
            self._lora.attach(model, self._whole_model)

    def _whole_model(self) -> Model:
        """The model with the layers of all pipeline stages; those of others have no memory."""
        if self._stage.world == 1:
            return self.model
        nowhere = torch.device("meta")
        method = partial(DeviceLinearMethod, device=nowhere)
        whole = {"stage": Stage(), "layers": None, "device": nowhere, "max_model_len": 1, "experts": None}
        build = dataclasses.replace(self._build(), linear_method=method, plain_method=method, **whole)
        return model_class(self.config.model.architecture)(self.decoder_config, build)

    def _share_experts(self) -> None:
        """Lets other ranks use the model's experts, if it has some to share."""
        if self._exchange is not None:
            self._exchange.adopt(cast(MoeForCausalLM, self.model).mixtures if hasattr(self, "model") else ())

    def expert_stats(self) -> ExpertStats | None:
        """What the experts of all ranks have had to do."""
        return None if self._exchange is None else self._exchange.stats()

    def _fill(self, source: Source) -> None:
        with torch.inference_mode():
            fill(self.model, source, self._dtype, self._uploader())
            self.model.finish()
        self._source, self._kv_scales = source, self._read_kv_scales(source)
        heads = self._kv_heads()
        self._own_kv_scales = None if self._kv_scales is None else [scales.part(heads) for scales in self._kv_scales]

    def _read_kv_scales(self, source: Source) -> Sequence[KVScales] | None:
        """Of a cache in FP8; ConfigError where the checkpoint's are none."""
        if self._kv_dtype not in FLOATS_OF_EIGHT_BITS or source.format == "dummy":
            return None  # as 1.0
        of_all, needed = self._kv_heads().total, self._kv_dtype is torch.float8_e4m3fn
        return read_kv_scales(source.path, self.decoder_config.num_layers, of_all, needed)

    def _kv_heads(self) -> Span:
        """The heads of the KV cache that the rank keeps; every rank has the whole latent."""
        latent = self.decoder_config.latent is not None
        return Span(1, 0, 1) if latent else self._shard.kv_heads(self.decoder_config.num_kv_heads)

    def _limit_threads(self) -> None:
        """OpenMP counts per calling thread, and an executor may run steps in another thread than the one that loaded."""
        if self._thread != threading.get_ident():
            torch.set_num_threads(self.config.threads)
            self._thread = threading.get_ident()

    def capture_graph(self) -> GraphReport | None:
        """See Runner: this device has no graphs."""
        return None

    # --- adapters ---

    def read_adapter(self, copy: int, uri: str, revision: str | None) -> None:
        """Begins to read an adapter; see `LoraRunner`."""
        self._lora.read_adapter(copy, uri, revision)

    def take_reads(self) -> dict[int, AdapterRead]:
        """Copies that have been read since the last call, each with how that ended."""
        return self._lora.take_reads()

    def drop_adapters(self, copies: Sequence[int]) -> None:
        """Frees the host's memory of copies."""
        self._lora.drop_adapters(copies)

    # --- profiles ---

    def start_profile(self) -> None:
        """Profiles every step from the next one on."""
        self._profile = RunnerProfile(self, self.model, self.decoder_config)

    def stop_profile(self, folder: Path) -> str:
        """Ends the profile that was started; returns the file that it was written to."""
        profile, self._profile = self._profile, None
        if profile is None:
            raise RuntimeError("no profile was started")
        try:
            number = 0 if self._group is None else self._group.number
            return str(profile.end(folder, f"-rank{number}" if number else ""))
        finally:
            # A second of steps is tens of megabytes, in cycles that no collection would find for long.
            del profile
            gc.collect()
            return_free_memory()

    # --- a step ---

    def _score(self, hidden: torch.Tensor, logits_indices: torch.Tensor | None, asked: PromptRows | None) -> Forward:
        """What a step needs of its hidden states.

        Args:
            hidden: [n, hidden]: of the step's tokens.
            logits_indices: [m]: the tokens whose logits the sampler needs; None: no row samples.
            asked: The prompt tokens to score; None: there are none.
        """
        compute, prompts = self.model.compute_logits, None
        logits = None if logits_indices is None else compute(hidden.index_select(0, logits_indices))
        if asked is not None:
            prompts = score_prompts(self.runtime, self.sampler, compute, hidden, asked, self.config.logprobs_mode)
        return Forward(logits, prompts)
