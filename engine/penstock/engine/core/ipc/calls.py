"""The open calls of a client: commands whose answers have not come yet."""

import asyncio
import itertools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from penstock.engine.messages import ControlDone


class CommandRefused(RuntimeError):
    """The core did not do what it was told; the message says why."""


class Calls:
    """The open calls of one client, by number.

    Args:
        first: The first number.
    """

    def __init__(self, first: int = 0) -> None:
        self._numbers = itertools.count(first)
        self._open: dict[int, asyncio.Future[Any]] = {}

    @contextmanager
    def opened(self) -> Generator[tuple[int, asyncio.Future[Any]]]:
        """A new call's number and what becomes its result, or raises `CommandRefused`."""
        number = next(self._numbers)
        self._open[number] = asyncio.get_running_loop().create_future()
        try:
            yield number, self._open[number]
        finally:
            del self._open[number]

    def settle(self, reply: ControlDone) -> None:
        """Pass an answer to its caller."""
        call = self._open.get(reply.call_id)
        if call is None or call.done():  # whoever asked has gone
            return
        if reply.error is None:
            call.set_result(reply.result)
        else:
            call.set_exception(CommandRefused(reply.error))

    def fail(self, error: Exception) -> None:
        """Fail all open calls."""
        for call in self._open.values():
            if not call.done():
                call.set_exception(error)
