"""A request that has passed every check, whichever way it came."""

import msgspec
from tokenizers import Tokenizer

from penstock.engine.config import ModelConfig
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.openai.protocol import ChatRequest, CompletionRequest, SamplingFields
from penstock.engine.frontend.openai.requests import bad_word_tokens, check_prompts, sampling_params
from penstock.engine.grammar import Grammar, GrammarSettings, ReasoningMarkers, is_installed
from penstock.engine.messages import RemotePrefix
from penstock.engine.multimodal.inputs import ImageInput
from penstock.engine.sampling import SamplingParams
from penstock.prompt.processor import PromptProcessor


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What `AsyncLLM` runs."""

    request_id: str
    prompts: list[list[int]]
    sampling: list[SamplingParams]
    """One a prompt; choice k of a prompt adds k to its seed."""
    n: int
    stream: bool
    stops: tuple[str, ...]
    client_stop_token_ids: frozenset[int]
    priority: int
    cache_salt: str | None
    arrival: float
    """Unix time in seconds."""
    tenant: str = ""
    """The tenant for fair sharing; empty: no tenant."""
    lora_id: int = 0
    """The adapter; 0: none."""
    granted_priority: int | None = None
    """Set by the gateway in place of `priority`, if the engine serves by priority. None: not set."""
    deadline: float | None = None
    """Unix time in seconds at which the answer is of no use any more."""
    include_stop: bool = False
    """Whether stop strings and stop tokens are part of the text."""
    shown_tokens: dict[int, str] = {}
    """Special tokens that are part of the text."""
    grammar: Grammar | None = None
    """What each answer must look like; None: anything."""
    images: tuple[ImageInput, ...] = ()
    """Images of the prompt, if there is only one prompt."""
    remote: RemotePrefix | None = None
    """KV pages of the prompt that another replica lends."""
    lends: bool = False
    """Whether the prompt's KV pages are lent to another replica afterwards."""
    data_parallel_rank: int | None = None
    """Which of the replica's ranks is to run it; None: the one with the least to do."""

    @property
    def is_transferable(self) -> bool:
        """Whether the KV pages of its prompt may come from another replica, or go there: one sequence whose prompt need not be
        computed here for another reason."""
        return len(self.prompts) * self.n == 1 and not self.lora_id and self.sampling[0].prompt_logprobs is None

    @property
    def image_tokens(self) -> int:
        """Tokens of the prompt that are images'."""
        return sum(image.item.length for image in self.images)


def generation_spec(
    prompts: list[list[int]],
    request: ChatRequest | CompletionRequest,
    model: ModelConfig,
    processor: PromptProcessor,
    *,
    seed: int,
    request_id: str,
    arrival: float,
    tenant: str = "",
    granted_priority: int | None = None,
    deadline: float | None = None,
    lora_id: int = 0,
    markers: tuple[str, ...] = (),
    grammar: Grammar | None = None,
    reasoning: ReasoningMarkers | None = None,
    images: tuple[ImageInput, ...] = (),
    data_parallel_rank: int | None = None,
) -> GenerationSpec:
    """Return the engine's request for a checked body and its tokens.

    Args:
        prompts: Token ids.
        request: The checked body.
        model: The model served.
        processor: Its tokenizer.
        seed: For a request without one.
        request_id: Its name in events and logs.
        arrival: Unix time in seconds.
        tenant: The tenant for fair sharing.
        granted_priority: Priority from the gateway, in place of the body's.
        deadline: Unix time in seconds after which the answer is useless; None: never.
        lora_id: The adapter; 0: none.
        markers: Special tokens that the parser of the text must see.
        grammar: The grammar of each answer; None: any text.
        reasoning: The reasoning before the part that follows a grammar.
        images: Images of the prompt.
        data_parallel_rank: Which of the replica's ranks is to run it; None: any.

    Raises:
        ApiError: 400, if it cannot be served.
    """
    check_prompts(prompts, request, model.max_model_len)
    bad_words = bad_word_tokens(request.bad_words, processor.tokenizer)
    return GenerationSpec(
        request_id=request_id,
        prompts=prompts,
        # Equal prompts of a list differ, unless the client's seed says otherwise.
        sampling=[
            sampling_params(request, len(prompt), model, processor.vocab_size, seed + at * request.generated, bad_words)
            for at, prompt in enumerate(prompts)
        ],
        n=request.generated,
        stream=request.stream,
        stops=request.stops,
        client_stop_token_ids=frozenset(request.stop_token_ids),
        priority=request.priority,
        cache_salt=request.cache_salt,
        arrival=arrival,
        tenant=tenant,
        granted_priority=granted_priority,
        deadline=deadline,
        lora_id=lora_id,
        include_stop=request.include_stop_str_in_output,
        shown_tokens=_shown(processor.tokenizer, None if not request.skip_special_tokens else markers),
        images=images,
        data_parallel_rank=data_parallel_rank,
        grammar=None if grammar is None else _enforced(grammar, request, reasoning, model.grammars),
    )


def _enforced(
    grammar: Grammar, request: SamplingFields, reasoning: ReasoningMarkers | None, settings: GrammarSettings
) -> Grammar:
    """A grammar as the request and the server have it enforced; `ApiError` 400 where the library is not there."""
    backend = request.guided_decoding_backend or settings.backend
    if not is_installed(backend):
        param = "guided_decoding_backend"
        raise ApiError(400, f"{param}: {backend} is not installed here", param=param, code="unsupported_parameter")
    return msgspec.structs.replace(
        grammar,
        backend=backend,
        any_whitespace=grammar.any_whitespace and not (settings.disable_any_whitespace and grammar.whitespace_pattern is None),
        reasoning=None if settings.enable_in_reasoning else reasoning,
    )


def _shown(tokenizer: Tokenizer, texts: tuple[str, ...] | None) -> dict[int, str]:
    """The special tokens with one of these texts; None: all of them."""
    if texts == ():
        return {}
    special = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return {token_id: text for token_id, text in special.items() if texts is None or text in texts}
