"""A proxy that has read the gateway's answer, and ends the stream before the gateway knows that the answer was sent."""

import asyncio
from typing import Any

import pytest
from test_exchange import FixedDirector, chunk, head
from wires import read

from penstock.api import headers
from penstock.gateway.extproc.service import ExtProcService


class Hasty:
    """What a service sees of it: a whole request, whose answer ends the call while it is being written."""

    def __init__(self) -> None:
        self._unread = [head(), chunk(b'{"model": "m"}', ends=True)]

    def invocation_metadata(self) -> Any:
        return ((headers.PHASE, headers.REQUEST_PHASE),)

    async def read(self) -> object:
        return read(self._unread.pop(0))

    async def write(self, message: object) -> None:
        raise asyncio.CancelledError


async def test_its_request_is_under_way_and_was_not_reset() -> None:
    director = FixedDirector()
    with pytest.raises(asyncio.CancelledError):
        await ExtProcService(director).Process(None, Hasty())  # type: ignore[arg-type] - as far as it goes
    assert director.gone_on.model == "ns/m" and not director.ended
