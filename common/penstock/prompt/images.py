"""Images in requests, as engine and picker see them before anybody decodes one: the parts that hold them, their names, and their
places among a prompt's tokens."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from penstock.prompt.errors import PromptError
from penstock.prompt.hashing import PromptItem
from penstock.prompt.image_size import DynamicSize, TiledSize, TowerCost, image_size, is_turned

MM_KWARGS: Final = "mm_processor_kwargs"
"""The field of a chat that says how its images are prepared."""
_LIMITS: Final = ("max_pixels", "min_pixels")
_DETAILS: Final = ("auto", "low", "high")
_OTHERS: Final = {"video_url": "videos", "input_audio": "audio", "audio_url": "audio", "image_embeds": "embeddings of images"}


_USUAL: Final = (1024, 1024)
"""Height and width where nobody knows."""


class ImageCounts(NamedTuple):
    """What an image takes."""

    tokens: int
    """Placeholders, one for each of its embeddings."""
    cost: int
    """Of the tower's run, in tokens of text that take as long."""


class ImageRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's prompts show images."""

    token_id: int
    """The placeholder."""
    begin_id: int | None = None
    """What a template writes for an image, as Gemma's do. None: it writes the placeholder."""
    end_id: int | None = None
    """What ends an image, where there is a `begin_id`: the prompt has the placeholders between both, and empty lines around."""
    tokens: int
    """Placeholders of an image in the end, one for each of its embeddings; of the largest, where that depends on its size."""
    size: DynamicSize | TiledSize | None = None
    """None: all images have as many."""
    pixels: int = 0
    """That the tower reads of an image, where all have as many."""
    cost: TowerCost = TowerCost()

    def sized(self, size: DynamicSize | None) -> "ImageRules":
        """With the size that a request wants; see `ImagePart`."""
        return self if size is None else msgspec.structs.replace(self, size=size)

    def counts(self, height: int, width: int) -> ImageCounts:
        """Of an image of this size."""
        if self.size is None:
            return ImageCounts(self.tokens, self.cost.tokens(self.pixels))
        return ImageCounts(self.size.tokens(height, width), self.cost.tokens(self.size.pixels(height, width)))

    def counts_of(self, data: bytes) -> ImageCounts | None:
        """Of the image in a file; None where its header does not tell."""
        if self.size is None:
            return self.counts(*_USUAL)
        stated = image_size(data)
        if stated is None:
            return None
        found, turned = self.counts(*stated), self.counts(*reversed(stated))
        if found.tokens == turned.tokens:
            return found
        return {None: None, False: found, True: turned}[is_turned(data)]

    @property
    def usual(self) -> ImageCounts:
        """Of an image that nobody has seen."""
        found = self.counts(*_USUAL)
        return found._replace(tokens=min(self.tokens, found.tokens))


class ImagePart(NamedTuple):
    """A part of a message that holds an image."""

    url: str
    """`data:` and the file itself, or where the file is."""
    param: str
    """The request's field, such as `messages[0].content[1].image_url.url`."""
    size: DynamicSize | None = None
    """In which the request wants it read; None: as the server reads others."""

    def name(self, data: bytes) -> str:
        """Of the image, given its file; see `image_name`."""
        return image_name(data, self.size)


class PlacedPrompt(NamedTuple):
    """A prompt with room for its images."""

    token_ids: list[int]
    items: tuple[PromptItem, ...]
    """The images, in prompt order."""


def image_name(data: bytes, size: DynamicSize | None = None) -> str:
    """An image's name by the content of its file, and by the size in which a request wants it read: equal names mean equal
    embeddings."""
    name = hashlib.sha256(data).hexdigest()
    return name if size is None else "/".join([name, *(f"{limit}={getattr(size, limit)}" for limit in _LIMITS)])


