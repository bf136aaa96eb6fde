"""Runs a call's service where its messages come: a task that is stepped on the spot, not in a later turn of the event loop.

Most calls never wait for anything but their own next message. An `asyncio.Task` costs them a future and two turns of the loop for
each; here the connection that has read the messages lets the service go on, before it writes. Any future that a service awaits
besides is waited for as a task would. This is a task by asyncio's rules for those who bring their own (Extending, Task lifetime
support), so that `asyncio.timeout` and its like work in services.
"""

import asyncio
from asyncio.tasks import _enter_task, _leave_task  # pyright: ignore[reportPrivateUsage] - documented for this, by these names
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final


class _Pause:
    """What a service awaits that only `Worker.resume` ends."""

    def __await__(self) -> Generator["_Pause", None, None]:
        return iter((self,))  # type: ignore[return-value] - any iterator does, and this one costs no frame


PAUSE: Final = _Pause()


class Worker:
    """Runs one service coroutine for one call.

    Args:
        coroutine: The work. It handles its own exceptions.
        soon: Schedules the worker: `step` must be called soon, outside of any task.
        over: Called at the end.
    """

    __slots__ = ("_cancels", "_coroutine", "_loop", "_must_cancel", "_over", "_ready", "_soon", "_waits", "finished", "stepping")

    def __init__(self, coroutine: Coroutine[Any, Any, None], soon: Callable[["Worker"], None], over: Callable[[], None]) -> None:
        self._coroutine = coroutine
        self._soon = soon
        self._over: Callable[[], None] | None = over
        self._loop = asyncio.get_running_loop()
        self._waits: asyncio.Future[Any] | None = None
        self._ready = True
        """True while it is scheduled or being stepped."""
        self._cancels = 0
        self._must_cancel = False
        self.finished = False
        self.stepping = False
        """True while its code runs."""
        soon(self)

    def resume(self) -> None:
        """Ends a pause, if it is in one."""
        if not self._ready and self._waits is None and not self.finished:
            self._ready = True
            self._soon(self)

    def step(self) -> None:
        """Lets the work go on until it waits or ends."""
        if self.finished:
            return
        _enter_task(self._loop, self)  # type: ignore[arg-type] - a task by its behaviour
        self.stepping = True
        try:
            if self._must_cancel:
                self._must_cancel = False
                self._wait(self._coroutine.throw(asyncio.CancelledError()))
            else:
                self._wait(self._coroutine.send(None))
        except (StopIteration, asyncio.CancelledError):
            self.finished = True
        except BaseException:
            self.finished = True
            raise
        finally:
            self.stepping = False
            _leave_task(self._loop, self)  # type: ignore[arg-type]
            if self.finished and (over := self._over) is not None:
                self._over = None  # it is of whoever holds the worker: a cycle would wait for the collector, twice a request
                over()

    def _wait(self, waits: Any) -> None:
        if waits is None:  # only a turn of the loop
            self._loop.call_soon(self.step)
            return
        self._ready = False
        if waits is PAUSE:
            if self._must_cancel:
                self.resume()
        else:
            waits._asyncio_future_blocking = False
            self._waits = waits
            waits.add_done_callback(self._wake)
            if self._must_cancel and waits.cancel():
                self._must_cancel = False

    def _wake(self, _: "asyncio.Future[Any]") -> None:
        self._waits, self._ready = None, True
        self.step()

    # --- what `asyncio.timeout` and its like ask of a task ---

    def done(self) -> bool:
        """Return whether it has ended."""
        return self.finished

    def cancel(self, msg: object = None) -> bool:
        """Cancel it."""
        if self.finished:
            return False
        self._cancels += 1
        if self._waits is not None and self._waits.cancel():
            return True
        self._must_cancel = True
        self.resume()
        return True

    def cancelling(self) -> int:
        """Return the number of cancellations."""
        return self._cancels

    def uncancel(self) -> int:
        """Take back one cancellation."""
        self._cancels = max(self._cancels - 1, 0)
        return self._cancels
