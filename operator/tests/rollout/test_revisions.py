"""What a model's replicas run, and that a newer operator changes nothing of it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.resources import InferenceModel
from penstock.operator.rollout.revisions import HISTORY, Resolution, pod_revisions, resolve, shape

Object = dict[str, Any]
MADE = "2026-01-31T12:00:00Z"


class Operator:
    """An operator whose templates say which version of it made them; its revisions outlive it."""

    def __init__(self) -> None:
        self.version = 1
        self.revisions: dict[str, Object] = {}

    def look(self, model: InferenceModel, running: frozenset[str] = frozenset()) -> Resolution:
        found = resolve(model, list(self.revisions.values()), running, self._render, self.version)
        name = found.current["metadata"]["name"]
        self.revisions = {old: it for old, it in self.revisions.items() if old in found.kept}
        self.revisions[name] = json.loads(json.dumps(found.current))  # as the API server gives it back
        return found

    def _render(self, model: InferenceModel, pool: Any) -> Object:
        words = [model.spec.source.uri, model.spec.engine.dtype, pool.template, model.spec.rollout.restarted_at]
        label = f"{self.version}-{json.dumps(words)}"
        return {"metadata": {"labels": {"penstock.dev/revision": label}}, "spec": {"operator": self.version}}


@pytest.fixture
def operator() -> Operator:
    return Operator()


def test_a_newer_operator_renders_what_there_is_byte_for_byte_as_before(operator: Operator, make: Any) -> None:
    before = operator.look(make.model())
    operator.version = 2
    after = operator.look(make.model(replicas=3, rollout={"paused": True}, routing={"policy": "Random"}))
    assert json.dumps(after.templates) == json.dumps(before.templates)
    assert after.current == before.current
    changed = operator.look(make.model(engine={"dtype": "float32"}))
    assert changed.templates["main"]["spec"] == {"operator": 2}
    assert changed.current["revision"] == 2


def test_only_the_pool_that_changes_takes_the_newer_templates(operator: Operator, make: Any) -> None:
    pools = [{"name": "a"}, {"name": "b"}]
    operator.look(make.model(pools=pools))
    operator.version = 2
    pools[1]["template"] = {"spec": {"nodeSelector": {"x": "y"}}}  # type: ignore[assignment]
    made = operator.look(make.model(pools=pools)).templates
    assert [made[name]["spec"] for name in "ab"] == [{"operator": 1}, {"operator": 2}]


def test_what_a_pool_costs_and_how_it_scales_is_no_new_revision(operator: Operator, make: Any) -> None:
    """Under templates of an older operator too, which a new revision would replace."""
    pools: list[Object] = [{"name": "a", "cost": 1}, {"name": "b"}]
    first = operator.look(make.model(pools=pools))
    operator.version = 2
    pools[0] |= {"cost": 2, "scaling": {"min": 1, "max": 4}}
    pools[1] |= {"cost": 3}
    after = operator.look(make.model(pools=pools))
    assert after.current == first.current
    assert after.templates == first.templates


def test_an_old_spec_is_the_old_revision_again_with_the_next_number(operator: Operator, make: Any) -> None:
    first = operator.look(make.model())
    operator.look(make.model(engine={"dtype": "float32"}))
    operator.version = 2
    undone = operator.look(make.model())
    assert undone.templates == first.templates
    assert undone.current["metadata"]["name"] == first.current["metadata"]["name"]
    assert (first.current["revision"], undone.current["revision"]) == (1, 3)


def test_a_restart_replaces_replicas_once_and_takes_the_newer_templates(operator: Operator, make: Any) -> None:
    first = operator.look(make.model())
    operator.version = 2
    restarted = operator.look(make.model(rollout={"restartedAt": MADE}))
    assert pod_revisions(restarted.current) != pod_revisions(first.current)
    assert restarted.templates["main"]["spec"] == {"operator": 2}
    operator.version = 3
    assert operator.look(make.model(rollout={"restartedAt": MADE})).current == restarted.current
    assert operator.look(make.model()).current == restarted.current, "to forget a restart restarts nothing"


def test_fields_that_a_newer_version_adds_with_a_default_change_nothing(make: Any) -> None:
    """The API server writes defaults of leaves into what users wrote."""
    written = make.model(pools=[{"name": "main", "role": "Both"}], drainTimeout="120s", rollout={"progressDeadline": "30m"})
    assert shape(written) == shape(make.model())
    assert shape(make.model(rollout={"progressDeadline": "5m"})) != shape(make.model())


SPECS = st.fixed_dictionaries(
    {"engine": st.sampled_from([{}, {"dtype": "float32"}, {"dtype": "bfloat16"}, {"image": "i"}])},
    optional={
        "replicas": st.integers(0, 3),
        "rollout": st.sampled_from([{"paused": True}, {"restartedAt": MADE}, {"restartedAt": "2026-02-01T00:00:00Z"}]),
    },
)


@given(st.lists(st.tuples(SPECS, st.booleans()), max_size=12))
def test_at_any_time_an_upgrade_changes_nothing_and_the_newest_number_is_the_present(history: list[tuple[Any, bool]]) -> None:
    operator = Operator()
    for spec, upgraded in history:
        base = {"served": {"name": "m"}, "source": {"uri": "/m"}, "pools": [{"name": "main"}]}
        head = {"apiVersion": "penstock.dev/v1alpha1", "kind": "InferenceModel", "metadata": {"name": "m"}}
        model = InferenceModel.parse({**head, "spec": {**base, **spec}})
        found = operator.look(model)
        if upgraded:
            operator.version += 1
            assert operator.look(model) == found
        assert found.current["revision"] == max(it["revision"] for it in operator.revisions.values())
        assert len(operator.revisions) <= HISTORY + 1
        numbers = [it["revision"] for it in operator.revisions.values()]
        assert len(set(numbers)) == len(numbers)


def test_a_revision_that_pods_still_run_is_kept(operator: Operator, make: Any) -> None:
    first = operator.look(make.model())
    running = frozenset(pod_revisions(first.current).values())
    for number in range(HISTORY + 3):
        found = operator.look(make.model(source={"uri": f"/m{number}"}), running)
    assert first.current["metadata"]["name"] in found.kept
    assert len(found.kept) == HISTORY + 1
