"""The engine's configuration: one typed tree, made once at start. CLI flags and the InferenceModel's fields are views of it."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.engine.connectors.eviction import PolicyName
from penstock.engine.cost import ModelCost
from penstock.engine.grammar import GrammarSettings
from penstock.engine.multimodal.settings import ImageSettings
from penstock.engine.quant.scheme import CheckpointQuantization, QuantizationName
from penstock.kernels.cpu.isa import IsaName

DType = Literal["bfloat16", "float16", "float32"]
KVDType = Literal["bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head"]
"""Of keys and values; the last three have eight bits."""
LoadFormat = Literal["auto", "safetensors", "dummy"]
"""Where weights come from: `auto` is `safetensors`; `dummy` makes them up."""
AttentionBackendName = Literal["triton", "flash_attn", "flashinfer", "torch", "gluon"]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
"""What is reported as a token's logprob: its log probability or its logit, as the model gave it or as it was sampled from, after
masks, penalties, temperature and filters."""
SchedulingPolicy = Literal["fcfs", "priority"]
RunnerType = Literal["auto", "generate", "pooling"]
"""What an engine does: `auto` is what the checkpoint is made for."""
PooledTokens = Literal["last", "mean", "first"]
"""Which hidden states of a text make its embedding."""
CudagraphMode = Literal["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"]
"""What steps of a GPU are captured as: nothing; the parts of the model between attentions; whole steps; whole steps where all
requests have equally many new tokens, and parts for the others."""


SpeculativeMethod = Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"]
"""Where drafts come from: the request's own text; that and the outputs of earlier requests; a smaller model; a head."""


DraftSampleMethod = Literal["greedy", "probabilistic"]


class ConfigError(ValueError):
    """A setting that cannot work; the message names the flag and what to change."""


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a text's hidden states become its embedding."""

    tokens: PooledTokens
    normalize: bool
    """Whether embeddings have length 1."""
    size: int
    """Elements of an embedding."""
    dimensions: tuple[int, ...] | None = None
    """Sizes to which it may be cut (Matryoshka); none of them: any from 1 to `size`. None: it may not be cut."""

    @property
    def computes_all(self) -> bool:
        """Whether the hidden states of tokens are needed that a prefix cache would have skipped."""
        return self.tokens != "last"


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of requests. The values here are OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    """Limit for requests that would otherwise fill the context. None: no limit."""
    max_tokens_limit: int | None = None
    """Most tokens that a request over HTTP gets, if it asks for more. None: the context is the only limit."""

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields that are a request's."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {name: getattr(self, name) for name in names}


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint and how it is served."""

    path: Path
    """Local folder in Hugging Face format."""
    served_names: tuple[str, ...]
    architecture: str
    """`architectures[0]` of config.json."""
    dtype: DType
    """Dtype of weights and activations."""
    max_model_len: int
    """Tokens of prompt and output together."""
    eos_token_ids: tuple[int, ...]
    generation_defaults: GenerationDefaults = GenerationDefaults()
    cost: ModelCost | None = None
    """None: not known, and then not estimated."""
    load_format: LoadFormat = "auto"
    quantization: QuantizationName | None = None
    """None: weights stay as the checkpoint has them."""
    stored_quantization: CheckpointQuantization | None = None
    """How the checkpoint itself was quantized; None: it was not."""
    pooling: PoolingConfig | None = None
    """None: the engine generates; else it embeds, and that alone."""
    grammars: GrammarSettings = GrammarSettings()
    logits_processors: tuple[str, ...] = ()
    """`module:Class` of each, as `runner.sampler.custom` has it."""
    tokenizer: Path | None = None
    """Folder of the tokenizer and the chat template; None: `path`."""
    source: str | None = None
    """The folder or Hub name that the user gave. None: `path`."""
    kv_dtype: KVDType | None = None
    """Dtype of keys and values. None: `dtype`."""
    images: ImageSettings | None = None
    """None: it reads text alone."""
    vocab_size: int | None = None
    """Logits of a row; None: as many as the tokenizer has tokens."""

    @property
    def weight_quantization(self) -> CheckpointQuantization | QuantizationName | None:
        """How the weights are kept: as the checkpoint has them, or as `--quantization` says; None: in the model's dtype."""
        return self.stored_quantization or self.quantization

    @property
    def quantization_name(self) -> str:
        """The scheme of `--quantization`, or the checkpoint's `quant_method`, or `none`."""
        stored = None if self.stored_quantization is None else self.stored_quantization.method
        return self.quantization or stored or "none"


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Paged KV cache and prefix cache."""

    block_size: int = 16
    num_blocks: int | None = None
    """None: from `memory_bytes`."""
    memory_bytes: int | None = None
    """None: from `memory_utilization`."""
    memory_utilization: float | None = None
    """Share of the device's memory for weights, steps and cache together. None: a tenth of the memory for the cache alone, as
    others use a host's memory too."""
    enable_prefix_caching: bool = True
    hash_seed: str = "penstock"
    offload_bytes: int = 0
    """Bytes of host memory, on each rank, for pages that leave the cache. 0: such pages are dropped."""
    disk_folder: Path | None = None
    """Folder for copies of the pages in host memory. None: no copies."""
    disk_bytes: int = 0
    """Bytes of the files in it, on each rank."""
    store: str | None = None
    """`mooncake://HOST:PORT` or `lmcache://HOST:PORT` of a store for copies of the pages in host memory, too. None: no copies."""
    store_bytes: int = 0
    """Bytes of the pages that this replica knows there, on each rank."""
    bucket: str | None = None
    """`s3://BUCKET/PATH` for copies of the pages in host memory, too. None: no copies."""
    bucket_bytes: int = 0
    """Bytes of the objects that this replica knows there, on each rank."""
    loads_by_cost: bool = False
    """Whether pages come back from both only where that is faster than to compute their tokens; else they always do."""
    eviction_policy: PolicyName = "lru"
    """Which page leaves a tier that is full."""
    offload_threshold: int = 0
    """Requests that must have shown a block in their prompts before it is copied to host memory; 0 and 1: each block is."""


