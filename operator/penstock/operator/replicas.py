"""How the operator itself asks replicas, over their HTTP APIs: for their adapters, and for how loaded they are."""

import json
from typing import Any, Final

import aiohttp
import msgspec

from penstock.api.events import absurd
from penstock.api.load_report import LoadReport
from penstock.http.replica_answers import UNREADABLE, body_of
from penstock.http.replica_tls import CurrentContext, ReplicaTls
from penstock.operator.adapters.plan import Action, Origin
from penstock.operator.observed import LoadTimes
from penstock.plain_errors import words_of

LOAD_S: Final = 2.0
LIST_S: Final = 5.0
ACT_S: Final = 20.0
"""A load that takes longer goes on in the replica; asking again joins it."""
MAX_BYTES: Final = 2**22


class ReplicaError(RuntimeError):
    """A replica that cannot be asked, or says no; the message is its own sentence."""


class StillLoading(RuntimeError):
    """The replica has not answered yet: it is reading or downloading its weights."""


class Replicas:
    """Clients of all replicas, over one session that is made when it is first used.

    Args:
        tls: How all replicas are asked; None: plain HTTP.
    """

    def __init__(self, tls: ReplicaTls | None = None) -> None:
        self._tls = None if tls is None else CurrentContext(tls)
        self._session: aiohttp.ClientSession | None = None

    @property
    def scheme(self) -> str:
        """Scheme of a replica's URL."""
        return "http" if self._tls is None else "https"

    async def load(self, base: str) -> LoadReport:
        """How loaded a replica is, as far as anybody can be. A replica runs what its user chose: it may say anything, at any
        length, or a byte at a time. Raises `ReplicaError`."""
        try:
            report = msgspec.convert(await self._ask("GET", f"{base}/load", None, LOAD_S), LoadReport)
        except TimeoutError as error:
            raise ReplicaError(f"no answer in {LOAD_S:g} s") from error
        except msgspec.ValidationError as error:
            raise ReplicaError(f"/load is not understood: {error}") from error
        if (why := absurd(report)) is not None:
            raise ReplicaError(why)
        return report

    async def load_times(self, base: str) -> LoadTimes:
        """How long a replica took for its weights; 0 where its engine does not tell, as older ones. Raises `ReplicaError`."""
        try:
            return msgspec.convert(await self._ask("GET", f"{base}/version", None, LIST_S), LoadTimes)
        except TimeoutError as error:
            raise ReplicaError(f"no answer in {LIST_S:g} s") from error
        except msgspec.ValidationError as error:
            raise ReplicaError(f"/version is not understood: {error}") from error

    async def adapters(self, base: str) -> dict[str, Origin]:
        """What a replica serves beside its model, by name; `base` is `SCHEME://ADDRESS:PORT`. Raises `ReplicaError`."""
        try:
            body = await self._ask("GET", f"{base}/v1/models", None, LIST_S)
            models: list[dict[str, Any]] = body["data"]
            return {it["id"]: Origin(it["root"], it.get("revision")) for it in models if it.get("parent") is not None}
        except TimeoutError as error:
            raise ReplicaError(f"no answer in {LIST_S:g} s") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise ReplicaError(f"/v1/models is not understood: {error!r}") from error

    async def carry_out(self, base: str, action: Action) -> None:
        """Has a replica load or unload an adapter, over its administrative port.

        Raises `ReplicaError` where the replica refuses, `StillLoading` where it takes its time.
        """
        body: dict[str, Any] = {"lora_name": action.name}
        if action.origin is not None:
            body |= {"lora_path": action.origin.uri, "load_inplace": True}
            if action.origin.revision is not None:
                body["revision"] = action.origin.revision
        try:
            await self._ask("POST", f"{base}/v1/{action.verb}_lora_adapter", body, ACT_S)
        except TimeoutError as error:
            raise StillLoading from error

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, method: str, url: str, body: dict[str, Any] | None, seconds: float) -> Any:
        if self._session is None:
            # Whoever asks many at once bounds that: waiting for a connection would pass for a replica that does not answer.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        limit = aiohttp.ClientTimeout(total=seconds)
        tls: dict[str, Any] = {} if self._tls is None else {"ssl": self._tls.get(), "server_hostname": self._tls.name}
        try:
            # Whoever is asked runs what a user chose: nobody else is asked on its word, nor as much read as it says.
            async with self._session.request(method, url, json=body, timeout=limit, allow_redirects=False, **tls) as response:
                text = await body_of(response, MAX_BYTES)
                answer = json.loads(text) if response.status < 300 or response.status >= 400 else None
                if response.status >= 300:
                    raise ReplicaError(_sentence(answer, response.status))
                return answer
        except UNREADABLE as error:
            raise ReplicaError(words_of(error)) from error


def _sentence(answer: Any, status: int) -> str:
    """OpenAI's shape of an error, or what there is."""
    try:
        return str(answer["error"]["message"])
    except (KeyError, TypeError):
        return f"HTTP {status}"
