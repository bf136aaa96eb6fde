"""A queue of keys: a key that is queued twice is handled once, one key is never handled twice at a time, and one that failed
comes back later and later."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from penstock.kube.backoff import Backoff

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


class KeyedQueue(Generic[K]):
    """Keys to handle.

    Args:
        backoff: Makes the delays after failures of one key.
    """

    def __init__(self, backoff: Callable[[], Backoff] = lambda: Backoff(first=0.2, longest=60.0)) -> None:
        self._new_backoff = backoff
        self._ready: asyncio.Queue[K] = asyncio.Queue()
        self._queued: set[K] = set()
        self._active: set[K] = set()
        self._again: set[K] = set()
        """Added while being handled."""
        self._backoffs: dict[K, Backoff] = {}
        self._timers: dict[K, asyncio.TimerHandle] = {}

    def add(self, key: K) -> None:
        """Handles the key soon; does nothing where it waits for that already."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if key in self._active:
            self._again.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._ready.put_nowait(key)

    def add_after(self, key: K, delay_s: float) -> None:
        """Handles the key after a while, or earlier if something asks for that."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if key in self._queued or (timer is not None and timer.when() <= loop.time() + delay_s):
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_later(delay_s, self.add, key)

    async def work(self, handle: Callable[[K], Awaitable[None]]) -> None:
        """Handles keys until cancelled; run it several times over for several keys at a time. What `handle` raises is logged, and
        the key comes back."""
        while True:
            key = await self._ready.get()
            self._queued.discard(key)
            self._active.add(key)
            try:
                await handle(key)
                self._backoffs.pop(key, None)
            except Exception as error:  # one key's failure is that key's: it must not end the worker
                delay = self._backoffs.setdefault(key, self._new_backoff()).next()
                log.warning("%s failed, again in %.1f s: %s", key, delay, error, exc_info=log.isEnabledFor(logging.DEBUG))
                self.add_after(key, delay)
            finally:
                self._active.discard(key)
                if key in self._again:
                    self._again.discard(key)
                    self.add(key)