TransferRole = Literal["kv_producer", "kv_consumer", "kv_both"]
TransportName = Literal["shm", "nixl", "tcp"]


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """KV pages between replicas, with vLLM's names of roles; see `docs/engine/kv-transfer.md`."""

    role: TransferRole
    engine_id: str
    """This start of the replica: another one has another id."""
    secret: Path
    """File with what all replicas of the model know, and nobody else."""
    host: str = "127.0.0.1"
    """Address on which the ranks of this node lend pages, and by which others reach them."""
    port: int = 14579
    """Port of the first part of pages; part p has the p-th port after it."""
    lease_s: float = 30.0
    """Seconds that lent pages wait for their reader."""
    prefill_timeout_s: float = 30.0
    """Seconds that a prefill replica gets to compute a prompt."""
    transports: tuple[TransportName, ...] = ("shm", "tcp")
    """What the bytes of pages may go by. A reader takes the first of its own that works and that the lender has, too."""

    @property
    def lends(self) -> bool:
        """Whether other replicas read its pages."""
        return self.role != "kv_consumer"

    @property
    def reads(self) -> bool:
        """Whether it reads pages of other replicas."""
        return self.role != "kv_producer"


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a step."""

    policy: SchedulingPolicy = "fcfs"
    """Order of service among a tenant's requests: by arrival, or by `priority` and then arrival."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    """Prompt tokens of one request in a step at most; 0: no cap."""
    enable_chunked_prefill: bool = True
    """Off: a prompt is computed in one step or not yet."""
    max_num_waiting: int = 1024
    """Requests in the queue beyond which new ones are refused with 503."""
    watermark: float = 0.01
    """Share of the blocks kept free when a request is admitted, so that running ones can grow before any is preempted."""
    num_speculative_tokens: int = 0
    """Drafts that the runner proposes for a row's next step at most."""
    num_lookahead_tokens: int = 0
    """Tokens beyond a step's own for which it gets blocks: a draft model writes keys and values of what it proposes."""
    drafts_after_result: bool = False
    """Whether the next plan waits for a result that brings drafts, as on a device and wherever one plan is in flight; else it
    reckons with as many as there may be."""
    max_encoder_tokens: int = 0
    """Work of a vision tower in a step at most, in tokens of text that take as long, an embedding counting one at least; 0: the
    model reads text alone."""
    encoder_cache_size: int = 0
    """Embeddings of images that are kept for further requests."""
    whole_images: bool = False
    """Whether a step computes all tokens of an image or none: no chunk may cut one."""
    image_lookahead: int = 0
    """Tokens after a step's own of which images' embeddings must be there as well: 1 where a draft head reads the token after
    each."""
    pipeline_stages: int = 1
    """Plans among which running requests are distributed; with more than one, a request samples in one plan in flight at most."""
    tenant_weights: dict[str, float] = {}
    """Shares of tenants in comparison with the others; 1 for those that are not named."""


