"""The connection to the API server, against a small server."""

from collections.abc import Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, ApiException, Configuration

from penstock.operator.api import ATTEMPTS, ServerApi


async def get_of(answer: Callable[[int], web.Response]) -> tuple[object, int]:
    """What a get returns or raises, and how many requests it took; `answer` is told which one it is, from 1."""
    asked = 0

    async def handle(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return answer(asked)

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    async with TestServer(app) as server:
        client = ApiClient(Configuration(host=str(server.make_url("/")).rstrip("/")))
        try:
            return await ServerApi(client).get("Deployment", "default", "x"), asked
        except ApiException as error:
            return error.status, asked
        finally:
            await client.close()


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_that_says_when_is_asked_again(status: int) -> None:
    def busy(times: int) -> Callable[[int], web.Response]:
        later = {"Retry-After": "0"}
        return lambda nth: (
            web.Response(status=status, headers=later) if nth <= times else web.json_response({"kind": "Deployment"})
        )

    assert await get_of(busy(3)) == ({"kind": "Deployment"}, 4)
    assert await get_of(busy(99)) == (status, ATTEMPTS)


@pytest.mark.parametrize(
    ("status", "headers"), [(429, {}), (500, {"Retry-After": "0"}), (409, {}), (503, {"Retry-After": "soon"})]
)
async def test_other_refusals_are_handed_on_at_once(status: int, headers: dict[str, str]) -> None:
    assert await get_of(lambda _: web.Response(status=status, headers=headers)) == (status, 1)
