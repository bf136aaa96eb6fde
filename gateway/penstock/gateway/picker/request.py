"""What the picker reads of a request: enough to estimate its cost, and none of its words."""

import msgspec


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of a request (`/v1/completions` may bring several)."""

    tokens: int
    block_hashes: tuple[bytes, ...] = ()
    """Chained hashes of the full blocks (`penstock.prompt.hashing`); empty where tokens could not be computed."""


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the decision core sees it."""

    id: str
    path: str
    model: str
    """What the client put in `model`."""
    prompts: tuple[Prompt, ...]
    block_size: int = 16
    """Tokens in a block of `prompts`."""
    tokens_unknown: str | None = None
    """Why the prompt could not be tokenised; its tokens are then guessed from its bytes and nothing counts as resident."""
    max_tokens: int | None = None
    stream: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum([prompt.tokens for prompt in self.prompts])
