"""A fixed fleet: the addresses of `--endpoint`. Each endpoint says itself what it serves, by `GET /v1/models`."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

import aiohttp
import msgspec

from penstock.api.fleet import Adapter, Fleet, Model, Pool, Replica
from penstock.gateway.discovery.address import Address
from penstock.gateway.discovery.document import POOL, model_id_of
from penstock.gateway.load.replica_client import ReplicaClient, ReplicaTlsStates
from penstock.gateway.models.served import Served, served_by
from penstock.http.replica_answers import UNREADABLE
from penstock.http.replica_tls import ReplicaTls
from penstock.plain_errors import words_of

log = logging.getLogger(__name__)

PERIOD_S = 2.0


class _Answer(msgspec.Struct, frozen=True):
    """What an endpoint said last."""

    models: list[Served]
    ready: bool
    since: float
    """Unix time of its first answer."""


class EndpointsDiscovery:
    """Asks all endpoints every two seconds. One that has never answered is not part of the fleet; one that stops to answer is not
    ready.

    Args:
        addresses: At least one.
        tls: As for all that the gateway asks of replicas.
    """

    def __init__(self, addresses: Sequence[Address], tls: ReplicaTls | None = None) -> None:
        self._addresses = list(dict.fromkeys(addresses))
        self._tls = tls
        self._answers: dict[Address, _Answer] = {}

    async def watch(self) -> AsyncIterator[Fleet]:
        """Yield the fleet once it is known completely, and again after each change."""
        last = None
        async with aiohttp.ClientSession() as session:
            client = ReplicaClient(session, ReplicaTlsStates(self._tls))
            while True:
                await asyncio.gather(*(self._ask(client, address) for address in self._addresses))
                fleet = fleet_of({it: self._answers[it] for it in self._addresses if it in self._answers})
                if fleet != last:
                    last = fleet
                    yield fleet
                await asyncio.sleep(PERIOD_S)

    async def _ask(self, client: ReplicaClient, address: Address) -> None:
        known = self._answers.get(address)
        try:
            models = await served_by(client, _replica(address, pool="", ready=True))
        except (TimeoutError, *UNREADABLE) as error:
            if known is None or known.ready:
                log.warning("endpoint %s does not say which models it serves: %s", address.text, words_of(error))
            if known is not None:
                self._answers[address] = msgspec.structs.replace(known, ready=False)
            return
        if known is None or not known.ready:
            log.info("endpoint %s serves %s", address.text, ", ".join(it.id for it in models) or "no model")
        self._answers[address] = _Answer(models=models, ready=True, since=time.time() if known is None else known.since)


def fleet_of(answers: Mapping[Address, _Answer]) -> Fleet:
    """The fleet of what endpoints answered. Endpoints that serve the same names are one pool, and names with a parent are
    adapters."""
    groups: dict[frozenset[str], Model] = {}
    adapters: dict[str, Adapter] = {}
    replicas: list[Replica] = []
    for address, answer in answers.items():
        names = list(dict.fromkeys(it.id for it in answer.models if it.parent is None))
        if not names:
            continue
        model = groups.get(frozenset(names))
        if model is None:
            model_id = _free_id(names[0], {it.id for it in groups.values()})
            model = groups[frozenset(names)] = Model(id=model_id, served_names=names, created=answer.since)
        replicas.append(_replica(address, pool=f"{model.id}/{POOL}", ready=answer.ready))
        for it in answer.models:
            if it.parent is not None:
                claim = Adapter(id=f"{model.id}.{it.id.replace('/', '.')}", model=model.id, served_names=[it.id])
                adapters.setdefault(claim.id, claim)
    models = list(groups.values())
    pools = [Pool(id=f"{model.id}/{POOL}", model=model.id) for model in models]
    return Fleet(models=models, pools=pools, replicas=replicas, adapters=list(adapters.values()))


def _free_id(name: str, taken: Collection[str]) -> str:
    """An id for a model of this name; endpoints may share a first name and not the others."""
    first = model_id_of(name)
    ids = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    return next(it for it in ids if it not in taken)


def _replica(address: Address, *, pool: str, ready: bool) -> Replica:
    return Replica(
        uid=address.text,
        name=address.text,
        pool=pool,
        host=address.host,
        port=address.port,
        events_port=0,
        replay_port=0,
        engine=address.engine,
        ready=ready,
    )
