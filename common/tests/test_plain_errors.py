"""What people read where checked data is wrong."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from penstock.plain_errors import explained
from penstock.suggest import suggestion


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    n: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(gt=0, lt=2)] = 1.0
    stop: str | list[Annotated[str, Meta(min_length=1)]] = ""
    side: Literal["left", "right"] | Literal["both"] | None = None
    inner: Inner = Inner()
    inners: list[Inner] = []
    bias: dict[int, Annotated[float, Meta(le=100)]] = {}
    few: Annotated[list[int], Meta(max_length=2)] = []


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"n": "5"}, "n", "must be a whole number, not a string"),
        ({"n": 1.5}, "n", "must be a whole number, not a fraction"),
        ({"n": 0}, "n", "must be at least 1"),
        ({"temperature": 2}, "temperature", "must be below 2"),
        ({"temperature": 0}, "temperature", "must be above 0"),
        ({"stop": 5}, "stop", "must be a string or a list, not a whole number"),
        ({"stop": ["a", ""]}, "stop[1]", "must have at least 1 character"),
        ({"few": [1, 2, 3]}, "few", "must have at most 2 items"),
        ({"side": "up"}, "side", "must be both, left or right, not 'up'"),
        ({"bias": {"a": 1}}, "bias", "a key must be a whole number, not a string"),
        ({"bias": {"1": 101}}, "bias", "a value must be at most 100"),
        ({"inner": {"include_usge": True}}, "inner.include_usge", "there is no such field; did you mean include_usage?"),
        ({"inners": [{"x": True}]}, "inners[0].x", "there is no such field"),
        ({"inners": {}}, "inners", "must be a list, not an object"),
        ({"model": None}, "model", "must be a string, not null"),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(given: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"model": "m", **given}, Outer, str_keys=True)
    assert explained(caught.value, Outer) == (field, words)
    assert str(explained(caught.value, Outer)) == f"{field}: {words}"


def test_a_missing_field_is_named() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({}, Outer)
    assert str(explained(caught.value)) == "model: is missing"


def test_only_close_names_are_suggested() -> None:
    assert suggestion("max_token", ["max_tokens", "min_tokens"]) == "; did you mean max_tokens?"
    assert suggestion("colour", ["max_tokens", "min_tokens"]) == ""
