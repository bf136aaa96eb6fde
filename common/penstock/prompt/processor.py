"""From the body of a request to token ids. The engine and the picker in front of it both call this module."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer

from penstock.prompt.bundle import PromptBundle
from penstock.prompt.errors import BundleError, PromptError
from penstock.prompt.images import ImagePart, PlacedPrompt, place, read_mm_kwargs
from penstock.prompt.messages import ROLES, Conversation, normalize
from penstock.prompt.responses import as_chat, image_params, in_own_words
from penstock.prompt.skeleton import Gap
from penstock.prompt.template import ChatTemplate
from penstock.prompt.tools import read_tools, template_variables
from penstock.prompt.truncation import Truncation, read_truncation

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
RESPONSES_PATH: Final = "/v1/responses"
EMBEDDINGS_PATH: Final = "/v1/embeddings"
PROMPT_PATHS: Final = (CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH, EMBEDDINGS_PATH)
PARAMS: Final = {CHAT_PATH: "messages", COMPLETIONS_PATH: "prompt", RESPONSES_PATH: "input", EMBEDDINGS_PATH: "input"}
"""The field that holds the prompt."""
MAX_PROMPTS: Final = {COMPLETIONS_PATH: 128, EMBEDDINGS_PATH: 2048}
"""Most prompts in one request. A body has room for millions, whose tokens would take minutes to count before they are refused."""
CHANGES_CHATS: Final = frozenset(
    (
        *("tools", "chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message"),
        *("add_special_tokens", "truncate_prompt_tokens", "truncation_side", "mm_processor_kwargs"),
    )
)
"""The fields of a chat besides `messages` that change its prompt, or for which it is refused."""
_HANDED_CHARACTERS: Final = 4096
"""Characters of a batch from which on the tokenizer's own threads read it faster."""
COMPLETION_DEFAULT_TOKENS: Final = 16
"""`max_tokens` of a completion that gives none, as in OpenAI's API."""


class TextPrompt(NamedTuple):
    """A prompt as text."""

    text: str
    add_special_tokens: bool
    param: str


