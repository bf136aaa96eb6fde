"""The prompt bundle: all that decides how the body of a request becomes token ids and block hashes, in one JSON document.

The engine reads it from the checkpoint and serves it under `/prompt-bundle`. The picker fetches it from there, so both count the
same tokens by construction.
"""

import hashlib
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.prompt.errors import BundleError
from penstock.prompt.images import ImageRules

SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The names under which tokenizer_config.json has them and templates see them."""


class PromptBundle(msgspec.Struct, frozen=True, kw_only=True):
    """Served names, tokenizer, chat template and hash space of one model."""

    served_names: tuple[str, ...]
    """The names that requests may give; the first is what answers say."""
    tokenizer: str
    """The text of tokenizer.json."""
    chat_template: str | None
    """Jinja source; None where the checkpoint has none, so that chat requests are refused."""
    special_tokens: dict[str, str]
    """`bos_token`, `eos_token`, … → their text."""
    block_size: int
    hash_seed: str
    max_model_len: int
    """Tokens of prompt and output together."""
    images: ImageRules | None = None
    """None: the model reads text alone."""

    @property
    def digest(self) -> str:
        """SHA-256 of the content, hexadecimal: equal digests mean equal tokens and hashes."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def to_json(self) -> bytes:
        """The canonical JSON document."""
        return msgspec.json.encode(self, order="deterministic")

    @staticmethod
    def from_json(data: bytes) -> "PromptBundle":
        """The bundle of a document; raises `BundleError` on anything else."""
        try:
            return msgspec.json.decode(data, type=PromptBundle)
        except msgspec.MsgspecError as error:
            raise BundleError(f"not a prompt bundle: {error}") from None

    @staticmethod
    def from_checkpoint(
        path: Path,
        *,
        served_names: tuple[str, ...],
        block_size: int,
        hash_seed: str,
        max_model_len: int,
        images: ImageRules | None = None,
    ) -> "PromptBundle":
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja of a folder in Hugging Face format.

        Raises `BundleError` where tokenizer.json is missing or a file cannot be read.
        """
        config = _tokenizer_config(path / "tokenizer_config.json")
        return PromptBundle(
            served_names=served_names,
            tokenizer=_read(path / "tokenizer.json"),
            chat_template=_chat_template(path, config),
            special_tokens=_special_tokens(config),
            block_size=block_size,
            hash_seed=hash_seed,
            max_model_len=max_model_len,
            images=images,
        )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"cannot read {file}: {error}") from None


def _tokenizer_config(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        return msgspec.json.decode(_read(file), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BundleError(f"{file} is not a JSON object: {error}") from None


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over `chat_template` of tokenizer_config.json, as in transformers."""
    file = path / "chat_template.jinja"
    if file.exists():
        return _read(file)
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones: [{"name": …, "template": …}]
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise BundleError(f"chat_template in {path / 'tokenizer_config.json'} is neither text nor a list with a default")
    return template


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Plain strings and `AddedToken` objects alike."""
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens
