"""From the body of a request to token ids: the one way, called by the engine and by the picker in front of it."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from penstock.prompt.bundle import PromptBundle
from penstock.prompt.errors import BundleError, PromptError
from penstock.prompt.messages import normalize
from penstock.prompt.template import ChatTemplate

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"


class PromptProcessor:
    """Tokenizer and chat template of one bundle. Thread-safe; encoding releases the GIL.

    Raises `BundleError` where the tokenizer or the template cannot be used.
    """

    def __init__(self, bundle: PromptBundle) -> None:
        self.bundle = bundle
        try:
            self.tokenizer = Tokenizer.from_str(bundle.tokenizer)
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception
            raise BundleError(f"tokenizer.json cannot be used: {error}") from None
        # Files saved from training may pad or cut, which is no server's business.
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        template = bundle.chat_template
        self._template = ChatTemplate(template, bundle.special_tokens) if template is not None else None
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """One more than the largest token id that the tokenizer knows."""
        self._longest_token = max(map(len, vocabulary), default=1)

    def encode(self, text: str, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Token ids of a text; raises `PromptError` on text that is not Unicode or is certainly longer than the context."""
        # A token stands for so many characters at most: hopeless texts are refused before the costly encode.
        if len(text) > self.bundle.max_model_len * self._longest_token:
            raise PromptError(
                f"{param} has {len(text)} characters; at most {self._longest_token} a token, that is more than "
                f"the model's context of {self.bundle.max_model_len} tokens",
                param,
                "context_length_exceeded",
            )
        try:
            # A batch of one: only batches can go without character offsets, which cost a quarter of the time and more.
            return self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError):
            raise PromptError(f"{param} is not valid Unicode: it holds half of a surrogate pair", param) from None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text that the chat template makes of messages, the beginning of the answer included.

        Raises `PromptError` where there is no template or it refuses the messages.
        """
        if self._template is None:
            raise PromptError("the model has no chat template; use /v1/completions", "messages")
        return self._template.render(messages, **{"add_generation_prompt": True, **variables})

    def tokens_of(self, path: str, body: Mapping[str, Any]) -> list[list[int]]:
        """Token ids of each prompt in the body of a request to `CHAT_PATH` or `COMPLETIONS_PATH`.

        Raises `PromptError` naming the field for prompts that are missing, empty or of a wrong type, and `ValueError` for
        another path.
        """
        if path == CHAT_PATH:
            text = self.render_chat(normalize(body.get("messages")))
            # The template has written the special tokens already.
            prompts = [self.encode(text, add_special_tokens=False, param="messages")]
            param = "messages"
        elif path == COMPLETIONS_PATH:
            prompts, param = self._completion_prompts(body.get("prompt")), "prompt"
        else:
            raise ValueError(f"{path} carries no prompt")
        if not all(prompts):
            raise PromptError(f"{param} has no tokens", param)
        return prompts

    def _completion_prompts(self, prompt: Any) -> list[list[int]]:
        if isinstance(prompt, str):
            return [self.encode(prompt, add_special_tokens=True)]
        if isinstance(prompt, list) and prompt:
            if all(isinstance(entry, str) for entry in prompt):
                return [self.encode(text, True, f"prompt[{at}]") for at, text in enumerate(prompt)]
            if all(isinstance(entry, list) for entry in prompt):
                return [self._ids(ids, f"prompt[{at}]") for at, ids in enumerate(prompt)]
            if all(type(entry) is int for entry in prompt):
                return [self._ids(prompt, "prompt")]
        raise PromptError("prompt must be a string, a list of strings, a list of token ids or a list of such lists", "prompt")

    def _ids(self, ids: list[Any], where: str) -> list[int]:
        if not all(type(token) is int for token in ids):
            raise PromptError(f"{where} must hold token ids", where)
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise PromptError(f"{where} holds a token id outside 0 to {self.vocab_size - 1}", where)
        return list(ids)
