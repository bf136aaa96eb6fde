"""`/v1/embeddings`: its body, what the engine runs for it, and its answer."""

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson
from msgspec import Meta

from penstock.engine.config import ModelConfig, PoolingConfig
from penstock.engine.core.plan import Float32
from penstock.engine.frontend.errors import ApiError
from penstock.engine.frontend.openai.protocol import RequestId, convert
from penstock.engine.frontend.spec import GenerationSpec
from penstock.engine.sampling import SamplingParams


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body; `penstock.prompt` checks the input. `priority`, `cache_salt` and what changes the tokens are vLLM's."""

    model: str
    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    """`base64`: of little-endian float32."""
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """How many elements are given out, the first ones; None: all."""
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    add_special_tokens: bool | None = None
    """None: the tokenizer adds those that begin and end a text."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    """Number of tokens to keep of a longer text; -1: as many as fit."""
    truncation_side: Literal["left", "right"] | None = None
    """The side on which a text is cut. None: right, which keeps its beginning."""
    request_id: RequestId | None = None
    """vLLM's, as in chats."""
    user: str | None = None
    """Accepted and of no effect."""


def parse_embeddings(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Checks everything but the input; `ApiError` 400 names the field."""
    return convert(body, EmbeddingRequest, {})


def check_embeddings(prompts: Sequence[Sequence[int]], request: EmbeddingRequest, model: ModelConfig) -> None:
    """`ApiError` 400 for what the model cannot do: inputs that are too long, and sizes that it was not made for."""
    for at, prompt in enumerate(prompts):
        if len(prompt) > model.max_model_len:
            param = "input" if len(prompts) == 1 else f"input[{at}]"
            message = f"{param} has {len(prompt)} tokens; the model's context is {model.max_model_len}"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
    if request.dimensions is not None:
        _check_dimensions(request.dimensions, model)


def _check_dimensions(asked: int, model: ModelConfig) -> None:
    assert model.pooling is not None
    size, sizes = model.pooling.size, model.pooling.dimensions
    if sizes is None:
        if asked == size:
            return
        message = f"dimensions: the model's embeddings have {size} elements and were not made to be cut"
    elif asked in sizes or (not sizes and asked <= size):
        return
    else:
        allowed = ", ".join(map(str, sizes)) or f"1 to {size}"
        message = f"dimensions is {asked}; the model's embeddings can have {allowed} elements"
    raise ApiError(400, message, param="dimensions")


def embedding_spec(prompts: list[list[int]], request: EmbeddingRequest, **fields: Any) -> GenerationSpec:
    """What the engine runs.

    Args:
        prompts: Token ids of some of the inputs.
        request: The checked body.
        fields: Those of `GenerationSpec` that the body does not have: `request_id`, `arrival`, …
    """
    return GenerationSpec(
        prompts=prompts,
        sampling=[SamplingParams(max_tokens=1)] * len(prompts),
        n=1,
        stream=False,
        stops=(),
        client_stop_token_ids=frozenset(),
        priority=request.priority,
        cache_salt=request.cache_salt,
        **fields,
    )


def embedding_of(pooled: Float32, pooling: PoolingConfig, dimensions: int | None) -> Float32:
    """What is given out of a pooled vector, [size]: its first `dimensions` elements, of length 1 where the model has that."""
    cut = pooled[:dimensions]
    if not pooling.normalize:
        return cut
    length = np.sqrt(np.square(cut, dtype=np.float64).sum())
    return (cut / max(length, 1e-12)).astype(np.float32)


def embeddings_answer(vectors: Sequence[Float32], request: EmbeddingRequest, model: str, prompt_tokens: int) -> bytes:
    """The answer as JSON; `model` is the name that it says."""
    data = [
        {"object": "embedding", "index": at, "embedding": _encoded(vector) if request.encoding_format == "base64" else vector}
        for at, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    body = {"object": "list", "data": data, "model": model, "usage": usage}
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _encoded(vector: Float32) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
