"""What the replicas of open pools serve, as their own `/v1/models` say: the names, adapters among them, are theirs to choose."""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable
from typing import Any

import aiohttp
import msgspec

from penstock.api.fleet import Replica
from penstock.gateway.load.replica_client import ReplicaClient
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.state import FleetState
from penstock.http.replica_answers import UNREADABLE, body_of
from penstock.plain_errors import words_of

log = logging.getLogger(__name__)

TICK_S = 0.25
PERIOD_S = 30.0
"""Between looks at one replica. What is asked for and not known is looked for at once."""
RETRY_S = 5.0
TIMEOUT = aiohttp.ClientTimeout(total=3.0)
MAX_BYTES = 4 * 1024 * 1024
AGAIN_S = 1.0
"""Least seconds between two queries of a replica about unknown names."""


class Served(msgspec.Struct, frozen=True):
    """One name that a replica serves, as it describes it."""

    id: str
    created: int = 0
    owned_by: str = ""
    root: str | None = None
    parent: str | None = None
    """The model that it is an adapter of."""
    max_model_len: int | None = None


class _Answer(msgspec.Struct):
    data: list[Served]


_decoder = msgspec.json.Decoder(_Answer)


async def served_by(client: ReplicaClient, replica: Replica) -> list[Served]:
    """What a replica says that it serves; raises TimeoutError and the errors in `UNREADABLE`."""
    async with client.get(replica, "/v1/models", TIMEOUT) as response:
        response.raise_for_status()
        return _decoder.decode(await body_of(response, MAX_BYTES)).data


class ServedNames:
    """The names by replica, for replicas of pools that no InferenceModel owns."""

    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._names: dict[ReplicaKey, dict[str, Served]] = {}
        self._asked: dict[ReplicaKey, float] = {}
        self._due: dict[ReplicaKey, float] = {}
        self._client: ReplicaClient | None = None

    async def run(self, client: ReplicaClient) -> None:
        """Looks at each ready replica when it appears and every half a minute, until cancelled."""
        self._client = client
        while True:
            replicas = {key: replica for key, replica in self._state.directory.replicas.items() if replica.open}
            for gone in self._due.keys() - replicas.keys():
                for known in (self._names, self._asked, self._due):
                    known.pop(gone, None)
            now = time.monotonic()
            await self._ask([it for key, it in replicas.items() if it.ready and self._due.get(key, now) <= now])
            await asyncio.sleep(TICK_S)

    async def refresh(self, replicas: Iterable[Replica]) -> None:
        """Asks those that were not asked within the last second."""
        since = time.monotonic() - AGAIN_S
        await self._ask([it for it in replicas if it.ready and self._asked.get(key_of(it), since) <= since])

    def known(self, keys: Iterable[ReplicaKey]) -> bool:
        """Whether any of these replicas has said what it serves."""
        return any(key in self._names for key in keys)

    def get(self, name: str, keys: Iterable[ReplicaKey]) -> Served | None:
        """What the first of these replicas that serves `name` says of it."""
        return next((served for key in keys if (served := self._names.get(key, {}).get(name)) is not None), None)

    def names(self, keys: Iterable[ReplicaKey]) -> dict[str, Served]:
        """What these replicas serve together."""
        return {name: served for key in keys for name, served in self._names.get(key, {}).items()}

    def serving(self, name: str, keys: Iterable[ReplicaKey]) -> list[ReplicaKey]:
        """Return those of `keys` that serve `name`."""
        return [key for key in keys if name in self._names.get(key, ())]

    async def _ask(self, replicas: Collection[Replica]) -> None:
        if self._client is not None and replicas:
            await asyncio.gather(*(self._fetch(self._client, replica) for replica in replicas))

    async def _fetch(self, client: ReplicaClient, replica: Replica) -> None:
        key = key_of(replica)
        self._asked[key] = time.monotonic()
        self._due[key] = self._asked[key] + PERIOD_S
        try:
            self._names[key] = {served.id: served for served in await served_by(client, replica)}
        except (TimeoutError, *UNREADABLE) as error:
            # What it said last stays: a replica that is too busy to answer still serves.
            log.warning("%s does not say which models it serves: %s", replica.name, words_of(error))
            self._due[key] = self._asked[key] + RETRY_S


def entry(served: Served) -> dict[str, Any]:
    """A learned name as OpenAI's API lists a model."""
    shown = msgspec.structs.asdict(served) | {"object": "model"}
    return {field: value for field, value in shown.items() if value is not None or field in ("root", "parent")}
