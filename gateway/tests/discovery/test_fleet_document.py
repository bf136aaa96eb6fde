"""The format of `--discovery file:`: short forms, faults by name and place, and the schema and example in the documents."""

import json
from pathlib import Path

import pytest

from penstock.api.fleet import Fleet
from penstock.gateway.discovery.document import parse, schema

ROOT = Path(__file__).resolve().parents[3]


def test_what_is_left_out_is_filled_in() -> None:
    fleet = parse(
        b'{"models": ["acme/small"], "replicas": ["10.0.0.1:8000", "[fd00::1]:8000=vllm", {"host": "10.0.0.2", "port": 1}]}'
    )
    (model,), (pool,), (first, second, third) = fleet.models, fleet.pools, fleet.replicas
    assert (model.id, model.served_names, pool.id, pool.model) == (
        "default/acme.small",
        ["acme/small"],
        "default/acme.small/default",
        "default/acme.small",
    )
    assert {it.pool for it in fleet.replicas} == {pool.id}
    assert (first.uid, first.name, first.engine, first.ready, first.events_port) == (
        "10.0.0.1:8000",
        "10.0.0.1:8000",
        "auto",
        True,
        0,
    )
    assert (second.endpoint, second.engine, third.engine) == ("[fd00::1]:8000", "vllm", "auto")


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ('{"endpoints": [{"address": "10.0.0.1"}]}', "unknown field `endpoints`"),
        (
            '{"models": ["m"], "replicas": [{"host": "10.0.0.1", "port": 1, "prot": 2}]}',
            "unknown field `prot` - at `$.replicas[0]`",
        ),
        ('{"models": [{"served_names": ["m"], "weights": {"prefx": 1}}]}', "unknown field `prefx` - at `$.models[0].weights`"),
        ('{"models": ["m"], "pools": [{"id": "default/m/p", "rol": "Both"}]}', "unknown field `rol` - at `$.pools[0]`"),
        ('{"adapters": [{"id": "a", "model": "m", "names": []}]}', "at `$.adapters[0]`"),
        ('{"models": ["m"], "replicas": ["localhost:8000"]}', "replicas[0]: 'localhost:8000': 'localhost' is not an IP address"),
        ('{"models": ["m"], "replicas": ["10.0.0.1:8000=vlm"]}', "replicas[0]: '10.0.0.1:8000=vlm': 'vlm' is not an engine"),
        ('{"models": ["m"], "replicas": ["10.0.0.1:99999"]}', "replicas[0]: '10.0.0.1:99999' is not IP:PORT"),
        ('{"models": ["a", "b"], "replicas": ["10.0.0.1:1"]}', "replicas[0]: 'pool' can be left out only with one of them"),
        ('{"models": [{"served_names": []}]}', "models[0]: a model needs an id or a served name"),
        ('{"models": ["a", "b"], "pools": [{"id": "p"}]}', "pools[0]: 'model' can be left out only with one of them"),
    ],
)
def test_faults_are_told_by_name_and_place(document: str, fault: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse(document.encode())
    assert fault in str(refused.value)


def test_the_example_of_the_documents_is_a_fleet() -> None:
    fleet = parse((ROOT / "examples/fleet.json").read_bytes())
    assert {len(fleet.models), len(fleet.pools)} == {2}
    assert fleet != Fleet() and len(fleet.replicas) == 4


def test_the_schema_of_the_documents_is_that_of_the_code() -> None:
    path = ROOT / "docs/gateway/fleet.schema.json"
    assert json.loads(path.read_text()) == schema(), "write it anew: make fleet-schema"
