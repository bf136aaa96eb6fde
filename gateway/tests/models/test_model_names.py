"""Who owns a name, whatever the order in which claims are read."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.fleet import Adapter, Canary, Fleet, Model
from penstock.gateway.models.names import Names, unknown


def model(name: str, *names: str, created: float = 1.0, namespace: str = "d", canary: Canary | None = None) -> Model:
    return Model(id=f"{namespace}/{name}", served_names=list(names or (name,)), created=created, canary=canary)


def adapter(name: str, of: str, *names: str, created: float = 1.0) -> Adapter:
    return Adapter(id=f"d/{name}", model=f"d/{of}", served_names=list(names or (name,)), created=created)


@pytest.mark.req("LO-24")
def test_a_name_stands_for_a_model_or_for_a_model_with_an_adapter() -> None:
    names = Names(Fleet(models=[model("m", "llama", "l")], adapters=[adapter("sql", "m", "sql", "text-to-sql")]))
    for name in ("llama", "l"):
        named = names.get(name)
        assert named is not None and (named.model.id, named.adapter, named.name) == ("d/m", None, "llama")
    for name in ("sql", "text-to-sql"):
        named = names.get(name)
        assert named is not None and named.adapter is not None
        assert (named.model.id, named.adapter.id, named.name) == ("d/m", "d/sql", "sql")
    assert names.get("nonesuch") is None


@pytest.mark.parametrize("of", ["model", "adapter"])
def test_an_alias_that_is_the_name_once_more_is_no_rival(of: str) -> None:
    twice = ["llama", "l", "llama"]
    models = [model("m", *twice)] if of == "model" else [model("base")]
    names = Names(Fleet(models=models, adapters=[adapter("sql", "base", *twice)] if of == "adapter" else []))
    assert names.get("llama") is not None
    assert names.conflicts == []


claims = st.lists(
    st.tuples(st.booleans(), st.sets(st.sampled_from("abcdef"), min_size=1), st.integers(0, 3)), min_size=1, max_size=8
)


@given(claims=claims, seed=st.randoms(use_true_random=False))
def test_the_oldest_claim_holds_and_every_other_is_shown(claims: list[tuple[bool, set[str], int]], seed: random.Random) -> None:
    models = [model("base", created=9.0)]
    adapters: list[Adapter] = []
    for number, (is_adapter, names, created) in enumerate(claims):
        if is_adapter:
            adapters.append(adapter(f"x{number}", "base", *sorted(names), created=created))
        else:
            models.append(model(f"x{number}", *sorted(names), created=created))
    everybody = {f"InferenceModel {it.id}": it for it in models} | {f"LoraAdapter {it.id}": it for it in adapters}
    found = Names(Fleet(models=models, adapters=adapters))
    for name in "abcdef":
        claimants = sorted((it.created, who) for who, it in everybody.items() if name in it.served_names)
        named = found.get(name)
        if not claimants:
            assert named is None
            continue
        assert named is not None and (named.adapter or named.model) is everybody[claimants[0][1]]
        losers = [(it.claimant, it.holder) for it in found.conflicts if it.name == name]
        assert sorted(losers) == sorted((who, claimants[0][1]) for _, who in claimants[1:])
    seed.shuffle(models)
    seed.shuffle(adapters)
    again = Names(Fleet(models=models, adapters=adapters))
    assert dict(again.items()) == dict(found.items()) and again.conflicts == found.conflicts


def test_an_adapter_without_its_model_is_not_served_and_takes_nobodys_name() -> None:
    orphan = adapter("old", "gone", "sql", created=1.0)
    names = Names(Fleet(models=[model("m", "sql", created=2.0)], adapters=[orphan]))
    named = names.get("sql")
    assert named is not None and named.adapter is None
    assert (names.orphans, names.conflicts) == ([orphan], [])


def test_a_canary_shares_the_traffic_of_a_model_of_its_namespace() -> None:
    def canary(of: str) -> Canary:
        return Canary(of=of, weight=5)

    main = model("m", "llama", "l")
    fleet = Fleet(
        models=[
            main,
            model("by-alias", created=3.0, canary=canary("l")),
            model("by-name", created=2.0, canary=canary("llama")),
            model("of-nobody", canary=canary("nonesuch")),
            model("of-itself", canary=canary("of-itself")),
            model("of-an-adapter", canary=canary("sql")),
            model("elsewhere", namespace="other", canary=canary("llama")),
        ],
        adapters=[adapter("sql", "m")],
    )
    names = Names(fleet)
    assert [it.id for it in names.canaries(main)] == ["d/by-name", "d/by-alias"]
    assert names.idle_canaries == {
        "d/of-nobody": "there is no model 'nonesuch'",
        "d/of-itself": "'of-itself' is its own name",
        "d/of-an-adapter": "'sql' is an adapter, not a model",
        "other/elsewhere": "'llama' is served from another namespace, by d/m",
    }


def test_an_unknown_name_is_told_of_the_nearest_and_of_not_too_many() -> None:
    names = [f"model-{n:03}" for n in range(500)] + ["llama-8b", "qwen"]
    said = unknown("lama-8b", names)
    assert said.startswith("model 'lama-8b' does not exist; there are: llama-8b, model-000, ")
    assert said.endswith(" and 492 more")
    assert unknown("x", []) == "model 'x' does not exist; there are none yet"
    assert len(unknown("y" * 100_000, names)) < 500
