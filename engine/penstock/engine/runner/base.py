"""What runners on every device do alike: the model, its weights and adapters, the layout of the cache, steps for measurement."""

import dataclasses
import gc
import hashlib
import logging
import threading
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch

from penstock.engine.attention.backends.interface import AttentionNeeds
from penstock.engine.attention.backends.phases import AttentionPhases
from penstock.engine.attention.backends.registry import choose_attention
from penstock.engine.attention.pages import plane_views
from penstock.engine.cache.layout import KVLayout, kv_layout
from penstock.engine.cache.pages import PageGeometry, PageIdentity, kv_dtypes
from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.connectors.host_pages import HostPages
from penstock.engine.connectors.keepers import keeper_of
from penstock.engine.connectors.lmcache_store import LmcacheStore
from penstock.engine.connectors.mooncake_store import MooncakeStore
from penstock.engine.connectors.moves import Lower, Move, Moved, PageFile
from penstock.engine.connectors.namespace import Namespace, weights_digest
from penstock.engine.connectors.page_files import PageFiles
from penstock.engine.connectors.page_mover import PageMover
from penstock.engine.connectors.page_objects import PageObjects
from penstock.engine.connectors.store_address import store_address
from penstock.engine.connectors.transfer.agent import Agent
from penstock.engine.connectors.transfer.words import Errand, News, Part
from penstock.engine.core.executor import AdapterRead
from penstock.engine.core.plan import NONE, Admission, Bool, GraphReport, Int32, SampledTokens, StepPlan, StepResult, empty
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
from penstock.engine.multimodal.settings import ImageSettings
from penstock.engine.parallel.expert_exchange import ExpertExchange
from penstock.engine.parallel.expert_group import ExpertGroup
from penstock.engine.parallel.group import Group
from penstock.engine.quant.checkpoint import stored, warn_of_ignored
from penstock.engine.quant.kv_scales import KVScales, read_kv_scales
from penstock.engine.quant.online import quantized
from penstock.engine.quant.parse.config import parse_quantization
from penstock.engine.runner.not_finite import NotFinite
from penstock.engine.runner.profile import RunnerProfile
from penstock.engine.runner.prompt_logprobs import PromptRows
from penstock.engine.runner.requests import Requests
from penstock.engine.runner.sampler.custom import load_processors
from penstock.engine.runner.sampler.sampler import Sampler
from penstock.engine.runner.sampler.scores import score_prompts
from penstock.engine.runner.turns import Forward, Runtime, Sampled, Step, Turns
from penstock.engine.sampling import SamplingParams
from penstock.engine.spec.checkpoint import DraftCheckpoint
from penstock.engine.stats import ExpertStats
from penstock.kernels.ops import Ops
from penstock.kernels.prepare_kv.cache_rows import FLOATS_OF_EIGHT_BITS

log = logging.getLogger(__name__)

# What asks the most memory of the sampler.
_COSTLY = SamplingParams(
    max_tokens=1, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=20, prompt_logprobs=20, repetition_penalty=1.1
)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _seen_as(*images: ImageSettings | None) -> str:
    """How models have images prepared, in the words of `PageIdentity`."""
    return " ".join(msgspec.json.encode((one.resize, one.normalization)).decode() for one in images if one is not None)


