"""`truncate_prompt_tokens` and `truncation_side`, as vLLM has them: a prompt that is too long loses its beginning, or its end."""

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from tokenizers import Tokenizer

from penstock.prompt.errors import PromptError

_LENGTH: Final = "truncate_prompt_tokens"
_SIDE: Final = "truncation_side"
_OUTPUT_LIMITS: Final = ("max_completion_tokens", "max_tokens")

Side = Literal["left", "right"]


class Truncation(NamedTuple):
    """What is kept of a prompt."""

    length: int
    """Tokens at most."""
    side: Side
    """The side on which tokens are cut off."""

    def ids(self, ids: list[int]) -> list[int]:
        """Truncate token ids."""
        return ids[-self.length :] if self.side == "left" else ids[: self.length]

    def text(self, text: str, tokenizer: Tokenizer, add_special_tokens: bool) -> list[int]:
        """Encode and truncate a text. The special tokens of the tokenizer stay, as in transformers, unless they alone are too
        many."""
        encoding = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        special = tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        if self.length > special:
            encoding.truncate(self.length - special, direction=self.side)
        ids = tokenizer.post_process(encoding, None, True).ids if add_special_tokens else encoding.ids
        return self.ids(ids)


def read_truncation(
    body: Mapping[str, Any], max_model_len: int, default_output: int, default_side: Side = "left"
) -> Truncation | None:
    """What a body says of it; None: nothing is cut.

    Args:
        body: Of a chat or a completion.
        max_model_len: Tokens of prompt and output together.
        default_output: Tokens of output for which -1, what fits, leaves room where the body has no limit.
        default_side: Where the body says none.

    Raises `PromptError` naming the field.
    """
    side = body.get(_SIDE)
    if side not in (None, "left", "right"):
        raise PromptError(f"{_SIDE} must be left or right", _SIDE)
    length = body.get(_LENGTH)
    if length is None:
        return None
    if type(length) is not int or length < -1 or length == 0:
        raise PromptError(f"{_LENGTH} must be -1 or a number of tokens from 1 on", _LENGTH)
    asked = next((body[name] for name in _OUTPUT_LIMITS if type(body.get(name)) is int), None)
    if length > (room := max_model_len - (asked or 0)):
        message = f"{_LENGTH} is {length}; the model's context of {max_model_len} tokens leaves {room} for the prompt"
        raise PromptError(message, _LENGTH)
    fitting = max_model_len - (default_output if asked is None else max(asked, 1))
    return Truncation(length if length > 0 else max(fitting, 1), side or default_side)
