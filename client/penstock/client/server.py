"""The server at the other end: its address, the API key, and its errors in plain words."""

import os
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from penstock.client.stream import error_message
from penstock.plain_errors import words_of

CONNECT_S = 30.0


class ServerError(Exception):
    """What went wrong, in words for a person.

    Args:
        kind: A short name under which errors are counted, such as `HTTP 429`.
        message: One sentence.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Server:
    """An OpenAI-compatible server. Use as an asynchronous context manager.

    Args:
        base_url: With or without the closing `/v1`, as vLLM's and OpenAI's tools have it.
        headers: Sent with each request, besides `Authorization: Bearer $OPENAI_API_KEY` where that variable is set.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        key = os.environ.get("OPENAI_API_KEY")
        self._headers = ({"authorization": f"Bearer {key}"} if key else {}) | dict(headers or {})

    async def __aenter__(self) -> "Server":
        self.session, self.anew = self._session(reuse=True), self._session(reuse=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await self.anew.close()

    def _session(self, reuse: bool) -> aiohttp.ClientSession:
        # No limit on connections: how many requests run is the caller's business. None on time: answers may take hours.
        return aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, force_close=not reuse),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """The answer, from its first byte on; raises aiohttp's errors.

        Servers close idle connections without a word, llama.cpp's after each stream: a request that went into one is sent once
        more, over a new one (RFC 9112, section 9.3.1).
        """
        try:
            return await self.session.post(url, data=body, headers=headers)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            return await self.anew.post(url, data=body, headers=headers)

    def url(self, path: str) -> str:
        """The address of a path such as `/v1/models`."""
        return self.base_url + path

    async def get(self, path: str) -> bytes:
        """The body of a 200; raises `ServerError`."""
        try:
            async with self.session.get(self.url(path)) as response:
                await check(response)
                return await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise unreachable(self.base_url, error) from None

    async def first_model(self) -> str:
        """The first name in `/v1/models`; raises `ServerError` where there is none."""
        body = await self.get("/v1/models")
        try:
            names = [model["id"] for model in msgspec.json.decode(body)["data"]]
        except (msgspec.MsgspecError, LookupError, TypeError):
            raise ServerError("protocol", f"{self.url('/v1/models')} does not answer as OpenAI's API does") from None
        if not names:
            raise ServerError("no model", f"{self.base_url} serves no model")
        return names[0]


async def check(response: aiohttp.ClientResponse) -> None:
    """Raises `ServerError` on any status but 200, quoting what the server says."""
    if response.status == 200:
        return
    body = await response.read()
    try:
        document: Any = msgspec.json.decode(body)
        said = error_message(document["error"] if "error" in document else document["message"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        said = body[:300].decode(errors="replace").strip() or str(response.reason)
    raise ServerError(f"HTTP {response.status}", f"the server answered {response.status}: {said}")


def unreachable(base_url: str, error: Exception) -> ServerError:
    """A failure of the connection as a `ServerError`."""
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return ServerError("connection", f"{base_url!r} is not an address like http://localhost:8000")
    if isinstance(error, aiohttp.ClientConnectorError):
        reason = os.strerror(error.errno).lower() if error.errno else str(error.os_error)
        return ServerError("connection", f"cannot reach {base_url}: {reason}")
    if isinstance(error, TimeoutError):
        return ServerError("timeout", f"{base_url} did not answer in time")
    return ServerError("connection", f"the connection to {base_url} broke: {words_of(error)}")
