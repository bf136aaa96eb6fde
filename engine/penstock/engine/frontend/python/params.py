"""Sampling parameters as Python gives them: the fields of the HTTP API, with its checks."""

from typing import Any, Literal

import msgspec

from penstock.engine.config import ModelConfig
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.openai.protocol import CompletionRequest, SamplingFields, parse_completion
from penstock.prompt.processor import COMPLETION_DEFAULT_TOKENS

OutputKind = Literal["cumulative", "delta", "final_only"]


class SamplingParams(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to generate, checked when it is made: `ValueError` names the field. `docs/engine/api.md` explains each field."""

    max_tokens: int | None = COMPLETION_DEFAULT_TOKENS
    """None: what fits into the model's context."""
    logprobs: int | None = None
    """Alternatives to report with each token, 0 to 20; None: no logprobs."""
    output_kind: OutputKind = "cumulative"
    """For `AsyncLLM.generate`: whether each output has everything so far or only what is new, or there is one output at the
    end."""

    def __post_init__(self) -> None:
        if self.output_kind not in ("cumulative", "delta", "final_only"):
            raise ValueError(f"output_kind: {self.output_kind!r} is not cumulative, delta or final_only")
        self.request()

    def request(self, max_model_len: int | None = None, prompt_tokens: int = 0, **fields: Any) -> CompletionRequest:
        """The body that these would be over HTTP, checked; `ValueError` names the field at fault.

        Args:
            max_model_len: The model's context, which `max_tokens` of None fills.
            prompt_tokens: Length of the prompt.
            fields: `priority` and other parts of a body that are not sampling.
        """
        body = msgspec.structs.asdict(self) | fields
        del body["output_kind"]
        if body["max_tokens"] is None and max_model_len is not None:
            body["max_tokens"] = max(max_model_len - prompt_tokens, 1)
        try:
            return parse_completion({"model": "", "prompt": "", **body})
        except ApiError as error:
            raise ValueError(error.message) from None


def default_params(model: ModelConfig, prompt_tokens: int) -> SamplingParams:
    """Return the default sampling parameters.

    Args:
        model: The model, whose checkpoint may set some.
        prompt_tokens: Length of the prompt. The rest of the context is the limit of the output.
    """
    defaults = model.generation_defaults
    room = max(model.max_model_len - prompt_tokens, 1)
    return SamplingParams(**defaults.sampling, max_tokens=min(defaults.max_tokens or COMPLETION_DEFAULT_TOKENS, room))
