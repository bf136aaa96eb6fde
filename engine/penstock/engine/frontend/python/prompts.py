"""Prompts as Python gives them, and the requests that they make."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.engine.config import ConfigError, EngineConfig, GenerationDefaults, ModelConfig
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.images import place_images, read_images
from penstock.engine.frontend.openai.embeddings import check_embeddings, embedding_spec, parse_embeddings
from penstock.engine.frontend.openai.structured import grammar_of
from penstock.engine.frontend.python.params import SamplingParams
from penstock.engine.frontend.python.request_output import python_errors
from penstock.engine.frontend.spec import GenerationSpec, generation_spec
from penstock.engine.loading.json_files import read_object
from penstock.engine.multimodal.inputs import ImageInput
from penstock.engine.multimodal.reader import ImageReader
from penstock.engine.multimodal.settings import ImageSettings, PatchSettings, TileSettings
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.errors import BundleError, PromptError
from penstock.prompt.images import MM_KWARGS, ImageRules
from penstock.prompt.processor import CHAT_PATH, COMPLETIONS_PATH, PromptProcessor

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's `{"prompt": text}` and `{"prompt_token_ids": ids}`."""
Message = Mapping[str, Any]


class Tokens(NamedTuple):
    """A prompt ready to run."""

    text: str | None
    token_ids: list[int]
    images: tuple[ImageInput, ...] = ()


def load_processor(engine: EngineConfig) -> PromptProcessor:
    """The tokenizer and chat template of the checkpoint; `ConfigError` where they cannot be used."""
    folder, images = engine.model.tokenizer or engine.model.path, engine.model.images
    try:
        bundle = PromptBundle.from_checkpoint(
            folder,
            served_names=engine.model.served_names,
            block_size=engine.cache.block_size,
            hash_seed=engine.cache.hash_seed,
            max_model_len=engine.model.max_model_len,
            images=None if images is None else _rules(images),
        )
        processor = PromptProcessor(bundle)
    except BundleError as error:
        raise ConfigError(str(error)) from None
    if engine.model.pooling is not None:
        _check_end(folder / "tokenizer_config.json", processor)
    return processor


def _rules(images: ImageSettings) -> ImageRules:
    resize, tokens, ends = images.resize, images.tokens, {"begin_id": images.begin_id, "end_id": images.end_id}
    size, pixels = (resize.size, 0) if isinstance(resize, PatchSettings | TileSettings) else (None, resize.size**2)
    return ImageRules(token_id=images.token_id, tokens=tokens, size=size, pixels=pixels, cost=images.cost, **ends)


def _check_end(file: Path, processor: PromptProcessor) -> None:
    """Refuses a tokenizer that leaves out the end token after which a model was trained to be pooled: `add_eos_token` is a word
    to transformers alone, as long as tokenizer.json does not say the same."""
    if not (file.is_file() and read_object(file).get("add_eos_token")):
        return
    end = processor.tokenizer.token_to_id(processor.bundle.special_tokens.get("eos_token", ""))
    if end is None or processor.encode("a", add_special_tokens=True)[-1] != end:
        raise ConfigError(f"{file}: add_eos_token is set, and by tokenizer.json none is added; save the tokenizer anew")


def tokenize(prompt: Prompt, processor: PromptProcessor) -> Tokens:
    """The tokens of one prompt; `ValueError` says what is wrong with it."""
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise ValueError(f"prompt must have prompt or prompt_token_ids, not {sorted(map(str, prompt))}")
        [prompt] = prompt.values()
    given: Any = prompt if isinstance(prompt, str) else [list(prompt)]
    try:
        [ids] = processor.tokens_of(COMPLETIONS_PATH, {"prompt": given})
    except PromptError as error:
        raise ValueError(str(error)) from None
    return Tokens(given if isinstance(given, str) else None, ids)


def tokenize_chat(messages: Sequence[Message], processor: PromptProcessor, **options: Any) -> Tokens:
    """The tokens of a conversation by the model's template; `ValueError` says what is wrong with it.

    Args:
        messages: As over HTTP.
        processor: Has the template.
        options: Further fields of a chat body that change the prompt.
    """
    body = {"messages": list(messages), **options}
    try:
        if processor.images_of(CHAT_PATH, body):
            raise ValueError("messages hold images, which take time to read: use read_chat")
        [ids] = processor.tokens_of(CHAT_PATH, body)
    except PromptError as error:
        raise ValueError(str(error)) from None
    return _chat_tokens(ids, processor)


async def read_chat(
    messages: Sequence[Message],
    processor: PromptProcessor,
    images: ImageReader | None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
) -> Tokens:
    """The same, of a conversation that may hold images."""
    body = {"messages": list(messages), MM_KWARGS: None if mm_processor_kwargs is None else dict(mm_processor_kwargs)}
    try:
        found = await read_images(CHAT_PATH, body, processor, images)
        [ids] = processor.tokens_of(CHAT_PATH, body)
        placed = place_images(CHAT_PATH, ids, found, processor)
    except PromptError as error:
        raise ValueError(str(error)) from None
    return _chat_tokens(placed.token_ids, processor)._replace(images=placed.images)


def _chat_tokens(ids: list[int], processor: PromptProcessor) -> Tokens:
    return Tokens(processor.tokenizer.decode(ids, skip_special_tokens=False), ids)


def python_spec(
    tokens: Tokens,
    params: SamplingParams,
    model: ModelConfig,
    processor: PromptProcessor,
    seed: int,
    request_id: str,
    lora_id: int = 0,
    **fields: Any,
) -> GenerationSpec:
    """What the engine runs for one prompt; `ValueError` names the parameter that cannot be served.

    Args:
        tokens: The prompt.
        params: How to generate.
        model: The model served.
        processor: Its tokenizer.
        seed: For parameters that bring none.
        request_id: Its name in events and logs.
        lora_id: Its adapter; 0: none.
        fields: `priority` and `cache_salt`, where given.
    """
    request = params.request(model.max_model_len, len(tokens.token_ids), **fields)
    # Parameters of Python are whole: what is not given is the class's default, and no server's limit applies.
    model = msgspec.structs.replace(model, generation_defaults=GenerationDefaults())
    try:
        given = {"seed": seed, "request_id": request_id, "arrival": time.time()}
        grammar = grammar_of(None, request.structured_outputs, request.schema_field)
        spec = generation_spec([tokens.token_ids], request, model, processor, grammar=grammar, **given)
    except ApiError as error:
        raise ValueError(error.message) from None
    return msgspec.structs.replace(spec, images=tokens.images, stream=params.output_kind != "final_only", lora_id=lora_id)


def python_embedding_specs(
    prompts: Sequence[Tokens], request_ids: Sequence[str], model: ModelConfig, **fields: Any
) -> list[GenerationSpec]:
    """What the engine runs for each prompt; `ValueError` says what cannot be served.

    Args:
        prompts: Each a request.
        request_ids: Their names.
        model: The model served.
        fields: `dimensions`, `priority` and `cache_salt`, as over HTTP.
    """
    with python_errors():
        request = parse_embeddings({"model": "", "input": "", **fields})
        for prompt in prompts:
            check_embeddings([prompt.token_ids], request, model)
    return [
        embedding_spec([prompt.token_ids], request, request_id=name, arrival=time.time())
        for prompt, name in zip(prompts, request_ids, strict=True)
    ]
