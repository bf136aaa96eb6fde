"""The engine as the HTTP server sees it: requests in, text out, and whether it can go on."""

import asyncio
import itertools
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from importlib.metadata import version
from typing import Any, Protocol

import msgspec

from penstock.api import metrics as names
from penstock.api.load_report import LoadReport
from penstock.engine import sampling
from penstock.engine.args import EngineArgs
from penstock.engine.commands import Command, SyncAdapters
from penstock.engine.config import EngineConfig, ModelConfig, PoolingConfig, SchedulingPolicy
from penstock.engine.core.ipc.client import CoreClient, CoreError
from penstock.engine.core.ipc.inproc import InprocClient
from penstock.engine.frontend.detokenizer import Detokenizer
from penstock.engine.frontend.egress import Egress
from penstock.engine.frontend.errors import ApiError, unavailable
from penstock.engine.frontend.generation import Choice, Generation, PromptLogprob
from penstock.engine.frontend.observe.metrics import EngineMetrics
from penstock.engine.frontend.openai.embeddings import embedding_of
from penstock.engine.frontend.progress import Progress
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
from penstock.engine.frontend.spec import GenerationSpec
from penstock.engine.frontend.vocabulary import Vocabulary
from penstock.engine.messages import AdapterInfo, AdaptersChanged, AddRequest, CoreReady, EventPorts, StepOutputs
from penstock.engine.multimodal.fetch import Fetcher
from penstock.engine.multimodal.reader import ImageReader
from penstock.engine.stats import CoreStats
from penstock.prompt.processor import CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH, PromptProcessor

log = logging.getLogger(__name__)


class Core(Protocol):
    """What is used of `CoreClient`."""

    first_number: int
    """First number of this frontend's requests."""

    async def start(self) -> CoreReady: ...
    async def add(self, request: AddRequest) -> None: ...
    async def abort(self, indexes: Sequence[int]) -> None: ...
    async def call(self, command: Command) -> Any: ...
    def outputs(self) -> AsyncIterator[StepOutputs | CoreStats | AdaptersChanged]: ...
    async def close(self) -> None: ...


