"""What Python gets of an embedding: vLLM's names, so that scripts carry over."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A text that has been embedded."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Tokens that the prefix cache supplied."""
    finished: bool = True