def refuse_empty(path: str, lengths: Sequence[int]) -> None:
    """Raises `PromptError` where a prompt of a request to `path` has no tokens; `lengths` are those of all its prompts."""
    if 0 in lengths:
        param = PARAMS[path] if len(lengths) == 1 else f"{PARAMS[path]}[{lengths.index(0)}]"
        raise PromptError(f"{param} has no tokens", param)


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
        self._image_token = self._in_full = ""
        if (images := bundle.images) is not None:
            self._image_token = self._in_full = self._word(images.token_id, "is the placeholder of images")
            if images.begin_id is not None and images.end_id is not None:
                begin, end = self._word(images.begin_id, "begins an image"), self._word(images.end_id, "ends an image")
                self._image_token, self._in_full = begin, f"\n\n{begin}{self._image_token}{end}\n\n"

    def _word(self, token_id: int, role: str) -> str:
        found = self.tokenizer.id_to_token(token_id)
        if not found:
            raise BundleError(f"tokenizer.json has no token {token_id}, which {role}")
        return found

    def encode(self, text: str, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Token ids of a text; raises `PromptError` on text that is not Unicode or is certainly longer than the context."""
        self.check_length(text, param)
        return self.encode_pieces([text], add_special_tokens, param)[0]

    def check_length(self, text: str, param: str) -> None:
        """Refuse texts that are too long for any tokenization, before the costly encoding: each token stands for a bounded number
        of characters."""
        if len(text) > self.most_characters:
            raise PromptError(
                f"{param} has {len(text)} characters; at most {self._longest_token} a token, that is more than "
                f"the model's context of {self.bundle.max_model_len} tokens",
                param,
                "context_length_exceeded",
            )

    def encode_pieces(self, pieces: list[str], add_special_tokens: bool, param: str) -> list[list[int]]:
        """Token ids of each piece by itself; raises `PromptError` on text that is not Unicode."""
        encode = self.tokenizer.encode_batch_fast
        # As batches, even of one: only they can go without character offsets, which cost a quarter of the time and more. A batch
        # of several is handed to the tokenizer's own threads, which costs more than a few words do.
        batches = [pieces] if sum(map(len, pieces)) > _HANDED_CHARACTERS else [[piece] for piece in pieces]
        try:
            return [encoding.ids for batch in batches for encoding in encode(batch, add_special_tokens=add_special_tokens)]
        except (TypeError, UnicodeEncodeError):
            raise _no_unicode(param) from None

    def render_chat(self, body: Mapping[str, Any]) -> str:
        """The text that the chat template makes of a chat request's body, the beginning of the answer included unless
        `add_generation_prompt` is false; with `continue_final_message` it ends within the last message.

        Raises `PromptError` naming the field where there is no template, it refuses the messages, or a field that would change
        the prompt cannot.
        """
        if self._template is None:
            raise PromptError("the model has no chat template; use /v1/completions", "messages")
        messages = self._in_form(self._conversation(body).messages)
        tools = read_tools(body.get("tools"))
        if tools and "tools" not in self._template.variables:
            raise PromptError("tools are not supported: the model's chat template has none", "tools", "unsupported_parameter")
        variables = template_variables(body, self._template.variables)
        generation, continued = _flag(body, "add_generation_prompt"), _flag(body, "continue_final_message")
        if continued and generation:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise PromptError(message, "continue_final_message")
        begin = not continued if generation is None else generation
        text = self._template.render(messages, tools=tools or None, add_generation_prompt=begin, **variables)
        text = _continued(text, _last_text(messages[-1]["content"])) if continued else text
        return text.replace(self._image_token, self._in_full) if self._in_full != self._image_token else text

    def skeleton(self, messages: Sequence[tuple[str, bool]]) -> tuple[str | Gap, ...] | None:
        """The text that `render_chat` makes of all bodies without a field of `CHANGES_CHATS` whose messages have these roles, a
        content and nothing else. None where it is not so simple.

        Args:
            messages: The role of each, and whether its content is empty.
        """
        if self._template is None or self.bundle.images is not None or not all(role in ROLES for role, _ in messages):
            return None
        return self._template.skeleton(messages, tools=None, add_generation_prompt=True)

    @property
    def most_characters(self) -> int:
        """Characters of the longest text that may fit into the context."""
        return self.bundle.max_model_len * self._longest_token

    def _as_chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return as_chat(body, reads_images=self.bundle.images is not None)

    def _conversation(self, body: Mapping[str, Any]) -> Conversation:
        return normalize(body.get("messages"), reads_images=self.bundle.images is not None)

    def _in_form(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Contents as the template of a model with images reads them: lists of parts, or texts with placeholders."""
        assert self._template is not None
        if self.bundle.images is None:
            return messages
        return [message | {"content": self._content(message["content"])} for message in messages]

    def _content(self, content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
        assert self._template is not None
        if self._template.takes_parts:
            return [{"type": "text", "text": content}] if isinstance(content, str) else content
        return content if isinstance(content, str) else "\n".join(part.get("text", self._image_token) for part in content)

    def images_of(self, path: str, body: Mapping[str, Any]) -> list[ImagePart]:
        """The images in a request's body, in the order of their placeholders; raises `PromptError` naming the field."""
        size = read_mm_kwargs(body, self.bundle.images) if path == CHAT_PATH else None
        if self.bundle.images is None or path not in (CHAT_PATH, RESPONSES_PATH):
            return []
        if path == CHAT_PATH:
            return [part._replace(size=size) for part in self._conversation(body).images]
        try:
            found = self._conversation(self._as_chat(body)).images
        except PromptError as error:
            raise in_own_words(error) from None
        return [part._replace(param=param) for part, param in zip(found, image_params(body), strict=True)]

    def place(self, path: str, token_ids: list[int], images: Sequence[tuple[str, int]]) -> PlacedPrompt:
        """A prompt with images, given its tokens as `tokens_of` has them, and name and number of embeddings of each image."""
        rules = self.bundle.images
        assert rules is not None, "a model that reads text alone has no images to place"
        return place(token_ids, rules.token_id, images, PARAMS[path])

    def tokens_of(self, path: str, body: Mapping[str, Any]) -> list[list[int]]:
        """Token ids of each prompt in the body of a request to one of `PROMPT_PATHS`. An image is one placeholder; see `place`.

        Raises `PromptError` naming the field for prompts that are missing, empty or of a wrong type, and `ValueError` for
        another path.
        """
        given = self.prompts_of(path, body)
        cut = self._truncation(path, body)
        if cut is not None:
            if self.images_of(path, body):
                raise PromptError("truncate_prompt_tokens: a prompt with images cannot be cut", "truncate_prompt_tokens")
            prompts = [self._truncated(prompt, cut) for prompt in given]
        else:
            prompts = [self.encode(*prompt) if isinstance(prompt, TextPrompt) else prompt for prompt in given]
        refuse_empty(path, [len(prompt) for prompt in prompts])
        return prompts

    def prompts_of(self, path: str, body: Mapping[str, Any]) -> list[TextPrompt | list[int]]:
        """The prompts in the body of a request: texts before they become tokens, and token ids where the client gave those.

        Raises as `tokens_of` does, but for what the tokens alone can tell.
        """
        if path == CHAT_PATH:
            # Unless it says otherwise: the template has written the special tokens already.
            special = bool(_flag(body, "add_special_tokens"))
            return [TextPrompt(self.render_chat(body), special, PARAMS[path])]
        if path == RESPONSES_PATH:
            special = bool(_flag(body, "add_special_tokens"))
            try:
                return [TextPrompt(self.render_chat(self._as_chat(body)), special, PARAMS[path])]
            except PromptError as error:
                raise in_own_words(error) from None
        if path in (COMPLETIONS_PATH, EMBEDDINGS_PATH):
            special = _flag(body, "add_special_tokens")
            return self._plain_prompts(body.get(PARAMS[path]), special is not False, PARAMS[path], MAX_PROMPTS[path])
        raise ValueError(f"{path} carries no prompt")

    def _truncation(self, path: str, body: Mapping[str, Any]) -> Truncation | None:
        if path == EMBEDDINGS_PATH:  # as in sentence-transformers, what is embedded loses its end
            return read_truncation(body, self.bundle.max_model_len, 0, "right")
        return read_truncation(body, self.bundle.max_model_len, COMPLETION_DEFAULT_TOKENS if path == COMPLETIONS_PATH else 1)

    def _truncated(self, prompt: TextPrompt | list[int], cut: Truncation) -> list[int]:
        """Truncate a prompt. No text is too long here."""
        if not isinstance(prompt, TextPrompt):
            return cut.ids(prompt)
        try:
            return cut.text(prompt.text, self.tokenizer, prompt.add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            raise _no_unicode(prompt.param) from None

    def _plain_prompts(self, given: Any, special: bool, param: str, most: int) -> list[TextPrompt | list[int]]:
        if isinstance(given, str):
            return [TextPrompt(given, special, param)]
        if isinstance(given, list) and given:
            if len(given) > most and isinstance(given[0], str | list):
                raise PromptError(f"{param} lists {len(given)} prompts; a request has at most {most}", param)
            if all(isinstance(entry, str) for entry in given):
                return [TextPrompt(text, special, f"{param}[{at}]") for at, text in enumerate(given)]
            if all(isinstance(entry, list) for entry in given):
                return [self._ids(ids, f"{param}[{at}]") for at, ids in enumerate(given)]
            if all(type(entry) is int for entry in given):
                return [self._ids(given, param)]
        raise PromptError(f"{param} must be a string, a list of strings, a list of token ids or a list of such lists", param)

    def _ids(self, ids: list[Any], where: str) -> list[int]:
        if not all(type(token) is int for token in ids):
            raise PromptError(f"{where} must hold token ids", where)
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise PromptError(f"{where} holds a token id outside 0 to {self.vocab_size - 1}", where)
        return list(ids)


def _no_unicode(param: str) -> PromptError:
    return PromptError(f"{param} is not valid Unicode: it holds half of a surrogate pair", param)


def _flag(body: Mapping[str, Any], name: str) -> bool | None:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise PromptError(f"{name} must be true or false", name)
    return value


def _last_text(content: str | list[dict[str, str]]) -> str:
    """A content, or its last text part."""
    return content if isinstance(content, str) else next((part["text"] for part in reversed(content) if "text" in part), "")


def _continued(text: str, last: str) -> str:
    """The text up to the end of its last message, as transformers cuts it."""
    words = last.strip()
    at = text.rfind(words) if words else -1
    if at < 0:
        message = "continue_final_message: the chat template does not show the last message's content as it is"
        raise PromptError(message, "continue_final_message")
    # Space at the message's end stays where the template keeps it.
    tail = last[len(last.rstrip()) :]
    end = at + len(words)
    return text[: end + len(tail)] if text.startswith(tail, end) else text[:end]
