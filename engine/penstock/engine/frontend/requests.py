"""What a generation is made of: a choice for each sequence, and what its core is told of it."""

from collections.abc import Iterator

import msgspec

from penstock.engine.frontend.detokenizer import Detokenizer
from penstock.engine.frontend.generation import Choice, Generation, PromptLogprob
from penstock.engine.frontend.spec import GenerationSpec
from penstock.engine.frontend.vocabulary import Vocabulary
from penstock.engine.messages import AddRequest
from penstock.engine.sampling import SamplingParams


def begun(
    spec: GenerationSpec, vocabulary: Vocabulary, interval: int, numbers: Iterator[int], rank: int, lora_id: int, priority: int
) -> tuple[Generation, list[AddRequest]]:
    """A generation before its first token, and what is to be sent to the core.

    Args:
        spec: What was asked for.
        vocabulary: The model's.
        interval: Tokens that an event of a stream has at least, but for the first and the last one.
        numbers: One for each sequence.
        rank: The data-parallel rank that takes it.
        lora_id: That rank's number of the adapter; 0: none.
        priority: As the scheduler takes it.
    """
    choices: list[Choice] = []
    adds: list[AddRequest] = []
    for prompt, params in zip(spec.prompts, spec.sampling, strict=True):
        scores: list[PromptLogprob | None] = [None] * len(prompt)
        for k in range(spec.n):
            index = next(numbers)
            choices.append(
                Choice(
                    index=index,
                    number=len(choices),
                    prompt_tokens=len(prompt),
                    detokenizer=Detokenizer(vocabulary, prompt, spec.shown_tokens),
                    stops=spec.stops,
                    stop_token_ids=spec.client_stop_token_ids,
                    num_logprobs=params.logprobs,
                    min_tokens=params.min_tokens,
                    interval=interval,
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
                    priority=priority,
                    cache_salt=spec.cache_salt,
                    lora_id=lora_id,
                    tenant=spec.tenant,
                    deadline=spec.deadline,
                    grammar=spec.grammar,
                    images=list(spec.images),
                    remote=spec.remote,
                    lends=spec.lends,
                )
            )
    return Generation(choices, spec.n, spec.stream, spec.arrival, spec.image_tokens, rank), adds


def _of_choice(params: SamplingParams, k: int) -> SamplingParams:
    """Each choice draws its own numbers; the prompt is scored for the first one alone."""
    prompt_logprobs = params.prompt_logprobs if k == 0 else None
    return msgspec.structs.replace(params, seed=(params.seed + k) % 2**63, prompt_logprobs=prompt_logprobs)
