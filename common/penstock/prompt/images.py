"""Images in requests, as engine and picker see them before anybody decodes one."""

from typing import NamedTuple


class ImagePart(NamedTuple):
    """A part of a message that holds an image."""

    url: str
    """`data:` and the file itself, or where the file is."""
    param: str
    """The request's field, such as `messages[0].content[1].image_url.url`."""
