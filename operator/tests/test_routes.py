"""What the gateways say of a model."""

from typing import Any

from penstock.api.fleet import NameConflict, PoolLoad, PoolsView
from penstock.operator.routes import Routes, Routing
from penstock.operator.store import Key

KEY = Key("InferenceModel", "default", "tiny")


def view(gateway: str, *pools: str, refused: str | None = None, **fields: Any) -> PoolsView:
    loads = [PoolLoad(id=f"default/tiny/{pool}", model="default/tiny", held=0, replicas=[], refused=refused) for pool in pools]
    return PoolsView(gateway=gateway, version=1, pools=loads, **fields)


def test_gateways_are_asked_what_they_know_refuse_and_have_given_away() -> None:
    turns: list[Any] = []
    routes = Routes(turns.append)
    assert routes.of(KEY, ["main"]) == Routing()
    routes.told([view("a", "main"), view("b")], 3)
    assert routes.of(KEY, ["main"]) == Routing(asked=3, answered=2, ignorant=1)
    assert routes.of(KEY, ["main", "more"]).ignorant == 2
    routes.told([view("a", "main", refused="no such cert"), view("b", "main")], 2)
    assert turns == [None, None]
    assert routes.of(KEY, ["main"]).refused == "no such cert"
    lost = NameConflict(name="tiny", claimant="InferenceModel default/tiny", holder="InferenceModel other/tiny")
    routes.told([view("a", "main", conflicts=[lost]), view("b", "main", conflicts=[lost])], 2)
    conflict = routes.of(KEY, ["main"]).conflict
    assert conflict == "'tiny' is served by InferenceModel other/tiny, which is older: choose another name"
    assert routes.of(Key("InferenceModel", "other", "tiny"), []).conflict == ""
    adapter = NameConflict(name="sql", claimant="LoraAdapter default/sql", holder="InferenceModel other/sql")
    other = [view("a", "main", conflicts=[lost, adapter]), view("b", "main", conflicts=[lost])]
    other[1].pools.append(PoolLoad(id="team/llama/x", model="team/llama", held=0, replicas=[]))
    routes.told(other, 2)
    # How many answer concerns all models; what one of them says, those that it is about.
    assert turns == [None, None, {KEY}, {Key("LoraAdapter", "default", "sql"), Key("InferenceModel", "team", "llama")}]


def test_only_another_answer_is_news() -> None:
    turns: list[Any] = []
    routes = Routes(turns.append)
    for _ in range(3):
        routes.told([view("b", "main"), view("a", "main")], 2)
        routes.told([view("a", "main"), view("b", "main")], 2)
    assert len(turns) == 1
