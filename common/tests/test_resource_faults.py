"""What is wrong with a resource, in words: none of pydantic's own."""

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.api.resources import InferenceModel
from penstock.api.resources.faults import faults


def said(**changes: Any) -> str:
    spec = {"served": {"name": "m"}, "source": {"uri": "/m"}, "pools": [{"name": "main"}], **changes}
    resource = {"apiVersion": "penstock.dev/v1alpha1", "kind": "InferenceModel", "metadata": {"name": "m"}, "spec": spec}
    with pytest.raises(ValidationError) as raised:
        InferenceModel.parse(resource)
    return faults(raised.value, InferenceModel)


def pool(**fields: Any) -> dict[str, Any]:
    return {"pools": [{"name": "main"}, {"name": "b", **fields}]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"served": {}}, "spec.served.name: is missing"),
        ({"served": {"name": 1}}, "spec.served.name: must be a string, not 1"),
        ({"served": {"name": ""}}, "spec.served.name: must have at least 1 character, not ''"),
        ({"replicas": "2"}, "spec.replicas: must be a whole number, not '2'"),
        ({"replicas": True}, "spec.replicas: must be a whole number, not true"),
        ({"pools": []}, "spec.pools: must have at least 1 item"),
        ({"pools": {}}, "spec.pools: must be a list, not an object"),
        ({"source": "/m"}, "spec.source: must be an object, not '/m'"),
        ({"source": None}, "spec.source: must be an object, not null"),
        ({"lora": {"slots": 0, "sources": []}}, "spec.lora.slots: must be at least 1, not 0"),
        (
            {"engine": {"speculative": {"method": "auto", "tokens": 99}}},
            "spec.engine.speculative.tokens: must be at most 32, not 99",
        ),
        (pool(role="X"), "spec.pools[1].role: must be 'Both', 'Prefill' or 'Decode', not 'X'"),
        (pool(scaleing={}), "spec.pools[1].scaleing: there is no such field; did you mean scaling?"),
        (pool(scaling={"max": 2, "target": {}}), "spec.pools[1].scaling.target: there is no such field; did you mean targets?"),
        (pool(zzz=1), "spec.pools[1].zzz: there is no such field"),
        ({"rollout": {"progressDeadline": "1 h"}}, "spec.rollout.progressDeadline: '1 h' does not match ^"),
        ({"served": {"name": "m", "aliases": ["a"] * 99}}, "spec.served.aliases: must have at most 16 items"),
        ({"served": {"name": "x" * 200}}, "spec.served.name: must have at most 128 characters, not 'xxx"),
    ],
)
def test_each_kind_of_fault_names_its_place_and_what_it_must_be(changes: dict[str, Any], words: str) -> None:
    text = said(**changes)
    assert text.startswith(words)
    assert len(text) < 200
    assert not any(own in text for own in ("Input should", "Extra inputs", "Field required", "valid", "Value error"))


def test_several_faults_are_told_at_once() -> None:
    assert said(served={}, replicas="x") == "spec.served.name: is missing; spec.replicas: must be a whole number, not 'x'"
