"""The engine as the HTTP server sees it: requests in, text out, and whether it can go on."""

import asyncio
import itertools
import logging
import random
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

import msgspec

from penstock.api.load_report import LoadReport
from penstock.api.merged_load import merged
from penstock.engine.args import EngineArgs
from penstock.engine.commands import Command, Pause, ReloadWeights, Resume, Sleep, SyncAdapters
from penstock.engine.config import ConfigError, EngineConfig, ModelConfig, PoolingConfig, SchedulingPolicy
from penstock.engine.core.ipc.client import CoreError
from penstock.engine.core.ipc.inproc import InprocClient
from penstock.engine.frontend.core_link import Core, CoreLink
from penstock.engine.frontend.cores import core_clients
from penstock.engine.frontend.data_parallel import combined, header_rank, pick
from penstock.engine.frontend.errors import ApiError, unavailable
from penstock.engine.frontend.generation import Generation
from penstock.engine.frontend.observe.metrics import EngineMetrics
from penstock.engine.frontend.openai.embeddings import embedding_of
from penstock.engine.frontend.python.embedding_output import EmbeddingOutput, EmbeddingRequestOutput
from penstock.engine.frontend.python.params import SamplingParams, default_params
from penstock.engine.frontend.python.prompts import (
    Message,
    Prompt,
    Tokens,
    load_processor,
    python_embedding_specs,
    python_spec,
    read_chat,
    tokenize,
    tokenize_chat,
)
from penstock.engine.frontend.python.request_output import OutputBuilder, RequestOutput, python_error, python_errors
from penstock.engine.frontend.requests import begun
from penstock.engine.frontend.spec import GenerationSpec
from penstock.engine.frontend.vocabulary import Vocabulary
from penstock.engine.messages import ADAPTER_GONE, AdapterInfo, AddRequest, CoreReady
from penstock.engine.multimodal.fetch import Fetcher
from penstock.engine.multimodal.reader import ImageReader
from penstock.prompt.processor import CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH, PromptProcessor

log = logging.getLogger(__name__)


