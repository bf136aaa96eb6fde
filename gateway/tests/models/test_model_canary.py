"""The share of a canary: as large as it says, the same for a conversation at each turn, never to a model that cannot serve."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.api.fleet import Canary, Model
from penstock.gateway.models.canary import conversation_key, side

MAIN = Model(id="d/main", served_names=["main"])


def canary(name: str, weight: float) -> Model:
    return Model(id=f"d/{name}", served_names=[name], canary=Canary(of="main", weight=weight))


def shares(canaries: list[Model], count: int = 4000) -> dict[str, float]:
    """Percent of so many conversations by model."""
    taken = [side(MAIN, canaries, str(n).encode(), lambda _: True).id for n in range(count)]
    return {model.id: 100 * taken.count(model.id) / count for model in (MAIN, *canaries)}


def test_the_observed_share_is_the_weight() -> None:
    for weight in (0, 1, 5, 50, 99, 100):
        observed = shares([canary("new", weight)])["d/new"]
        spread = 4 * (weight * (100 - weight) / 4000) ** 0.5  # four standard deviations
        assert abs(observed - weight) <= spread
    two = shares([canary("one", 10), canary("two", 20)])
    assert abs(two["d/one"] - 10) < 2 and abs(two["d/two"] - 20) < 2.6
    full = shares([canary("one", 70), canary("two", 70)])
    assert full["d/main"] == 0 and abs(full["d/one"] - 70) < 3


@given(key=st.binary(max_size=40), low=st.integers(0, 100), more=st.integers(0, 100))
def test_a_rising_weight_moves_nobody_back(key: bytes, low: int, more: int) -> None:
    def taken(weight: int) -> bool:
        return side(MAIN, [canary("new", weight)], key, lambda _: True) is not MAIN

    assert not taken(low) or taken(min(100, low + more))


def test_a_canary_that_cannot_serve_leaves_its_share_to_the_model() -> None:
    dead, live = canary("dead", 40), canary("live", 40)
    taken = [side(MAIN, [dead, live], str(n).encode(), lambda model: model is live).id for n in range(500)]
    assert set(taken) == {"d/main", "d/live"}
    assert taken.count("d/live") < 260  # not the dead one's share too


def chat(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def key(fields: dict[str, Any], tenant: str = "", request_id: str = "r") -> bytes:
    return conversation_key(fields, tenant, request_id)


def test_a_conversation_has_one_key_at_each_turn() -> None:
    first = chat(("system", "Be brief."), ("user", "Hello"))
    later = chat(("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi."), ("user", "And now?"))
    assert key(first, request_id="1") == key(later, request_id="2")
    assert key(first) != key(chat(("system", "Be brief."), ("user", "Good day")))
    assert key(first) != key(chat(("system", "Be long."), ("user", "Hello")))
    assert key(first) != key(first, tenant="other")
    parts = [{"type": "text", "text": "Hello"}, {"type": "image_url", "image_url": {"url": "data:" + "x" * 100_000}}]
    assert key(chat(("user", parts)), request_id="1") == key(chat(("user", parts), ("assistant", "Hi.")), request_id="2")
    assert key({"input": "Hello", "instructions": "Be brief."}) == key({"input": "Hello", "instructions": "Be brief."})
    assert key({"input": "Hello"}) != key({"input": "Hello", "instructions": "Be brief."})


def test_the_clients_own_cache_key_counts_first() -> None:
    one = {**chat(("user", "Hello")), "prompt_cache_key": "thread-7"}
    two = {**chat(("user", "Something else")), "prompt_cache_key": "thread-7"}
    assert key(one, request_id="1") == key(two, request_id="2") != key(chat(("user", "Hello")))


def test_what_is_no_conversation_is_drawn_by_its_id() -> None:
    for fields in ({"prompt": "Hello"}, chat(("system", "Be brief.")), {"messages": ["nonsense"]}, {"messages": 3}, {}):
        assert key(fields, request_id="1") == key(fields, request_id="1") != key(fields, request_id="2")


@given(fields=st.dictionaries(st.sampled_from(["messages", "input", "instructions", "prompt_cache_key"]), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "text"]), inner, max_size=3),
)))  # fmt: skip
def test_no_body_is_too_strange(fields: dict[str, Any]) -> None:
    assert key(fields) == key(fields)
