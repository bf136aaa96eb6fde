"""Has the ranks lend and read pages, beside the steps."""

import hashlib

from penstock.engine.connectors.transfer.transfer import Transfer
from penstock.engine.connectors.transfer.words import News, Part
from penstock.engine.core.executor import Executor

_POLL_S = 0.02
"""Between two looks for readers' words, while none of this replica's requests waits for pages."""


class TransferPump:
    """Between the scheduler's half and the ranks.

    Args:
        transfer: Says what is to be done.
        executor: Of the ranks.
    """

    def __init__(self, transfer: Transfer, executor: Executor) -> None:
        self._transfer = transfer
        self._executor = executor
        self._polled_at = 0.0

    @property
    def is_moving(self) -> bool:
        """Whether `pump` has something to do."""
        return self._transfer.is_moving

    def open(self, now: float) -> None:
        """Lends and reads pages of the weights that are loaded; `ConfigError` where that cannot be."""
        self.pump(now)  # what is due belongs to the weights before
        told: list[Part] = self._executor.call("open_transfer", self._transfer.engine_id)
        # Of ranks with the same part the first one lends it.
        parts = {(part.stage, part.number): part for part in reversed(told)}
        stages = dict.fromkeys(part.name for part in told)
        self._transfer.fingerprint = hashlib.sha256(" ".join(stages).encode()).hexdigest()[:32]
        self._transfer.hosts = [parts[place].host for place in sorted(parts)]
        self._transfer.pulls.parts = [part for part in told if part.keeps]

    def pump(self, now: float) -> None:
        """Has errands done that are due, and takes in what the ranks have heard."""
        if errands := self._transfer.take(now):
            self._executor.call_beside("run_errands", errands)
        if self._transfer.pulls.is_moving or (self._transfer.awaits_news and not 0 <= now - self._polled_at < _POLL_S):
            self._polled_at = now
            news: list[News] = self._executor.call_beside("take_news")
            self._transfer.heard(news, now)