class RunnerBase(Turns[Runtime, Step, Sampled]):
    """Weights, KV cache and rows of one rank.

    In order: `load`, `profile_memory`, `initialize_kv_cache`, `warm_up`; then `execute` and `sample` in turn. One thread at a
    time.
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
        self._host_pages: HostPages | None = None
        self._movers: dict[Lower, PageMover] = {}
        self._moved: dict[Lower, dict[int, Moved]] = {}
        """Ends of moves of places that have been closed."""
        self._agent: Agent | None = None
        self._thread: int | None = None
        heads, model = self._shard.kv_heads(self.decoder_config.num_kv_heads).size, config.model
        kv_dtype = model.kv_dtype or model.dtype
        self._kv_layers = kv_layers(self.decoder_config, heads, kv_dtype, model.max_model_len)
        all_heads = self.decoder_config.num_kv_heads
        self._whole_kv_layers = kv_layers(self.decoder_config, all_heads, kv_dtype, model.max_model_len)
        """What all ranks of tensor parallelism keep together."""
        self._same_pages = self._shard.replicas(1 if self.decoder_config.latent else self.decoder_config.num_kv_heads)
        """Neighbouring ranks, this one included, whose pages have the same bytes: those of one KV head, or of a latent."""
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

    @abstractmethod
    def _zeroed(self, size: int) -> torch.Tensor:
        """So many bytes of the device's memory, uint8, all zero."""

    @abstractmethod
    def _run(self, plan: StepPlan) -> StepResult:
        """A step from its plan to its result."""

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

    # --- the cache ---

    def kv_layout(self) -> KVLayout:
        """How the layers share the cache's pages."""
        return self._layout

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocates the cache, block 0 (the null block) included.

        One page holds a block of all layers of a group, so that a block is one range of bytes wherever it travels; layers see
        strided views.
        """
        self._num_blocks = num_blocks
        layout = self._layout
        pages = self._zeroed(num_blocks * layout.page_bytes).view(num_blocks, layout.num_slots, layout.slot_bytes)
        self._pages = pages
        if self._host_pages is not None:
            self._host_pages.move_to(pages)
        self.kv_caches = [pages[:, 0]] * len(self._kv_layers)
        for group in layout.groups:
            for slot, layer in enumerate(group.layers):
                self.kv_caches[layer] = plane_views(pages[:, slot], self._kv_layers[layer], group.block_size)["kv"]

    def page_keeper(self) -> int:
        """Return the rank that stores, brings and sends this rank's pages; see `keeper_of`."""
        return 0 if self._group is None else keeper_of(self._group.number, self._same_pages, self._group.ranks)

    def initialize_offload(self, num_pages: int) -> None:
        """Allocates the host's memory for so many pages."""
        transfer, group = self.config.transfer, self._group
        lends = transfer is not None and transfer.lends
        if group is None or self._same_pages == 1:
            self._host_pages = HostPages(self._pages, num_pages, shared=lends)
        else:
            memory = group.page_memory[self.page_keeper() % group.ranks]
            self._host_pages = HostPages(self._pages, num_pages, memory=memory, stores=self._keeps_pages)

    def _ranks_here(self) -> tuple[int, int]:
        """How many ranks there are on this node, and how many of them keep pages."""
        if (group := self._group) is None:
            return 1, 1
        first = group.number - group.number % group.ranks
        ranks = range(first, first + group.ranks)
        return len(ranks), len({keeper_of(rank, self._same_pages, group.ranks) for rank in ranks})

    @property
    def _keeps_pages(self) -> bool:
        return self._group is None or self.page_keeper() == self._group.number

    def open_lower(self, name: Lower) -> list[PageFile]:
        """Opens the place of pages of these weights."""
        cache = self.config.cache
        assert self._host_pages is not None, "there are no tiers"
        if not self._keeps_pages:
            return []
        if (mover := self._movers.pop(name, None)) is not None:
            mover.close()
            self._moved[name] = self._moved.get(name, {}) | mover.take()
        namespace, slots = self._namespace(), self._host_pages.slots
        if name == "disk":
            assert cache.disk_folder is not None, "there is no disk tier"
            files = PageFiles(cache.disk_folder, namespace, slots, cache.disk_bytes, *self._ranks_here())
            self._movers[name] = files
            return files.found
        if name == "store":
            assert cache.store is not None, "there is no shared store"
            address = store_address(cache.store)
            store = MooncakeStore if address.kind == "mooncake" else LmcacheStore
            self._movers[name] = store(address, namespace, slots)
            return []
        assert cache.bucket is not None, "there is no object store"
        self._movers[name] = PageObjects(cache.bucket, namespace, slots)
        return []

    def _namespace(self) -> Namespace:
        model, cache, source = self.config.model, self.config.cache, self._source
        commits = [weights_digest(source.path)] + ([] if self._drafter is None else [weights_digest(self._drafter.path)])
        return Namespace(
            version=version("penstock"),
            hash_seed=cache.hash_seed,
            identity=PageIdentity(
                commit=" ".join([*commits, *(["made up"] if source.format == "dummy" else [])]),
                quantization=model.quantization or "",
                kv_dtypes=kv_dtypes(self._kv_layers),
                scales="" if self._kv_scales is None else hashlib.sha256(repr(self._kv_scales).encode()).hexdigest(),
                images=_seen_as(model.images, None if self._drafter is None else self._drafter.images),
            ),
            geometry=PageGeometry(
                layers=tuple(self._kv_layers),
                layout=self._layout,
                part=self._shard.rank // self._same_pages,
                parts=self._shard.world // self._same_pages,
            ),
        )

    def move_pages(self, name: Lower, moves: list[Move]) -> None:
        """Begins to move pages; without a place none of them comes to anything."""
        if not self._keeps_pages:
            return
        if (mover := self._movers.get(name)) is None:
            lost = {move.number: Moved(0.0, "the folder could not be opened") for move in moves}
            self._moved[name] = self._moved.get(name, {}) | lost
        else:
            mover.begin(moves)

    def take_moved(self, name: Lower) -> dict[int, Moved]:
        """Moves that have ended since the last call."""
        mover = self._movers.get(name)
        return self._moved.pop(name, {}) | ({} if mover is None else mover.take())

    def open_transfer(self, engine_id: str) -> Part:
        """Begins to lend and read pages of these weights, under the engine's id; returns what this rank has of each page."""
        config, number = self.config.transfer, 0 if self._group is None else self._group.number
        assert config is not None and self._host_pages is not None, "there is nothing to transfer"
        space, of = self._namespace(), self._shard.world // self._same_pages
        layout = KVLayout(self._layout.groups, 0)
        whole = msgspec.structs.replace(space, geometry=PageGeometry(layers=tuple(self._whole_kv_layers), layout=layout))
        place = self._stage.rank, self._stage.world, space.geometry.part, of
        part = Part(*place, whole.name, config.host, self._keeps_pages)
        if not self._keeps_pages:
            return part
        if self._agent is None:
            config, first = msgspec.structs.replace(config, engine_id=engine_id), number % self._same_pages == 0
            self._agent = Agent(config, part, space.geometry, self._host_pages, number, lends=config.lends and first)
        else:
            self._agent.rename(part.name)
        return part

    def run_errands(self, errands: list[Errand]) -> None:
        """Does what is asked about pages at other replicas, where this rank keeps pages."""
        assert self._agent is not None or not self._keeps_pages, "no pages are lent or read"
        if self._agent is not None:
            self._agent.run(errands)

    def take_news(self) -> News:
        """What has become of pages at other replicas since the last call."""
        assert self._agent is not None or not self._keeps_pages, "no pages are lent or read"
        return News({}, [], []) if self._agent is None else self._agent.take()

    def _copies(self, plan: StepPlan) -> Future[tuple[float, float]] | None:
        """Begins to copy what the plan says, and gives the seconds that stores and loads have taken; None: nothing is copied."""
        if plan.transfers is None:
            return None
        assert self._host_pages is not None, "pages are copied, and there is no place for them"
        return self._host_pages.begin(plan.transfers)

    def _drop_pages(self) -> None:
        """Gives the cache's memory back; what the host's memory holds stays there."""
        self.kv_caches: list[torch.Tensor] = []
        self._pages = torch.empty(0)
        if self._host_pages is not None:
            self._host_pages.move_to(self._pages)

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

    # --- steps in the null block ---

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