def read_mm_kwargs(body: Mapping[str, Any], rules: ImageRules | None) -> DynamicSize | None:
    """The size in which a chat wants its images read; None: as the server reads others.

    Raises:
        PromptError: A limit that the model does not take, or beyond the server's; the message names the field.
    """
    given = body.get(MM_KWARGS)
    if given is None or given == {}:
        return None
    if not isinstance(given, dict):
        raise PromptError(f"{MM_KWARGS} must be an object", MM_KWARGS)
    usual = None if rules is None else rules.size
    known = _LIMITS if isinstance(usual, DynamicSize) else ()
    for field, value in given.items():
        where = f"{MM_KWARGS}.{field}"
        if field not in known:
            takes = f"this model takes {' and '.join(known)}" if known else "this model takes none"
            raise PromptError(f"{where} is not supported: {takes}", where)
        if type(value) is not int:
            raise PromptError(f"{where} must be a whole number", where)
    assert isinstance(usual, DynamicSize)
    wanted = DynamicSize(factor=usual.factor, **{limit: given.get(limit, getattr(usual, limit)) for limit in _LIMITS})
    if not usual.factor**2 <= wanted.min_pixels <= wanted.max_pixels <= usual.max_pixels:
        raise PromptError(
            f"{MM_KWARGS}: min_pixels {wanted.min_pixels} and max_pixels {wanted.max_pixels} must be {usual.factor**2} to "
            f"{usual.max_pixels}, and the former no more than the latter",
            MM_KWARGS,
        )
    return None if wanted == usual else wanted


def read_image_part(part: dict[str, Any], where: str) -> ImagePart:
    """A part of a chat's message with the type `image_url`; raises `PromptError` naming the field."""
    _only(part, ("type", "image_url"), where)
    image = part.get("image_url")
    if not isinstance(image, dict) or not isinstance(image.get("url"), str):
        raise PromptError(f"{where}.image_url must be an object with url", f"{where}.image_url")
    _only(image, ("url", "detail"), f"{where}.image_url")
    check_detail(image.get("detail"), f"{where}.image_url.detail")
    return ImagePart(image["url"], f"{where}.image_url.url")


def check_detail(detail: Any, where: str) -> None:
    """Images are read as the model was trained to, whatever of these is asked for; raises `PromptError` for anything else."""
    if detail is not None and detail not in _DETAILS:
        raise PromptError(f"{where} must be one of {', '.join(_DETAILS)}", where)


def refuse_part(kind: Any, where: str, text_kind: str, reads_images: bool) -> PromptError:
    """What is wrong with a part that no model here reads, or not this one."""
    if isinstance(kind, str) and kind in _OTHERS:
        return PromptError(f"{where} is of type {kind}: {_OTHERS[kind]} are not supported", where)
    reads = "text and images" if reads_images else "text"
    return PromptError(f"{where} must be {text_kind} part; this model reads {reads} alone", where)


def _only(given: dict[str, Any], fields: Sequence[str], where: str) -> None:
    for field in given:
        if field not in fields:
            raise PromptError(f"{where}.{field} is not supported", f"{where}.{field}")


def place(token_ids: list[int], token_id: int, images: Sequence[tuple[str, int]], param: str) -> PlacedPrompt:
    """Puts as many placeholders in the place of each as its image has embeddings.

    Args:
        token_ids: Of the prompt, with one placeholder an image.
        token_id: The placeholder.
        images: Name and embeddings of each.
        param: The field that holds the prompt.

    Raises:
        PromptError: There are more or fewer placeholders than images: a text holds one, or the template has left one out.
    """
    found = token_ids.count(token_id)
    if found != len(images):
        message = f"{param}: the prompt has {found} placeholders for {len(images)} images; a text must not hold a placeholder"
        raise PromptError(message, param)
    placed: list[int] = []
    items: list[PromptItem] = []
    start = 0
    for name, count in images:
        end = token_ids.index(token_id, start)
        placed += token_ids[start:end]
        items.append(PromptItem(name, len(placed), count))
        placed += [token_id] * count
        start = end + 1
    return PlacedPrompt(placed + token_ids[start:], tuple(items))
