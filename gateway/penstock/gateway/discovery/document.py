"""The format of `--discovery file:PATH`: a fleet in JSON, where what can be left out may be left out.

A model may be its served name alone, a replica its address alone. Fields that do not exist are refused by name and place.
"""

import json
import sys
from typing import Any

import msgspec

from penstock.api import fleet
from penstock.api.fleet import Engine, Fleet
from penstock.gateway.discovery.address import Address, address_of
from penstock.gateway.discovery.check import check

NAMESPACE = "default"
"""Namespace of models whose id is left out."""
POOL = "default"
"""The name of a model's pool where the file names none."""


class ModelEntry(fleet.Model, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model; without an id it is `default/NAME`."""

    id: str = ""


class PoolEntry(fleet.Pool, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool; the model can be left out where there is one."""

    model: str = ""


class ReplicaEntry(fleet.Replica, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica; the pool can be left out where there is one. `uid` and `name` are its address unless they are given."""

    uid: str = ""
    name: str = ""
    pool: str = ""
    events_port: int = 0
    replay_port: int = 0
    engine: Engine = "auto"
    ready: bool = True


class FleetFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    models: list[ModelEntry | str] = []
    pools: list[PoolEntry] = []
    replicas: list[ReplicaEntry | str] = []
    adapters: list[fleet.Adapter] = []
    inference_pools: list[fleet.InferencePool] = []
    scaling: dict[str, str] = {}


def parse(content: bytes) -> Fleet:
    """Parse the content of a fleet file.

    Raises:
        ValueError: the message names the place and the fault.
        RecursionError: the JSON is nested too deeply.
    """
    document = msgspec.json.decode(content, type=FleetFile)
    models = [_model(entry, f"models[{index}]") for index, entry in enumerate(document.models)]
    pools = [_pool(entry, models, f"pools[{index}]") for index, entry in enumerate(document.pools)]
    with_pools = {pool.model for pool in pools}
    pools += [fleet.Pool(id=f"{model.id}/{POOL}", model=model.id) for model in models if model.id not in with_pools]
    replicas = [_replica(entry, pools, f"replicas[{index}]") for index, entry in enumerate(document.replicas)]
    found = Fleet(
        models=models,
        pools=pools,
        replicas=replicas,
        adapters=document.adapters,
        inference_pools=document.inference_pools,
        scaling=document.scaling,
    )
    check(found)
    return found


def schema() -> dict[str, object]:
    """The JSON schema of the format."""
    made = msgspec.json.schema(FleetFile, ref_template="#/$defs/{name}")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A fleet of `penstock gateway`", **made}


def model_id_of(name: str) -> str:
    """Return the id of a model of which only a served name is known. An id has one slash, as have names of the Hub."""
    return f"{NAMESPACE}/{name.replace('/', '.')}"


def _model(entry: ModelEntry | str, place: str) -> fleet.Model:
    fields: dict[str, Any] = {"served_names": [entry]} if isinstance(entry, str) else _fields(entry)
    if not fields.get("id"):
        if not fields["served_names"] or not fields["served_names"][0]:
            raise ValueError(f"{place}: a model needs an id or a served name")
        fields["id"] = model_id_of(fields["served_names"][0])
    return fleet.Model(**fields)


def _pool(entry: PoolEntry, models: list[fleet.Model], place: str) -> fleet.Pool:
    fields = _fields(entry)
    fields["model"] = entry.model or _only([model.id for model in models], "model", "models", place)
    return fleet.Pool(**fields)


def _replica(entry: ReplicaEntry | str, pools: list[fleet.Pool], place: str) -> fleet.Replica:
    if isinstance(entry, str):
        try:
            address = address_of(entry)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        fields = _fields(ReplicaEntry(host=address.host, port=address.port, engine=address.engine))
    else:
        fields = _fields(entry)
        address = Address(entry.host, entry.port, entry.engine)
    fields["uid"] = fields["uid"] or address.text
    fields["name"] = fields["name"] or address.text
    fields["pool"] = fields["pool"] or _only([pool.id for pool in pools], "pool", "pools", place)
    return fleet.Replica(**fields)


def _only(there: list[str], field: str, of: str, place: str) -> str:
    """The one that is meant where nothing is said."""
    if len(there) != 1:
        what = f"there are {len(there)} {of}: {', '.join(there)}" if there else f"there are no {of}"
        raise ValueError(f"{place}: {field!r} can be left out only with one of them, but {what}")
    return there[0]


def _fields(entry: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__struct_fields__}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(schema(), indent=2) + "\n")