class LoraModule(msgspec.Struct, frozen=True):
    """An adapter that is loaded at the start."""

    name: str
    """What clients put in `model`."""
    uri: str
    """A folder in PEFT's format, `file://…` or `hf://org/name`."""


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters on top of the model; see `docs/engine/lora.md`."""

    max_loras: int = 1
    """Different adapters in a step."""
    max_cpu_loras: int = 1
    """Adapters in the host's memory; the others are read again when they are asked for."""
    max_lora_rank: int = 16
    modules: tuple[LoraModule, ...] = ()


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Source of drafts, with the names of vLLM's `--speculative-config`; see `docs/engine/speculation.md`."""

    method: SpeculativeMethod
    num_speculative_tokens: int
    """Drafts of a request in a step at most."""
    model: Path | None = None
    """draft_model, eagle, eagle3: local folder of the draft model or the head."""
    draft_sample_method: DraftSampleMethod = "greedy"
    """draft_model, eagle, eagle3, mtp: whether drafts are the likeliest tokens, or are drawn (`probabilistic`)."""
    prompt_lookup_min: int = 3
    """ngram: tokens that must have stood earlier at least."""
    prompt_lookup_max: int = 5
    """ngram: tokens that are compared at most."""
    suffix_decoding_max_tree_depth: int = 24
    """suffix: tokens that are compared at most."""
    suffix_decoding_max_cached_requests: int = 10_000
    """suffix: outputs of earlier requests that are looked up; 0: the request's own text alone."""
    suffix_decoding_max_spec_factor: float = 1.0
    """suffix: drafts per token that stood earlier at most."""
    suffix_decoding_min_token_prob: float = 0.1
    """suffix: how frequent a draft must be where it was found."""

    @property
    def has_head(self) -> bool:
        """Whether drafts come from a head that reads the target model's states."""
        return self.method in ("eagle", "eagle3", "mtp")


class GraphConfig(msgspec.Struct, frozen=True, kw_only=True):
    """CUDA graphs; see `docs/engine/cuda-graphs.md`."""

    mode: CudagraphMode = "NONE"
    capture_sizes: tuple[int, ...] = ()
    """Sizes to which steps are padded, ascending: tokens, or requests if all have equally many new tokens."""


class EplbConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When busy experts get copies on other ranks, with the names of vLLM's `--eplb-config`; see `docs/engine/parallel.md`."""

    window_size: int = 1000
    """Steps whose loads decide where experts are."""
    step_interval: int = 3000
    """Steps from one decision to the next."""
    num_redundant_experts: int = 0
    """Slots of a layer beyond one for each expert, on all ranks together."""


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that run the model; see `docs/engine/parallel.md`."""

    tensor_parallel_size: int = 1
    """Ranks among which every layer is divided."""
    pipeline_parallel_size: int = 1
    """Stages among which the layers are distributed; each is so many ranks."""
    data_parallel_size: int = 1
    """Cores among which requests are distributed; each has so many stages and ranks for itself."""
    data_parallel_size_local: int | None = None
    """Those of them that are on this node; None: all."""
    data_parallel_start_rank: int = 0
    """The first of these; the node of core 0 has the frontend."""
    data_parallel_address: str | None = None
    """Address of that node; None: all cores are on one node."""
    data_parallel_rpc_port: int = 29550
    """Where the nodes of the other cores find it."""
    expert_parallel: bool = False
    """Whether the ranks of all cores divide the experts of a mixture, each of them whole."""
    eplb: EplbConfig | None = None
    """None: experts stay where they are."""
    worker_process: bool = False
    """Whether the model runs in a process of its own even where there is one rank."""
    timeout: float = 30.0
    """Seconds that one rank may keep the others waiting, before the engine ends."""
    nnodes: int = 1
    """Machines, or pods, among which the ranks are distributed."""
    node_rank: int = 0
    """This one; node 0 has the frontend and the core."""
    master_addr: str | None = None
    """Address of node 0; None: there is one node."""
    master_port: int = 29501
    """Where the other nodes find it."""

    @property
    def world(self) -> int:
        """Ranks of a core."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_cores(self) -> range:
        """The data-parallel ranks of this node."""
        size = self.data_parallel_size if self.data_parallel_size_local is None else self.data_parallel_size_local
        return range(self.data_parallel_start_rank, self.data_parallel_start_rank + size)

    @property
    def is_first_node(self) -> bool:
        """Whether this is the node with the frontend."""
        return self.node_rank == 0 and self.data_parallel_start_rank == 0

    @property
    def cores_span_nodes(self) -> bool:
        """Whether some data-parallel ranks are on other nodes."""
        return len(self.local_cores) < self.data_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Ranks that divide the experts of a layer; 1: none do."""
        return self.data_parallel_size * self.tensor_parallel_size if self.expert_parallel else 1

    @property
    def is_in_step(self) -> bool:
        """Whether several cores make their steps together, as each has some of the experts."""
        return self.expert_parallel and self.data_parallel_size > 1


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the core process. It is sent to that process as msgpack."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    transfer: TransferConfig | None = None
    """None: no pages are lent or read."""
    lora: LoraConfig | None = None
    """None: the engine serves no adapters."""
    speculative: SpeculativeConfig | None = None
    """None: no drafts."""
    graphs: GraphConfig = GraphConfig()
    parallel: ParallelConfig = ParallelConfig()
    device: Literal["cpu", "cuda"] = "cpu"
    attention_backend: AttentionBackendName | None = None
    """None: the first that can serve the model."""
    prefill_attention_backend: AttentionBackendName | None = None
    """Of steps with prompts; None: the same."""
    cpu_isa: IsaName | None = None
    """The CPU's instruction set; None: the best that it has."""
    depth: int = 1
    """Plans in flight: 1 waits for each step's result, 2 plans the next step while one runs."""
    threads: int = 1
    """OpenMP threads of the core. More than one pays only on idle cores."""
    seed: int = 0
    watchdog_timeout: float = 120.0
    """Seconds without a step, while there is work, after which the engine counts as hung."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    profile_dir: Path | None = None
    """Folder of profiles. None: no profiles."""

    def of_rank(self, rank: int) -> "EngineConfig":
        """What a data-parallel rank's core is started with: its files lie in a folder of its own, and it lends pages on ports of
        its own."""
        if self.parallel.data_parallel_size == 1:
            return self
        cache, folder, transfer = self.cache, self.cache.disk_folder, self.transfer
        if folder is not None:
            cache = msgspec.structs.replace(cache, disk_folder=folder / f"rank-{rank}")
        if transfer is not None:
            port = transfer.port + rank * self.parallel.world
            transfer = msgspec.structs.replace(transfer, engine_id=f"{transfer.engine_id}-{rank}", port=port)
        return msgspec.structs.replace(self, cache=cache, transfer=transfer)

    @property
    def max_in_flight(self) -> int:
        """Tokens of one request at most that are planned and not yet retired."""
        return self.depth * self.scheduler.max_num_batched_tokens
