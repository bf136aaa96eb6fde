"""From a checked body and its tokens to the engine's request: defaults, and the arithmetic of the context."""

from collections.abc import Iterable

from tokenizers import Tokenizer

from penstock.engine.config import ModelConfig
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.openai.protocol import MAX_CHOICES, ChatRequest, CompletionRequest
from penstock.engine.sampling import MAX_BAD_WORD_TOKENS, RepetitionDetection, SamplingParams
from penstock.prompt.processor import COMPLETION_DEFAULT_TOKENS


def check_prompts(prompts: list[list[int]], request: ChatRequest | CompletionRequest, max_model_len: int) -> None:
    """Refuses requests with too many choices, and prompts that do not fit the context together with the output asked for."""
    if len(prompts) * request.generated > MAX_CHOICES:
        message = f"{len(prompts)} prompts with n = {request.generated} are more than {MAX_CHOICES} choices"
        raise ApiError(400, message, param="prompt")
    limit = request.output_limit
    for prompt in prompts:
        room = max_model_len - len(prompt)
        if room < 1:
            message, param = f"the prompt has {len(prompt)} tokens; that leaves no room for an answer", request.prompt_field
        elif limit is not None and limit > room:
            message = f"the prompt has {len(prompt)} tokens and {limit} are asked for, {len(prompt) + limit} together"
            param = request.limit_field
        else:
            continue
        message += f": the model's context is {max_model_len} tokens"
        raise ApiError(400, message, param=param, code="context_length_exceeded")


def bad_word_tokens(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences of `bad_words`, as vLLM has them: of each word alone, and of the word after a space where that is as
    long and begins with another token."""
    found: list[tuple[int, ...]] = []
    for at, word in enumerate(words):
        text = word.lstrip()
        alone, spaced = (tuple(tokenizer.encode(prefix + text, add_special_tokens=False).ids) for prefix in ("", " "))
        if not text or not alone or len(alone) > MAX_BAD_WORD_TOKENS:
            message = f"bad_words[{at}] has {len(alone)} tokens; each has 1 to {MAX_BAD_WORD_TOKENS}"
            raise ApiError(400, message, param=f"bad_words[{at}]")
        found.append(alone)
        if len(spaced) == len(alone) and spaced[0] != alone[0]:
            found.append(spaced)
    return tuple(dict.fromkeys(found))


def sampling_params(
    request: ChatRequest | CompletionRequest,
    prompt_tokens: int,
    model: ModelConfig,
    vocab_size: int,
    seed: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """The part of a request that travels to the sampler; `ApiError` 400 where its parameters contradict each other.

    Args:
        request: The checked body.
        prompt_tokens: Length of the prompt, which leaves room in the context.
        model: The model served.
        vocab_size: Of the tokenizer; tokens outside it are refused.
        seed: For a request that brings none.
        bad_words: The tokens of the request's `bad_words`.
    """
    allowed = tuple(dict.fromkeys(request.allowed_token_ids or ()))
    _check_tokens("stop_token_ids", request.stop_token_ids, vocab_size)
    _check_tokens("logit_bias", request.logit_bias, vocab_size)
    _check_tokens("allowed_token_ids", allowed, vocab_size)
    room = model.max_model_len - prompt_tokens
    limit, defaults = request.output_limit, model.generation_defaults
    if limit is None:
        limit = (defaults.max_tokens or room) if isinstance(request, ChatRequest) else COMPLETION_DEFAULT_TOKENS
    limit = min(limit, room, defaults.max_tokens_limit or room)
    if request.min_tokens > limit:
        message = f"min_tokens is {request.min_tokens}, and the output has at most {limit} tokens"
        raise ApiError(400, message, param="min_tokens")
    if request.vllm_xargs and not model.logits_processors:
        raise ApiError(400, "vllm_xargs is for logits processors, and there are none (--logits-processors)", param="vllm_xargs")
    eos = () if request.ignore_eos else model.eos_token_ids
    logprobs, prompt_logprobs = _logprobs(request)
    params = SamplingParams(
        max_tokens=limit,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(request.top_k, 0),
        min_p=request.min_p,
        seed=(request.seed if request.seed is not None else seed) % 2**63,
        stop_token_ids=tuple(dict.fromkeys((*request.stop_token_ids, *eos))),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=tuple(request.logit_bias.items()),
        min_tokens=request.min_tokens,
        bad_words=bad_words,
        allowed_token_ids=allowed,
        repetition_detection=_repetition(request),
        speculative_decoding=request.speculative_decoding,
        seeded=request.seed is not None,
        extra_args=request.vllm_xargs,
    )
    _check_something_left(params)
    return params


def _logprobs(request: ChatRequest | CompletionRequest) -> tuple[int | None, int | None]:
    """Alternatives a token of the output and of the prompt: `best_of` ranks by the former, `echo` shows the latter."""
    logprobs, prompt_logprobs = request.num_logprobs, request.prompt_logprobs
    if isinstance(request, CompletionRequest):
        if request.echo and logprobs is not None:
            prompt_logprobs = max(prompt_logprobs or 0, logprobs)
        if logprobs is None and request.generated > request.n:
            logprobs = 0
    return logprobs, prompt_logprobs


def _repetition(request: ChatRequest | CompletionRequest) -> RepetitionDetection | None:
    limits = request.repetition_detection
    if limits is None:
        return None
    if limits.min_pattern_size > limits.max_pattern_size:
        message = "repetition_detection.min_pattern_size is above max_pattern_size"
        raise ApiError(400, message, param="repetition_detection.min_pattern_size")
    return RepetitionDetection(limits.max_pattern_size, limits.min_count, limits.min_pattern_size)


def _check_tokens(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    if any(token >= vocab_size for token in token_ids):
        raise ApiError(400, f"{param} holds an id outside 0 to {vocab_size - 1}", param=param)


def _check_something_left(params: SamplingParams) -> None:
    """Refuses what could not choose even a first token; what comes to that later fails then."""
    masked = {word[0] for word in params.bad_words if len(word) == 1}
    if params.min_tokens:
        masked.update(params.stop_token_ids)
    if params.allowed_token_ids and masked.issuperset(params.allowed_token_ids):
        message = "allowed_token_ids holds nothing but tokens that bad_words or min_tokens exclude"
        raise ApiError(400, message, param="allowed_token_ids")
