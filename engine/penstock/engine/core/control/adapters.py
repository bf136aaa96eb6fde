"""Adapters are loaded and unloaded: files are read beside the steps, and nothing that runs waits for them."""

import logging
import time
from collections.abc import Callable, Sequence

from penstock.engine.commands import LoadAdapter, UnloadAdapter
from penstock.engine.config import ConfigError, LoraModule
from penstock.engine.core.control.control_error import ControlError
from penstock.engine.core.executor import AdapterRead, Executor
from penstock.engine.core.scheduling.scheduler import Scheduler
from penstock.engine.messages import AdapterInfo

Reply = Callable[[str | None], None]
"""Answers a command: with what was wrong, or None."""
_START_POLL_S = 0.002

_log = logging.getLogger(__name__)


class AdapterControl:
    """What reads, and who waits for it.

    Args:
        scheduler: Says which adapters are to be read.
        executor: Has them read.
        served_names: Of the model, which no adapter may take.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, served_names: Sequence[str]) -> None:
        self._scheduler = scheduler
        self._adapters = scheduler.adapters
        self._executor = executor
        self._served_names = served_names
        self._loading: dict[str, tuple[AdapterInfo, list[Reply]]] = {}
        self._reads: dict[int, tuple[AdapterInfo, dict[int, AdapterRead]]] = {}
        """Copies being read, each with what ranks have said of it."""
        self._changed = False

    @property
    def is_reading(self) -> bool:
        """True while files are being read. `pump` finds their end."""
        return self._adapters.table.is_reading

    def load_now(self, modules: Sequence[LoraModule]) -> None:
        """Loads adapters while nothing else is there to do; `ConfigError` names the first that cannot be."""
        for module in modules:
            errors: list[str | None] = []
            self.load(LoadAdapter(module.name, module.uri), errors.append)
            while not errors:
                self.pump()
                time.sleep(_START_POLL_S)
            if errors[0] is not None:
                raise ConfigError(f"--lora-modules {module.name}={module.uri}: {errors[0]}")

    def load(self, command: LoadAdapter, reply: Reply) -> None:
        """Begins to carry out a command; raises `ControlError` where it is refused at once."""
        if not self._adapters.table.slots:
            raise ControlError("this engine serves no adapters (--enable-lora)")
        if not command.name or command.name in self._served_names:
            raise ControlError(f"the name {command.name!r} is " + ("the model's" if command.name else "empty"))
        wanted = (command.uri, command.revision)
        if (under_way := self._loading.get(command.name)) is not None:
            if (under_way[0].uri, under_way[0].revision) != wanted:
                raise ControlError(f"another adapter {command.name!r} is being loaded, from {under_way[0].uri}")
            under_way[1].append(reply)
            return
        there = self._adapters.find(command.name)
        if there is not None and (there.uri, there.revision) == wanted:
            reply(None)
            return
        if there is not None and not command.replace:
            raise ControlError(f"there is an adapter {command.name!r} already, from {there.uri}: unload it, or replace it")
        self._loading[command.name] = self._adapters.add(command.name, *wanted), [reply]

    def unload(self, command: UnloadAdapter) -> None:
        """Carries out a command; raises `ControlError` where there is no such adapter."""
        if self._adapters.find(command.name) is None:
            raise ControlError(f"there is no adapter {command.name!r}")
        self._adapters.remove(command.name)
        self._changed = True

    def pump(self) -> None:
        """Has adapters read that are wanted, and takes in what has been."""
        table = self._adapters.table
        for copy, info in table.take_reads():
            self._reads[copy] = (info, {})
            self._executor.call_beside("read_adapter", copy, info.uri, info.revision)
        if not self._reads:
            return
        ranks = self._executor.call_beside("take_reads")
        for rank, copy, read in [(rank, *it) for rank, reads in enumerate(ranks) for it in reads.items()]:
            info, by_rank = self._reads[copy]
            by_rank[rank] = read
            if len(by_rank) == len(ranks):
                del self._reads[copy]
                self._read(copy, info, [by_rank[number] for number in range(len(ranks))])

    def take_changed(self) -> list[AdapterInfo] | None:
        """All adapters, where they have changed since the last call."""
        if not self._changed:
            return None
        self._changed = False
        return self._adapters.infos()

    def _read(self, copy: int, info: AdapterInfo, reads: Sequence[AdapterRead]) -> None:
        error = next((read.error for read in reads if read.error is not None), None)
        adapter = self._adapters.table.read(copy, error is None)
        if adapter is not None and error is None and not self._adapters.note_weights(adapter, tuple(it.digest for it in reads)):
            _log.warning("adapter %s: %s holds other weights than when it was read before", info.name, info.uri)
        loading = self._loading.get(info.name)
        if loading is None or loading[0] is not info:
            if adapter is not None and error is not None:
                self._scheduler.fail_adapter(adapter, f"adapter {info.name!r} could not be read again: {error}")
            return
        del self._loading[info.name]
        if error is None:
            self._adapters.publish(info)
            self._changed = True
        else:
            self._adapters.discard(info)
        for reply in loading[1]:
            reply(error)
