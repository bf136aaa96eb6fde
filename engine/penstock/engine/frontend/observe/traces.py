"""A request's spans, made when it is over: itself, and of each choice the time in the queue, in prefill and in decode.

Names of attributes are OpenTelemetry's for generative models (`gen_ai`) where it has one; `gen_ai.latency` is vLLM's.
"""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from aiohttp import web

from penstock.api.tracing import TRACEPARENT, Span, TraceContext, Value, begin
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.generation import Choice, Generation
from penstock.engine.frontend.observe.timeline import intervals
from penstock.engine.frontend.spec import GenerationSpec
from penstock.http.span_exporter import SpanExporter
from penstock.prompt.processor import CHAT_PATH, EMBEDDINGS_PATH


class Traces:
    """Tells a collector of requests.

    Args:
        endpoint: The collector's OTLP endpoint for traces over HTTP.
        model: The name that answers say.
        instance: Which replica this is.
    """

    def __init__(self, endpoint: str, model: str, instance: str) -> None:
        self._model = model
        self._exporter = SpanExporter(endpoint, {"service.name": "penstock-engine", "service.instance.id": instance})

    async def run(self) -> None:
        """Sends what has gathered, until cancelled; then once more."""
        await self._exporter.run()

    @asynccontextmanager
    async def watching(self, request: web.Request, spec: GenerationSpec, generation: Generation) -> AsyncIterator[None]:
        """Notes the request that is answered in this context when it has ended, well or not."""
        error: str | None = "the client has gone, or the engine"
        try:
            yield
            error = None if generation.finished else error
        except ApiError as refused:
            error = refused.message
            raise
        finally:
            self._over(request, spec, generation, error)

    def _over(self, request: web.Request, spec: GenerationSpec, generation: Generation, error: str | None) -> None:
        context, parent = begin(request.headers.get(TRACEPARENT))
        if not context.sampled:  # whoever began the trace does not record it
            return
        span = Span(
            name=f"{_operation(request)} {self._model}",
            context=context,
            parent=parent,
            kind="server",
            start_s=spec.arrival,
            end_s=time.time(),
            attributes=_attributes(_operation(request), self._model, spec, generation),
            error=error,
        )
        self._exporter.add(span)
        for choice in generation.choices:
            for part in _parts(choice, context):
                self._exporter.add(part)


def _operation(request: web.Request) -> str:
    return {CHAT_PATH: "chat", EMBEDDINGS_PATH: "embeddings"}.get(request.path, "text_completion")


def _attributes(operation: str, model: str, spec: GenerationSpec, generation: Generation) -> dict[str, Value]:
    usage, sampling, first = generation.usage, spec.sampling[0], generation.choices[0]
    times: dict[str, Value] = {}
    if (spans := intervals(first)) is not None:
        times = {
            "gen_ai.latency.time_in_queue": spans.queue,
            "gen_ai.latency.time_to_first_token": first.first_time - generation.arrival,
            "gen_ai.latency.time_in_model_prefill": spans.prefill,
            "gen_ai.latency.time_in_model_decode": spans.decode,
        }
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.id": spec.request_id,
        "gen_ai.request.choice.count": spec.n,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "penstock.usage.cached_tokens": usage.cached_tokens,
        "penstock.data_parallel_rank": generation.rank,
        "gen_ai.response.finish_reasons": [choice.finish_reason or "aborted" for choice in generation.choices],
        **times,
    }


def _parts(choice: Choice, parent: TraceContext) -> Iterator[Span]:
    """Yield the spans of a choice that has tokens."""
    if (found := intervals(choice)) is None:
        return
    ends = [choice.first_time - found.prefill, choice.first_time, choice.last_time]
    starts = [ends[0] - found.queue, *ends[:2]]
    tokens: list[dict[str, Value]] = [
        {},
        {"gen_ai.usage.input_tokens": choice.prompt_tokens, "penstock.usage.cached_tokens": choice.cached_tokens},
        {"gen_ai.usage.output_tokens": choice.num_tokens},
    ]
    for name, start, end, counts in zip(("queue", "prefill", "decode"), starts, ends, tokens, strict=True):
        yield Span(
            name=name,
            context=parent.child(),
            parent=parent.span_id,
            start_s=start,
            end_s=end,
            attributes={"penstock.choice": choice.number, **counts},
        )
