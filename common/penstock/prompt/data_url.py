"""Images inside requests: `data:image/png;base64,…`."""

import base64
import binascii
from typing import Final

from penstock.prompt.errors import PromptError

MAX_IMAGE_BYTES: Final = 20 * 2**20
"""Largest file of an image, in bytes."""
SCHEME: Final = "data:"
_SHOWN: Final = 40


def data_url(data: bytes) -> str:
    """A URL that holds the file of an image, whose kind its own first bytes tell."""
    return f"{SCHEME}image/*;base64," + base64.b64encode(data).decode()


def read_data_url(url: str, param: str) -> bytes:
    """The file that a `data:` URL holds; raises `PromptError` naming `param`, the field that has it.

    A file that is too large is refused before it is decoded.
    """
    head, comma, data = url.removeprefix(SCHEME).partition(",")
    media_type, *options = head.lower().split(";")
    if not comma or options[-1:] != ["base64"] or not media_type.startswith("image/"):
        shown = url[: url.index(",") if comma else None][:_SHOWN]
        raise PromptError(f"{param} begins with {shown!r}; it must be data:image/TYPE;base64, and the file", param)
    if len(data) * 3 // 4 > MAX_IMAGE_BYTES:
        raise PromptError(f"{param} holds about {len(data) * 3 // 4} bytes; an image has at most {MAX_IMAGE_BYTES}", param)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PromptError(f"{param} is not valid base64: {error}", param) from None
