"""The commands of `messages.Control` and their answers.

A command is executed between two steps, when nothing is in flight. Commands that must wait for running requests to end let others
pass.
"""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from penstock.engine.commands import (
    TAGS,
    Command,
    LoadAdapter,
    Pause,
    PauseMode,
    PinPrefix,
    ReloadWeights,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartProfile,
    StopProfile,
    SyncAdapters,
    Tag,
    UnloadAdapter,
    UnpinPrefix,
    WakeUp,
)
from penstock.engine.config import ConfigError
from penstock.engine.connectors.connector import Pump
from penstock.engine.core.control.adapters import AdapterControl
from penstock.engine.core.control.control_error import ControlError
from penstock.engine.core.control.profiles import Profiles
from penstock.engine.core.executor import Executor
from penstock.engine.core.scheduling.pause import Closed, PauseState
from penstock.engine.core.scheduling.scheduler import Scheduler
from penstock.engine.messages import Control, ControlDone
from penstock.prompt.hashing import ExtraKeys

PAUSED = "paused"
"""`Finished.code` of requests that a pause has ended."""
ASLEEP = "asleep"
"""`Finished.code` of requests that came while the engine sleeps."""

_log = logging.getLogger(__name__)


class Controls:
    """The commands under way, and the state that they have brought about.

    Args:
        scheduler: Of the core.
        executor: Of the core.
        profile_dir: Where profiles are written; None: none are made.
        served_names: Of the model.
        pumps: Of pages that belong to the weights.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        profile_dir: Path | None = None,
        served_names: Sequence[str] = (),
        pumps: Sequence[Pump] = (),
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._pumps = pumps
        self._open: list[Control] = []
        self._replies: list[ControlDone] = []
        self._sleeping: set[Tag] = set()
        self._weights_lost = False
        self._profiles = Profiles(scheduler, executor, profile_dir)
        self.adapters = AdapterControl(scheduler, executor, served_names)

    @property
    def due(self) -> str | None:
        """The name of the first command that waits for nothing but the steps in flight; None: there is none."""
        return next((_name(control.command) for control in self._open if not self._waits(control.command)), None)

    @property
    def paused(self) -> bool:
        """Whether requests wait for a resume."""
        return self._scheduler.pause_state is not PauseState.UNPAUSED

    @property
    def asleep(self) -> str | None:
        """Why no request is taken; None: they are."""
        if self._sleeping:
            return f"the engine is asleep: {' and '.join(sorted(self._sleeping))} must wake up"
        if self._weights_lost:
            return "the engine has no weights: they must be reloaded"
        return None

    def handle(self, control: Control) -> None:
        """Begins a command; its answer is among the replies when it is done."""
        _log.info("control: %s", control.command)
        match control.command:
            case LoadAdapter() | UnloadAdapter():
                self._change_adapters(control)
                return
            case SyncAdapters():
                self._reply(control)
                return
            case Pause(mode) | Sleep(_, mode):
                self._stop(mode)
            case Resume():
                self._give_up_waiting("the engine was resumed before its running requests had ended")
            case _:
                pass
        self._open.append(control)

    def carry_out(self, now: float) -> None:
        """Carries out what is due. Nothing may be in flight; `now` is Unix time in seconds."""
        for control in [control for control in self._open if not self._waits(control.command)]:
            self._open.remove(control)
            try:
                self._reply(control, result=self._carry_out(control.command, now))
            except ControlError as error:
                self._reply(control, str(error))

    def _change_adapters(self, control: Control) -> None:
        """Change adapters at once, or when their files have been read. No step needs to end for it."""
        try:
            if isinstance(control.command, LoadAdapter):
                self.adapters.load(control.command, lambda error: self._reply(control, error))
            elif isinstance(control.command, UnloadAdapter):
                self.adapters.unload(control.command)
                self._reply(control)
        except ControlError as error:
            self._reply(control, str(error))

    def take_replies(self) -> list[ControlDone]:
        """Answers since the last call."""
        replies, self._replies = self._replies, []
        return replies

    def _reply(self, control: Control, error: str | None = None, result: dict[str, str] | None = None) -> None:
        if error is not None:
            _log.warning("control: %s: %s", _name(control.command), error)
        self._replies.append(ControlDone(control.call_id, result, error))

    def _waits(self, command: Command) -> bool:
        return isinstance(command, Pause | Sleep) and command.mode == "wait" and self._scheduler.num_running > 0

    def _carry_out(self, command: Command, now: float) -> dict[str, str] | None:
        """What the command's description says is its result."""
        match command:
            case ResetPrefixCache(force):
                self._reset_prefix_cache(now, force=force)
            case PinPrefix(name, tokens, salt, tenant):
                with _refusing():
                    extra = ExtraKeys(cache_salt=salt, tenant=tenant)
                    return {"tokens": str(self._scheduler.pin_prefix(name, tokens, extra))}
            case UnpinPrefix(name):
                with _refusing():
                    self._scheduler.kv.unpin_prefix(name)
            case Pause(_, clear_cache):
                self._scheduler.pause_state = PauseState.PAUSED_ALL
                if clear_cache:
                    self._reset_prefix_cache(now, force=True)
            case Resume():
                self._resume()
            case Sleep(level):
                self._sleep(level, now)
            case WakeUp(tags):
                self._wake_up(tags)
            case ReloadWeights(path):
                self._reload_weights(path, now)
            case StartProfile():
                if self.asleep is not None:
                    raise ControlError(self.asleep)
                self._profiles.start()
            case StopProfile():
                return {"path": self._profiles.stop()}
            case LoadAdapter() | UnloadAdapter() | SyncAdapters():
                raise ValueError("adapters wait for no step")
        return None

    def _stop(self, mode: PauseMode) -> None:
        """Stop requests at once, so that the command's condition is met."""
        if mode == "abort":
            self._scheduler.fail_all("the engine was paused", PAUSED)
        elif mode == "keep":
            self._give_up_waiting("another command stopped the running requests before they had ended")
        # Requests that an earlier pause has stopped must go on in order to end.
        ending = mode == "wait" and self._scheduler.num_running > 0
        self._scheduler.pause_state = PauseState.PAUSED_NEW if ending else PauseState.PAUSED_ALL

    def _give_up_waiting(self, reason: str) -> None:
        waiting = [control for control in self._open if self._waits(control.command)]
        self._open = [control for control in self._open if control not in waiting]
        for control in waiting:
            self._reply(control, reason)

    def _resume(self) -> None:
        if self.asleep is not None:
            raise ControlError(self.asleep)
        self._scheduler.pause_state = PauseState.UNPAUSED

    def _reset_prefix_cache(self, now: float, *, force: bool) -> None:
        if force:
            self._scheduler.preempt_all(now)
            self._scheduler.kv.unpin_prefixes()
        if not self._scheduler.kv.reset():
            pinned = self._scheduler.kv.num_pinned_blocks
            held = f"{self._scheduler.num_running} requests hold blocks" + (f", and {pinned} blocks are pinned" if pinned else "")
            raise ControlError(f"the prefix cache was not reset: {held}")

    def _sleep(self, level: int, now: float) -> None:
        self._scheduler.pause_state = PauseState.PAUSED_ALL
        self._reset_prefix_cache(now, force=True)
        self._scheduler.encoder.clear()
        self._executor.call("sleep", level)
        self._sleeping.update(TAGS)
        self._weights_lost |= level == 2
        self._take_requests_if_awake()

    def _wake_up(self, tags: tuple[Tag, ...]) -> None:
        if not self._sleeping:
            return
        self._executor.call("wake_up", [tag for tag in tags if tag in self._sleeping])
        self._sleeping.difference_update(tags)
        self._go_on_if_awake()

    def _reload_weights(self, path: str | None, now: float) -> None:
        if "weights" in self._sleeping:
            raise ControlError("the weights sleep: wake them up before they are reloaded")
        # Before any rank gives its weights up: what one of them lacks, the others may have.
        for problem in self._executor.call("check_weights", path):
            if problem is not None:
                raise ControlError(problem)
        self._reset_prefix_cache(now, force=True)
        self._scheduler.encoder.clear()
        was_asleep = self.asleep is not None
        try:
            self._executor.call("reload_weights", path)
        except ConfigError as error:
            raise ControlError(str(error)) from error
        except Exception as error:
            _log.exception("the weights could not be read")
            self._weights_lost = True
            self._scheduler.pause_state = PauseState.PAUSED_ALL
            self._take_requests_if_awake()
            raise ControlError(f"the weights could not be read, and there are none now: {error}") from error
        self._weights_lost = False
        for pump in self._pumps:
            try:
                pump.open(now)
            except ConfigError:
                _log.exception("pages of the new weights are not kept elsewhere")
        if was_asleep:
            self._go_on_if_awake()

    def _go_on_if_awake(self) -> None:
        self._take_requests_if_awake()
        if self.asleep is None:
            self._scheduler.pause_state = PauseState.UNPAUSED

    def _take_requests_if_awake(self) -> None:
        reason = self.asleep
        self._scheduler.closed = None if reason is None else Closed(reason, ASLEEP)


@contextmanager
def _refusing() -> Generator[None]:
    """What the cache says no to is refused."""
    try:
        yield
    except ValueError as error:
        raise ControlError(str(error)) from None


def _name(command: Command) -> str:
    tag = command.__struct_config__.tag
    assert isinstance(tag, str)
    return tag