class State(Enum):
    """State of the engine. Only `READY` takes requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    CLOSED = "closed"


class AsyncLLM:
    """One core, or one for each data-parallel rank, and the requests that they work on.

    Args:
        cores: The clients of the cores by rank, not yet started; one by itself is the only one.
        model: The model served.
        processor: Its tokenizer.
        seed: Of the seeds drawn for requests that bring none.
        watchdog_timeout: Seconds without progress after which the engine is unhealthy.
        policy: The scheduler's.
        max_num_waiting: Sequences that a core's queue takes.
        in_step: Whether the cores make their steps together.
    """

    def __init__(
        self,
        cores: Core | Sequence[Core],
        model: ModelConfig,
        processor: PromptProcessor,
        seed: int = 0,
        policy: SchedulingPolicy = "fcfs",
        watchdog_timeout: float = 120.0,
        max_num_waiting: int = 1024,
        in_step: bool = False,
    ) -> None:
        self.model = model
        self._in_step = in_step
        self.processor = processor
        self.images = None if model.images is None else ImageReader(model.images, Fetcher(model.images.allowed_domains))
        """None: the model reads text alone."""
        self.vocabulary = Vocabulary(processor.tokenizer)
        self.state = State.STARTING
        self.stream_interval = 1
        """Tokens that an event of a stream has at least, but for the first and the last one."""
        self.failed = asyncio.Event()
        cores, block_size = cores if isinstance(cores, Sequence) else [cores], processor.bundle.block_size
        self.ranks = [CoreLink(core, rank, model, block_size, watchdog_timeout, self._fail) for rank, core in enumerate(cores)]
        """By data-parallel rank."""
        self.window = max(1, max_num_waiting) * len(self.ranks)
        """Sequences that may be sent at once without a refusal by a core's queue, if this is the only client."""
        self._random = random.Random(seed)
        self._numbers = itertools.count(cores[0].first_number)
        self._failure = ""
        self._policy = policy
        self._turn = 0
        self._commands = asyncio.Lock()

    @staticmethod
    def from_args(args: EngineArgs, in_process: bool = False) -> "AsyncLLM":
        """An engine to be started; `ConfigError` for a model that cannot be served. See `from_config`."""
        return AsyncLLM.from_config(args.config(), in_process)

    @staticmethod
    def from_config(config: EngineConfig, in_process: bool = False) -> "AsyncLLM":
        """An engine to be started, with its core in a process of its own or in this one."""
        size = config.parallel.data_parallel_size
        if in_process and size > 1:
            raise ConfigError(f"in_process: --data-parallel-size {size} needs a process for each rank")
        cores = [InprocClient(config)] if in_process else core_clients(config)
        processor = load_processor(config)
        scheduler, watchdog = config.scheduler, config.watchdog_timeout
        limits = scheduler.policy, watchdog, scheduler.max_num_waiting, config.parallel.is_in_step
        return AsyncLLM(cores, config.model, processor, config.seed, *limits)

    async def __aenter__(self) -> "AsyncLLM":
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts the cores and returns when all have made their first forward pass; raises `CoreError` when one cannot."""
        starting = [asyncio.create_task(rank.start()) for rank in self.ranks]
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        if self.state is State.STARTING:  # else one has failed since
            self.state = State.READY

    @property
    def metrics(self) -> EngineMetrics:
        """Those of the first rank, where the replica as a whole is counted too."""
        return self.ranks[0].metrics

    @property
    def is_asleep(self) -> str | None:
        """Why no request is taken until the engine is woken up; None: it is awake."""
        return next((rank.stats.asleep for rank in self.ranks if rank.stats is not None and rank.stats.asleep), None)

    @property
    def is_paused(self) -> bool:
        """Whether a rank makes no step until it is resumed."""
        return any(rank.stats is not None and rank.stats.paused for rank in self.ranks)

    @property
    def is_alive(self) -> bool:
        """Whether any core can still finish what it works on."""
        return not self._in_step and any(rank.failure is None for rank in self.ranks)

    @property
    def ready(self) -> CoreReady | None:
        """What the first rank said when it had started; None: it has not."""
        return self.ranks[0].ready

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """What requests can ask for by name beside the model itself: what every rank has, as the first one numbers it."""
        first, *others = (rank.adapters for rank in self.ranks)
        return first if not others else {name: own for name, own in first.items() if all(name in it for it in others)}

    def cut_off(self) -> None:
        """Ends every request with an error that sends its client to another replica."""
        for rank in self.ranks:
            rank.egress.fail_all(unavailable("the engine has shut down", "draining"))

    async def close(self) -> None:
        """Stop the cores, and fail every open request."""
        if self.state is not State.FAILED:
            self.state = State.CLOSED
        for rank in self.ranks:
            rank.egress.fail_all(unavailable("the engine was closed", "engine_dead"))
        if self.images is not None:
            self.images.close()
        await asyncio.gather(*(rank.close() for rank in self.ranks))

    @property
    def load(self) -> LoadReport | None:
        """The newest load report, of all ranks together; None before every rank has made one."""
        reports = [report for rank in self.ranks if (report := rank.load) is not None]
        return merged(reports) if len(reports) == len(self.ranks) else None

    def lora_id(self, adapter: str | None) -> int:
        """The number of an adapter, 0 for None; `ValueError` where there is none of this name."""
        if adapter is None:
            return 0
        if adapter not in self.adapters:
            raise ValueError(f"there is no adapter {adapter!r}")
        return self.adapters[adapter].lora_id

    async def has_adapter(self, name: str) -> bool:
        """Whether requests can ask for an adapter. Gateways hear of a new one from the core as this process does, and their
        requests may be quicker: what the core has said so far is read first."""
        if name not in self.adapters and self.load is not None and self.load.lora_slots:
            await self.call(SyncAdapters())
        return name in self.adapters

    def draw_seed(self) -> int:
        """A seed for a request that brings none."""
        return self._random.getrandbits(63)

    def unhealthy(self) -> str | None:
        """Why the process should be restarted, or None."""
        if self.state is State.FAILED:
            return self._failure
        if self.state is State.STARTING:
            return None
        return next((self._of(rank, reason) for rank in self.ranks if (reason := rank.stuck()) is not None), None)

    def _of(self, rank: CoreLink, reason: str) -> str:
        return reason if len(self.ranks) == 1 else f"data-parallel rank {rank.rank}: {reason}"

    async def call(self, command: Command) -> Any:
        """Has every core carry out a command and returns the result, of several ranks as `combined` has it; raises
        `CommandRefused` where one could not."""
        try:
            if len(self.ranks) == 1:
                return await self.ranks[0].core.call(command)
            async with self._commands:  # all ranks hear of commands in the same order
                return await self._call_all(command)
        except CoreError as error:
            raise unavailable(f"the engine has failed: {error}", "engine_dead") from error

    async def _call_all(self, command: Command) -> Any:
        """Has every rank carry it out. Where ranks make their steps together, none sleeps or has other weights while another one
        makes a step: they pause first."""
        if not self._in_step or self.is_asleep is not None:
            return await self._told(command)
        match command:
            case Sleep(mode=mode):
                await self._told(Pause(mode, clear_cache=False))
            case ReloadWeights() if not self.is_paused:
                await self._told(Pause("keep", clear_cache=False))
                try:
                    return await self._told(command)
                finally:
                    await self._told(Resume())
            case _:
                pass
        return await self._told(command)

    async def _told(self, command: Command) -> Any:
        calls = [rank.core.call(command) for rank in self.ranks]
        return combined(command, await asyncio.gather(*calls, return_exceptions=True))

    def require_ready(self) -> None:
        """Raises a retriable 503 unless requests are taken."""
        self.require_running()
        if (asleep := self.is_asleep) is not None:
            raise unavailable(asleep, "asleep")

    def require_running(self) -> None:
        """Raises a retriable 503 unless the engine is up, be it asleep."""
        if self.state is State.DRAINING:
            raise unavailable("the engine is shutting down", "draining")
        self.require_core()

    def require_core(self) -> None:
        """Raises a retriable 503 unless there is a core that works, be it for what is left in a drain."""
        if self.state is State.STARTING:
            raise unavailable("the engine is loading its model", "not_ready")
        if self.state is State.CLOSED:
            raise unavailable("the engine was closed", "engine_dead")
        if self.state is State.FAILED:
            raise unavailable(f"the engine has failed: {self._failure}", "engine_dead")

    def require_embedding(self) -> PoolingConfig:
        """How the model pools; `ApiError` 400 where it generates."""
        if self.model.pooling is None:
            raise self._unsupported(f"cannot embed: it generates text, at {CHAT_PATH} and {COMPLETIONS_PATH}")
        return self.model.pooling

    def require_generating(self) -> None:
        """Raises `ApiError` 400 where the model embeds."""
        if self.model.pooling is not None:
            raise self._unsupported(f"cannot generate: it embeds texts, at {EMBEDDINGS_PATH}")

    def _unsupported(self, what: str) -> ApiError:
        return ApiError(400, f"model {self.model.served_names[0]!r} {what}", param="model", code="unsupported_endpoint")

    def chat_prompt(self, messages: Sequence[Message]) -> Tokens:
        """What `generate` takes for a conversation, by the model's chat template; `ValueError` says what is wrong with it."""
        return tokenize_chat(messages, self.processor)

    async def read_chat(self, messages: Sequence[Message], mm_processor_kwargs: Mapping[str, Any] | None = None) -> Tokens:
        """`chat_prompt` for a conversation that may hold images, whose size the latter chooses."""
        return await read_chat(messages, self.processor, self.images, mm_processor_kwargs)

    async def generate(
        self,
        prompt: Prompt | Tokens,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Answers one prompt: an output whenever there is something new, of the kind that the parameters say. Leaving the loop or
        cancelling its task ends the request.

        Args:
            prompt: Text or token ids.
            sampling_params: None: the model's defaults (`generation_config`), or the class's.
            request_id: Its name in events and logs; None: a new one.
            priority: As over HTTP.
            cache_salt: As over HTTP.
            adapter: The name of a LoRA adapter; None: the model alone.
            data_parallel_rank: Which rank is to run it; None: the one with the least to do.

        Raises:
            ValueError: The prompt or a parameter cannot be served.
            RequestFailed: The engine is not running, or failed the request.
        """
        with python_errors():
            self.require_generating()
            header_rank(None if data_parallel_rank is None else str(data_parallel_rank), len(self.ranks))
        request_id = request_id or uuid.uuid4().hex
        tokens = prompt if isinstance(prompt, Tokens) else tokenize(prompt, self.processor)
        params = sampling_params or default_params(self.model, len(tokens.token_ids))
        spec = python_spec(
            tokens,
            params,
            self.model,
            self.processor,
            seed=self.draw_seed(),
            request_id=request_id,
            lora_id=self.lora_id(adapter),
            priority=priority,
            cache_salt=cache_salt,
        )
        spec = msgspec.structs.replace(spec, data_parallel_rank=data_parallel_rank)
        try:
            async with self.running(spec) as generation:
                builder = OutputBuilder(
                    request_id, tokens.text, tokens.token_ids, params.output_kind, generation, self.vocabulary
                )
                while not generation.finished:
                    await generation.changed()
                    if (output := builder.take()) is not None:
                        yield output
        except ApiError as error:
            raise python_error(error) from None

    async def embed(
        self,
        prompt: Prompt | Tokens,
        request_id: str | None = None,
        *,
        dimensions: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> EmbeddingRequestOutput:
        """Embeds one prompt, of a model that is served for it. Cancelling its task ends the request.

        Args:
            prompt: Text or token ids.
            request_id: Its name in events and logs; None: a new one.
            dimensions: As over HTTP.
            priority: As over HTTP.
            cache_salt: As over HTTP.

        Raises: As `generate` does.
        """
        with python_errors():
            self.require_embedding()
        tokens = prompt if isinstance(prompt, Tokens) else tokenize(prompt, self.processor)
        fields = {"dimensions": dimensions, "priority": priority, "cache_salt": cache_salt}
        [spec] = python_embedding_specs([tokens], [request_id or uuid.uuid4().hex], self.model, **fields)
        try:
            return await self.embedded(spec, dimensions)
        except ApiError as error:
            raise python_error(error) from None

    async def embedded(self, spec: GenerationSpec, dimensions: int | None) -> EmbeddingRequestOutput:
        """The output of a request that embeds one prompt; raises `ApiError`."""
        pooling = self.require_embedding()
        async with self.running(spec) as generation:
            [pooled] = await generation.pooled()
        vector = embedding_of(pooled, pooling, dimensions).tolist()
        [prompt], cached = spec.prompts, generation.usage.cached_tokens
        return EmbeddingRequestOutput(spec.request_id, EmbeddingOutput(vector), prompt, cached)

    @asynccontextmanager
    async def running(self, spec: GenerationSpec) -> AsyncIterator[Generation]:
        """Runs a request; leaving the context ends whatever of it still runs, as when the client has gone."""
        self.require_ready()
        self._check(spec)
        rank = self._rank(spec)
        generation, adds = self._make(spec, rank)
        rank.egress.add(generation)
        try:
            for add in adds:
                await rank.core.add(add)
            rank.metrics.accepted(spec.sampling, spec.n)
            yield generation
        except CoreError as error:
            raise unavailable(f"the engine has failed: {error}", "engine_dead") from error
        finally:
            rank.abort(rank.egress.forget(generation))

    def _rank(self, spec: GenerationSpec) -> CoreLink:
        """The data-parallel rank that takes a request: the one that it asks for, or the one with the least to do."""
        if spec.data_parallel_rank is not None:
            return self.ranks[spec.data_parallel_rank]
        rank = pick([rank.busy for rank in self.ranks], self._turn)
        self._turn = (rank + 1) % len(self.ranks)
        return self.ranks[rank]

    def _check(self, spec: GenerationSpec) -> None:
        """What only the engine's configuration can refuse."""
        if spec.priority and self._policy != "priority":
            message = f"priority is {spec.priority}, and this engine serves by arrival: it needs --scheduling-policy priority"
            raise ApiError(400, message, param="priority")

    def _make(self, spec: GenerationSpec, rank: CoreLink) -> tuple[Generation, list[AddRequest]]:
        granted = spec.granted_priority if self._policy == "priority" else None
        numbers = self._numbers, rank.rank, self._lora_id_on(rank, spec.lora_id), spec.priority if granted is None else granted
        return begun(spec, self.vocabulary, self.stream_interval, *numbers)

    def _lora_id_on(self, rank: CoreLink, lora_id: int) -> int:
        """A rank's number of an adapter that the first rank numbers so: each counts what it has loaded by itself."""
        if not lora_id or rank is self.ranks[0]:
            return lora_id
        name = next((name for name, adapter in self.ranks[0].adapters.items() if adapter.lora_id == lora_id), None)
        if name is None or name not in rank.adapters:
            raise ApiError(404, "the adapter has been unloaded", param="model", code=ADAPTER_GONE)
        return rank.adapters[name].lora_id

    def _fail(self, rank: CoreLink, reason: str) -> None:
        """One core has failed: its requests have ended, no new ones are taken, and those of other ranks go on."""
        reason = self._of(rank, reason)
        log.error("engine failed: %s", reason)
        if self.state is not State.FAILED:
            self.state, self._failure = State.FAILED, reason
        self.failed.set()