class State(Enum):
    """State of the engine. Only `READY` takes requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    CLOSED = "closed"


class AsyncLLM:
    """One core, and the requests that it works on.

    Args:
        core: The client of the core, not yet started.
        model: The model served.
        processor: Its tokenizer.
        seed: Of the seeds drawn for requests that bring none.
        watchdog_timeout: Seconds without progress after which the engine is unhealthy.
        policy: The scheduler's.
        max_num_waiting: Sequences that the core's queue takes.
    """

    def __init__(
        self,
        core: Core,
        model: ModelConfig,
        processor: PromptProcessor,
        seed: int = 0,
        policy: SchedulingPolicy = "fcfs",
        watchdog_timeout: float = 120.0,
        max_num_waiting: int = 1024,
    ) -> None:
        self.model = model
        self.processor = processor
        self.images = None if model.images is None else ImageReader(model.images, Fetcher(model.images.allowed_domains))
        """None: the model reads text alone."""
        self.vocabulary = Vocabulary(processor.tokenizer)
        self.metrics = EngineMetrics(model.served_names[0])
        self.kernels = ""
        self.load_seconds = self.load_floor_s = 0.0
        """Which form of the model's operations runs; known when it has started."""
        self.num_blocks = 0
        """Blocks of the KV cache; known when the core has started."""
        self.event_ports: EventPorts | None = None
        """Ports of the event stream, if it has any; known when the core has started."""
        self.state = State.STARTING
        self.stream_interval = 1
        """Tokens that an event of a stream has at least, but for the first and the last one."""
        self.adapters: dict[str, AdapterInfo] = {}
        """What requests can ask for by name beside the model itself."""
        self.failed = asyncio.Event()
        self.window = max(1, max_num_waiting)
        """Sequences that may be sent at once without a refusal by the core's queue, if this is the only client."""
        self._core = core
        self._egress = Egress(self.metrics)
        self._random = random.Random(seed)
        self._numbers = itertools.count(core.first_number)
        self._watchdog_timeout = watchdog_timeout
        self._progress = Progress(time.monotonic(), watchdog_timeout)
        self._failure = ""
        self._policy = policy
        self._aborts: list[int] = []
        self._abort_wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @staticmethod
    def from_args(args: EngineArgs, in_process: bool = False) -> "AsyncLLM":
        """An engine to be started; `ConfigError` for a model that cannot be served. See `from_config`."""
        return AsyncLLM.from_config(args.config(), in_process)

    @staticmethod
    def from_config(config: EngineConfig, in_process: bool = False) -> "AsyncLLM":
        """An engine to be started, with its core in a process of its own or in this one."""
        core = InprocClient(config) if in_process else CoreClient(config)
        processor = load_processor(config)
        scheduler, watchdog = config.scheduler, config.watchdog_timeout
        return AsyncLLM(core, config.model, processor, config.seed, scheduler.policy, watchdog, scheduler.max_num_waiting)

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
        """Starts the core and returns when it has made its first forward pass; raises `CoreError` when it cannot."""
        ready = await self._core.start()
        log.info("core ready: %d KV blocks, loaded in %.1f s", ready.num_blocks, sum(ready.load_seconds.values()))
        for part, seconds in ready.load_seconds.items():
            self.metrics.describe(names.LOAD_SECONDS, "Seconds that each phase of the start took.", seconds, part=part)
        self.load_seconds, self.load_floor_s = ready.load_seconds.get("weights", 0.0), ready.load_floor_s
        self.metrics.describe(names.LOAD_FLOOR_SECONDS, "Seconds that reading the weights takes at least.", ready.load_floor_s)
        self.kernels = ready.kernels
        self.event_ports, self.num_blocks = ready.event_ports, ready.num_blocks
        self._take_adapters(ready.adapters)
        what = {"dtype": self.model.dtype, "quantization": self.model.quantization_name, "kernels": ready.kernels}
        self.metrics.describe(names.ENGINE_INFO, "What runs.", version=version("penstock"), **what)
        blocks = {"block_size": str(self.processor.bundle.block_size), "num_gpu_blocks": str(ready.num_blocks)}
        cache_dtype = self.model.kv_dtype or self.model.dtype
        self.metrics.describe(names.CACHE_CONFIG_INFO, "The KV cache.", cache_dtype=cache_dtype, **blocks)
        self._progress = Progress(time.monotonic(), self._watchdog_timeout)
        self._tasks = [asyncio.create_task(self._drain_outputs()), asyncio.create_task(self._send_aborts())]
        self.state = State.READY

    def cut_off(self) -> None:
        """Ends every request with an error that sends its client to another replica."""
        self._egress.fail_all(unavailable("the engine has shut down", "draining"))

    async def close(self) -> None:
        """Stop the core, and fail every open request."""
        if self.state is not State.FAILED:
            self.state = State.CLOSED
        self._egress.fail_all(unavailable("the engine was closed", "engine_dead"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.images is not None:
            self.images.close()
        await self._core.close()

    @property
    def load(self) -> LoadReport | None:
        """The newest load report; None before the first."""
        return self.metrics.stats.report if self.metrics.stats is not None else None

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
        return self._progress.stuck(working=len(self._egress) > 0, now=time.monotonic())

    async def call(self, command: Command) -> Any:
        """Has the core carry out a command and returns its result; raises `CommandRefused` where it could not."""
        try:
            return await self._core.call(command)
        except CoreError as error:
            raise unavailable(f"the engine has failed: {error}", "engine_dead") from error

    def require_ready(self) -> None:
        """Raises a retriable 503 unless requests are taken."""
        self.require_running()
        if self.metrics.stats is not None and self.metrics.stats.asleep is not None:
            raise unavailable(self.metrics.stats.asleep, "asleep")

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

    async def read_chat(self, messages: Sequence[Message]) -> Tokens:
        """`chat_prompt` for a conversation that may hold images."""
        return await read_chat(messages, self.processor, self.images)

    async def generate(
        self,
        prompt: Prompt | Tokens,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
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

        Raises:
            ValueError: The prompt or a parameter cannot be served.
            RequestFailed: The engine is not running, or failed the request.
        """
        with python_errors():
            self.require_generating()
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
        generation, adds = self._make(spec)
        self._egress.add(generation)
        try:
            for add in adds:
                await self._core.add(add)
            self.metrics.accepted(spec.sampling, spec.n)
            yield generation
        except CoreError as error:
            raise unavailable(f"the engine has failed: {error}", "engine_dead") from error
        finally:
            self._abort(self._egress.forget(generation))

    def _check(self, spec: GenerationSpec) -> None:
        """What only the engine's configuration can refuse."""
        if spec.priority and self._policy != "priority":
            message = f"priority is {spec.priority}, and this engine serves by arrival: it needs --scheduling-policy priority"
            raise ApiError(400, message, param="priority")

    def _make(self, spec: GenerationSpec) -> tuple[Generation, list[AddRequest]]:
        choices: list[Choice] = []
        adds: list[AddRequest] = []
        granted = spec.granted_priority if self._policy == "priority" else None
        for prompt, params in zip(spec.prompts, spec.sampling, strict=True):
            scores: list[PromptLogprob | None] = [None] * len(prompt)
            for k in range(spec.n):
                index = next(self._numbers)
                choices.append(
                    Choice(
                        index=index,
                        number=len(choices),
                        prompt_tokens=len(prompt),
                        detokenizer=Detokenizer(self.vocabulary, prompt, spec.shown_tokens),
                        stops=spec.stops,
                        stop_token_ids=spec.client_stop_token_ids,
                        num_logprobs=params.logprobs,
                        min_tokens=params.min_tokens,
                        interval=self.stream_interval,
                        prompt_logprobs=scores if params.prompt_logprobs is not None else None,
                        include_stop=spec.include_stop,
                    )
                )
                adds.append(
                    AddRequest(
                        index=index,
                        request_id=spec.request_id,
                        prompt_token_ids=prompt,
                        sampling=_of_choice(params, k),
                        arrival_time=spec.arrival,
                        priority=spec.priority if granted is None else granted,
                        cache_salt=spec.cache_salt,
                        lora_id=spec.lora_id,
                        tenant=spec.tenant,
                        deadline=spec.deadline,
                        grammar=spec.grammar,
                        images=list(spec.images),
                        remote=spec.remote,
                        lends=spec.lends,
                    )
                )
        return Generation(choices, spec.n, spec.stream, spec.arrival, spec.image_tokens), adds

    def _abort(self, indexes: list[int]) -> None:
        """One message for all that have gathered when the task gets its turn."""
        if indexes:
            self._aborts += indexes
            self._abort_wake.set()

    async def _send_aborts(self) -> None:
        while True:
            await self._abort_wake.wait()
            self._abort_wake.clear()
            indexes, self._aborts = self._aborts, []
            await self._core.abort(indexes)

    async def _drain_outputs(self) -> None:
        try:
            async for message in self._core.outputs():
                now = time.monotonic()
                if isinstance(message, CoreStats):
                    self.metrics.stats = message
                    self._progress.stats(message, len(self._egress) > 0, now)
                elif isinstance(message, AdaptersChanged):
                    self._take_adapters(message.adapters)
                else:
                    self._progress.heard(now)
                    self._abort(await self._egress.process(message))
        except CoreError as error:
            self._fail(str(error))
        except Exception as error:  # a frame that cannot be read: nothing after it can be trusted either
            log.exception("the output loop failed")
            self._fail(f"the frontend cannot read the engine core's output: {error}")

    def _take_adapters(self, adapters: list[AdapterInfo]) -> None:
        self.adapters = {adapter.name: adapter for adapter in adapters}

    def _fail(self, reason: str) -> None:
        log.error("engine failed: %s", reason)
        self.state = State.FAILED
        self._failure = reason
        self._egress.fail_all(unavailable(f"the engine has failed: {reason}", "engine_dead"))
        self.failed.set()


def _of_choice(params: sampling.SamplingParams, k: int) -> sampling.SamplingParams:
    """Each choice draws its own numbers; the prompt is scored for the first one alone."""
    prompt_logprobs = params.prompt_logprobs if k == 0 else None
    return msgspec.structs.replace(params, seed=(params.seed + k) % 2**63, prompt_logprobs=prompt_logprobs)
