"""A model in a script: `LLM` takes prompts and returns when all are answered."""

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from penstock.engine.args import EngineArgs
from penstock.engine.frontend.async_llm import AsyncLLM
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.python.embedding_output import EmbeddingRequestOutput
from penstock.engine.frontend.python.params import SamplingParams, default_params
from penstock.engine.frontend.python.prompts import (
    Message,
    Prompt,
    Tokens,
    python_embedding_specs,
    python_spec,
    tokenize,
)
from penstock.engine.frontend.python.request_output import OutputBuilder, RequestOutput, python_error, python_errors
from penstock.engine.frontend.spec import GenerationSpec

_T = TypeVar("_T")
_CANCEL_S = 10.0


class LLM:
    """A model, loaded when it is made and held until `close`, the end of a `with` block or of the program.

    Not for several threads at once. Works inside a running event loop (a notebook) too, where it blocks it.

    Args:
        model: A folder in Hugging Face format, `file://…` or `hf://org/name`.
        in_process: The engine core runs in this process, which imports torch then, instead of in one of its own: simpler to
            debug; slower, since text and steps take turns.
        flags: Those of `penstock serve`'s engine, with underscores (`max_model_len=…`): the fields of `EngineArgs`.

    Raises:
        ConfigError: The model cannot be served like that.
        CoreError: The core could not start.
    """

    def __init__(self, model: str, *, in_process: bool = False, **flags: Any) -> None:
        config = EngineArgs(model=model, **flags).config()
        self._llm = AsyncLLM.from_config(config, in_process=in_process)
        self._numbers = count()
        self._loop = _LoopThread()
        self._finalizer = weakref.finalize(self, _close, self._llm, self._loop)
        try:
            self._loop.run(self._llm.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine, and with `RequestFailed` what another thread waits for; safe to call twice."""
        self._finalizer()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self._llm.processor.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts; the outputs are in their order.

        Args:
            prompts: One or many. A list of integers is one prompt of token ids.
            sampling_params: For all prompts, or one each; None: the model's defaults (`generation_config`), or the class's.
            progress: Whether to show a progress bar.
            priority: As over HTTP.
            cache_salt: As over HTTP.
            adapter: The name of a LoRA adapter (`lora_modules=["name=path"]`); None: the model alone.

        Raises:
            ValueError: A prompt or parameter cannot be served; nothing was run.
            RequestFailed: The engine failed a request; the others were ended.
            KeyboardInterrupt: Ctrl-C; every request was ended, and the engine can be used further.
        """
        tokens = [tokenize(prompt, self._llm.processor) for prompt in _listed(prompts)]
        return self._run(tokens, sampling_params, progress, adapter=adapter, priority=priority, cache_salt=cache_salt)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        progress: bool = True,
        dimensions: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embeds prompts, of a model that is served for it; the outputs are in their order.

        Args:
            prompts: One or many. A list of integers is one prompt of token ids.
            progress: Whether to show a progress bar.
            dimensions: As over HTTP.
            priority: As over HTTP.
            cache_salt: As over HTTP.

        Raises: As `generate` does.
        """
        self._require_open()
        with python_errors():
            self._llm.require_embedding()
        tokens = [tokenize(prompt, self._llm.processor) for prompt in _listed(prompts)]
        fields = {"dimensions": dimensions, "priority": priority, "cache_salt": cache_salt}
        specs = python_embedding_specs(tokens, [str(next(self._numbers)) for _ in tokens], self._llm.model, **fields)

        async def answer(_: Tokens, spec: GenerationSpec) -> EmbeddingRequestOutput:
            return await self._llm.embedded(spec, dimensions)

        with _progress(progress, len(specs)) as bar:
            return self._loop.run(self._answer_all(tokens, specs, answer, lambda output: bar.advance(output.prompt_token_ids)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or many, rendered by the model's chat template; otherwise as `generate`. Messages may
        hold images, as over HTTP, and `mm_processor_kwargs` choose their size."""
        many = [messages] if messages and isinstance(messages[0], Mapping) else messages
        self._require_open()
        tokens = [self._loop.run(self._llm.read_chat(one, mm_processor_kwargs)) for one in many]  # type: ignore[arg-type]
        return self._run(tokens, sampling_params, progress, adapter=adapter, priority=priority, cache_salt=cache_salt)

    def _run(
        self,
        tokens: list[Tokens],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
        adapter: str | None,
        **fields: Any,
    ) -> list[RequestOutput]:
        self._require_open()
        with python_errors():
            self._llm.require_generating()
        if sampling_params is None:
            sampling_params = [default_params(self._llm.model, len(prompt.token_ids)) for prompt in tokens]
        params, lora_id = _one_each(sampling_params, len(tokens)), self._llm.lora_id(adapter)
        specs = [
            python_spec(
                prompt,
                msgspec.structs.replace(one, output_kind="final_only"),
                self._llm.model,
                self._llm.processor,
                seed=self._llm.draw_seed(),
                request_id=str(next(self._numbers)),
                lora_id=lora_id,
                **fields,
            )
            for prompt, one in zip(tokens, params, strict=True)
        ]
        with _progress(progress, len(specs)) as bar:
            return self._loop.run(self._answer_all(tokens, specs, self._answer, bar.answered))

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("this LLM was closed")

    async def _answer_all(
        self,
        tokens: list[Tokens],
        specs: list[GenerationSpec],
        answer_one: Callable[[Tokens, GenerationSpec], Awaitable[_T]],
        tell: Callable[[_T], None],
    ) -> list[_T]:
        """Answer all, with so few sequences at once that the core's queue refuses none."""
        free = asyncio.Semaphore(max(1, self._llm.window // max((spec.n for spec in specs), default=1)))

        async def answer(prompt: Tokens, spec: GenerationSpec) -> _T:
            async with free:
                output = await answer_one(prompt, spec)
            tell(output)
            return output

        tasks = [asyncio.create_task(answer(*pair)) for pair in zip(tokens, specs, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        except ApiError as error:
            raise python_error(error) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, prompt: Tokens, spec: GenerationSpec) -> RequestOutput:
        async with self._llm.running(spec) as generation:
            builder = OutputBuilder(
                spec.request_id, prompt.text, prompt.token_ids, "final_only", generation, self._llm.vocabulary
            )
            while not generation.finished:
                await generation.changed()
            output = builder.take()
        assert output is not None, "a finished request always has its end to tell"
        return output


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not isinstance(prompts, str | Mapping | Sequence):
        raise ValueError(f"prompts: a text, token ids or a sequence of prompts is expected, not {type(prompts).__name__}")
    if isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise TypeError(f"sampling_params must be SamplingParams or a list of them, not {type(params).__name__}")
    if len(params) != count:
        raise ValueError(f"sampling_params: {len(params)} for {count} prompts")
    return list(params)


class _LoopThread:
    """An event loop in a thread of its own, so that it works whatever the caller's thread does."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Runs a coroutine and waits for it; an interrupt cancels it and waits until it has cleaned up."""
        ended = threading.Event()

        async def watched() -> _T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            ended.wait(_CANCEL_S)
            raise

    def close(self) -> None:
        """Ends the thread, when what still runs in it has come to its end."""
        self.run(_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _others() -> None:
    """Waits for all tasks but this one."""
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)  # type: ignore[arg-type]


def _close(llm: AsyncLLM, loop: _LoopThread) -> None:
    loop.run(llm.close())
    loop.close()


class _Bar:
    """Requests done and tokens a second."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._prompt_tokens = self._output_tokens = 0
        self._task = progress.add_task("requests", total=total, rates="")

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def answered(self, output: RequestOutput) -> None:
        """One request more."""
        self.advance(output.prompt_token_ids, output.metrics.num_generation_tokens)

    def advance(self, prompt: Sequence[int], output_tokens: int = 0) -> None:
        """The same, of token ids and how many tokens came of them."""
        self._prompt_tokens += len(prompt)
        self._output_tokens += output_tokens
        elapsed = max(self._progress.tasks[0].elapsed or 0.0, 1e-3)
        rates = f"{self._prompt_tokens / elapsed:,.0f} tok/s in, {self._output_tokens / elapsed:,.0f} tok/s out"
        self._progress.update(self._task, advance=1, rates=rates)


def _progress(shown: bool, total: int) -> _Bar:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return _Bar(Progress(*columns, TextColumn("{task.fields[rates]}"), console=console, disable=not shown), total)
