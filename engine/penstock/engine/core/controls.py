"""What a core does when it is told to: the commands of `messages.Control` and their answers."""

import logging

from penstock.engine.core.scheduler import Scheduler
from penstock.engine.messages import Control, ControlDone, ResetPrefixCache

_log = logging.getLogger(__name__)


class ControlError(RuntimeError):
    """A command cannot be carried out now; the message says why."""


class Controls:
    """Carries out commands, one after the other.

    Args:
        scheduler: Of the core.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._replies: list[ControlDone] = []

    def handle(self, control: Control) -> None:
        """Begins a command; its answer is among the replies when it is done."""
        _log.info("control: %s", control.command)
        try:
            match control.command:
                case ResetPrefixCache():
                    self._reset_prefix_cache()
            self._replies.append(ControlDone(control.call_id))
        except ControlError as error:
            self._replies.append(ControlDone(control.call_id, error=str(error)))

    def take_replies(self) -> list[ControlDone]:
        """Answers since the last call."""
        replies, self._replies = self._replies, []
        return replies

    def _reset_prefix_cache(self) -> None:
        if not self._scheduler.kv.reset():
            raise ControlError(f"the prefix cache was not reset: {self._scheduler.num_running} requests hold blocks")
