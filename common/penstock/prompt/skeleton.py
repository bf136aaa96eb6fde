"""What a chat template writes around contents that it only copies: the same for all chats whose messages have the same roles."""

from typing import Any, NamedTuple, NoReturn

from penstock.prompt.errors import BeyondError


class Gap(NamedTuple):
    """Where a message's content goes."""

    message: int
    trimmed: bool
    """Without the spaces around it."""


class Content:
    """Stands for a message's content in a template that is rendered, or for a text that has some in it.

    A template may copy it, put it together with other text, trim it, and ask whether it is a string or empty. Whatever else it
    asks raises, since the answer depends on the content.

    Args:
        parts: Of the text.
        filled: Whether it is not empty; None: nobody knows.
    """

    __slots__ = ("filled", "parts")
    __hash__ = None  # type: ignore[assignment] - nothing can be asked of it by look-ups

    def __init__(self, parts: "tuple[str | Gap, ...]", filled: bool | None) -> None:
        self.parts, self.filled = parts, filled

    def __bool__(self) -> bool:
        return _beyond() if self.filled is None else self.filled

    def __add__(self, other: Any) -> "Content":
        return joined([self, other])

    def __radd__(self, other: Any) -> "Content":
        return joined([other, self])

    def __eq__(self, other: object) -> NoReturn:
        _beyond()

    def __repr__(self) -> NoReturn:
        _beyond()


def joined(texts: list[Any]) -> Content:
    """Texts, each of them a string or a `Content`, one after the other."""
    parts: list[str | Gap] = []
    filled: bool | None = False
    for text in texts:
        if type(text) is Content:
            it = text
        elif type(text) is str:
            it = Content((text,), bool(text))
        else:
            _beyond()
        filled = True if filled or it.filled else None if filled is None or it.filled is None else False
        for part in it.parts:
            if type(part) is str and parts and type(last := parts[-1]) is str:
                parts[-1] = last + part
            elif part != "":
                parts.append(part)
    return Content(tuple(parts), filled)


def written(value: Any) -> Any:
    """What a template writes of a value."""
    return value if type(value) is Content else str(value)


def trimmed(value: Any) -> Any:
    """Without the spaces around it."""
    if type(value) is str:
        return value.strip()
    if type(value) is Content and len(value.parts) == 1 and type(gap := value.parts[0]) is Gap:
        return Content((Gap(gap.message, True),), None if value.filled else value.filled)
    return _beyond()


def _beyond() -> NoReturn:
    raise BeyondError
