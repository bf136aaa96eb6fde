"""What the picker reads of a request: enough to estimate its cost, and none of its words."""

from collections.abc import Sequence

import msgspec

from penstock.gateway.picker.candidates import ReplicaKey


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of a request (`/v1/completions` may bring several)."""

    tokens: int
    block_hashes: Sequence[bytes] = ()
    """Chained hashes of the full blocks (`penstock.prompt.hashing`); empty where tokens could not be computed."""
    images: tuple[tuple[int, int], ...] = ()
    """Of each different image, the position after its last token, and the cost of a tower's run: tokens of text that take as
    long."""


class HashSpace(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of a request as some of the model's replicas tokenise and hash them."""

    prompts: tuple[Prompt, ...]
    block_size: int
    """Tokens in a block."""
    replicas: frozenset[ReplicaKey]


class RequestFigures(msgspec.Struct, frozen=True):
    """What a decision keeps of a request; no prompt is in it. The fields are those of `RequestView`."""

    id: str
    prompt_tokens: int
    block_size: int
    max_tokens: int | None
    tokens_unknown: str | None


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the decision core sees it."""

    id: str
    path: str
    model: str
    """What the client put in `model`."""
    adapter: str | None = None
    """The LoRA adapter that it names, as engines call it; None: the model itself."""
    prompts: tuple[Prompt, ...]
    block_size: int = 16
    """Tokens in a block of `prompts`."""
    elsewhere: tuple[HashSpace, ...] = ()
    """The same prompts for replicas that hash otherwise, as during a rollout."""
    tokens_unknown: str | None = None
    """Why the prompt could not be tokenised; its tokens are then guessed from its bytes and nothing counts as resident."""
    max_tokens: int | None = None
    answers: int = 1
    """How many the client wants of each prompt."""

    @property
    def figures(self) -> "RequestFigures":
        """What a decision keeps of it."""
        return RequestFigures(self.id, self.prompt_tokens, self.block_size, self.max_tokens, self.tokens_unknown)

    def space_of(self, key: ReplicaKey) -> tuple[tuple[Prompt, ...], int]:
        """The prompts as `key` tokenises and hashes them, and the tokens in a block of theirs."""
        for space in self.elsewhere:
            if key in space.replicas:
                return space.prompts, space.block_size
        return self.prompts, self.block_size

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        prompts = self.prompts
        return prompts[0].tokens if len(prompts) == 1 else sum([prompt.tokens for prompt in prompts])

    @property
    def images(self) -> tuple[tuple[int, int], ...]:
        """See `Prompt.images`; only chats have any, whose prompt is one."""
        return self.prompts[0].images if len(self.prompts) == 1 else ()

    def encoder_tokens(self, resident_tokens: int) -> int:
        """What the tower's runs take where so many of the prompt's tokens are in the cache, in tokens of text."""
        images = self.images
        return sum([cost for end, cost in images if end > resident_tokens]) if images else 0
