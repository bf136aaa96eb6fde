"""How a request's tokens are chosen: the part of a request that travels from the frontend to the sampler."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

GREEDY_TEMPERATURE = 1e-5
"""Below this the choice is the argmax."""

MAX_BAD_WORD_TOKENS = 32

MAX_REPETITION_PATTERN = 64

# What may be asked for, by requests and by a model's generation_config.json alike.
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, lt=2**31)]
"""-1 and 0: all tokens."""
MinP = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=0.001, le=1000)]
"""vLLM: anything above 0. Beyond these bounds nothing changes but that float32 may overflow."""
TokenCount = Annotated[int, Meta(ge=1)]


class RepetitionDetection(msgspec.Struct, frozen=True, array_like=True):
    """Ends an output that repeats itself: where a pattern of so many tokens stands so many times in a row at its end."""

    max_pattern_size: int
    """Tokens, `MAX_REPETITION_PATTERN` at most."""
    min_count: int
    """Times in a row, at least 2."""
    min_pattern_size: int = 1


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """Validated by the frontend; the core and the runner trust it."""

    max_tokens: int
    """Tokens to generate at most, already capped by the model's context."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    seed: int = 0
    """Key of the counter RNG. The frontend draws one where the client gave none, and logs it: any request can be repeated."""
    stop_token_ids: tuple[int, ...] = ()
    """Ends the output; the model's end-of-sequence ids are among them unless `ignore_eos`."""
    logprobs: int | None = None
    """Number of top alternatives to report with each sampled token; None: no logprobs, 0: the sampled token's alone."""

    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the output has."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the output has the token."""
    repetition_penalty: float = 1.0
    """Of tokens that prompt or output have: positive logits are divided by it, negative ones multiplied."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit); each token once."""
    min_tokens: int = 0
    """Tokens before which none of `stop_token_ids` is sampled."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output never has; each of 1 to `MAX_BAD_WORD_TOKENS`."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that are sampled; none: all of the vocabulary."""
    prompt_logprobs: int | None = None
    """Number of top alternatives to report with each token of the prompt but the first; None: no logprobs, and the prefix cache
    may supply the prompt."""
    repetition_detection: RepetitionDetection | None = None
    """None: the output may repeat itself."""
    speculative_decoding: bool = True
    """False: the engine makes no drafts for the request, where it makes any."""
    seeded: bool = True
    """Whether the client has given `seed`: then no token may depend on drafts. Else only what tokens are likely to come."""
    extra_args: dict[str, Any] = {}
    """For logits processors of one's own."""

    @property
    def greedy(self) -> bool:
        """Whether the choice is the argmax."""
        return self.temperature < GREEDY_TEMPERATURE
