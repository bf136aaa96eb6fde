"""From a checked body and its tokens to what the engine runs: defaults, and the arithmetic of the context."""

from penstock.engine.config import ModelConfig
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.protocol import MAX_CHOICES, ChatRequest, CompletionRequest
from penstock.engine.sampling import SamplingParams

COMPLETION_DEFAULT_TOKENS = 16


def check_prompts(prompts: list[list[int]], request: ChatRequest | CompletionRequest, max_model_len: int) -> None:
    """Refuses requests with too many choices, and prompts that do not fit the context together with the output asked for."""
    if len(prompts) * request.n > MAX_CHOICES:
        raise ApiError(400, f"{len(prompts)} prompts with n = {request.n} are more than {MAX_CHOICES} choices", param="prompt")
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    limit = request.output_limit
    for prompt in prompts:
        room = max_model_len - len(prompt)
        if room < 1:
            message = f"the prompt has {len(prompt)} tokens; that leaves no room for an answer"
        elif limit is not None and limit > room:
            message = f"the prompt has {len(prompt)} tokens and {limit} are asked for, {len(prompt) + limit} together"
        else:
            continue
        message += f": the model's context is {max_model_len} tokens"
        raise ApiError(400, message, param=param, code="context_length_exceeded")


def sampling_params(
    request: ChatRequest | CompletionRequest, prompt_tokens: int, model: ModelConfig, vocab_size: int, seed: int
) -> SamplingParams:
    """The part of a request that travels to the sampler.

    Args:
        request: The checked body.
        prompt_tokens: Length of the prompt, which leaves room in the context.
        model: The model served.
        vocab_size: Of the tokenizer; stop tokens outside it are refused.
        seed: For a request that brings none.
    """
    if any(token >= vocab_size for token in request.stop_token_ids):
        raise ApiError(400, f"stop_token_ids holds an id outside 0 to {vocab_size - 1}", param="stop_token_ids")
    room = model.max_model_len - prompt_tokens
    limit = request.output_limit
    if limit is None:
        limit = room if isinstance(request, ChatRequest) else min(COMPLETION_DEFAULT_TOKENS, room)
    eos = () if request.ignore_eos else model.eos_token_ids
    return SamplingParams(
        max_tokens=limit,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(request.top_k, 0),
        min_p=request.min_p,
        seed=(request.seed if request.seed is not None else seed) % 2**63,
        stop_token_ids=tuple(dict.fromkeys((*request.stop_token_ids, *eos))),
        logprobs=request.num_logprobs,
    )
