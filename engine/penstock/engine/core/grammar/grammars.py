"""Requests that wait for their grammars. Grammars compile beside the steps, each once for all requests that use it."""

import logging
import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from penstock.engine.core.grammar.compiler import Compiler
from penstock.engine.core.grammar.guide import GrammarGuide
from penstock.engine.core.grammar.libraries import GrammarError, Prototype
from penstock.engine.core.scheduling.scheduler import Scheduler
from penstock.engine.grammar import Grammar
from penstock.engine.messages import GRAMMAR_REFUSED, AddRequest
from penstock.engine.stats import GrammarStats

CACHED = 256
"""Compiled grammars that are kept, the last ones used."""

_log = logging.getLogger(__name__)


class Grammars:
    """Has grammars compiled in threads, and tells the scheduler.

    Args:
        scheduler: Parks requests as `grammar` until they have their guides.
        compiler: Of the model's.
    """

    def __init__(self, scheduler: Scheduler, compiler: Compiler) -> None:
        self.hits = 0
        """Requests whose grammar was compiled already."""
        self.failures = 0
        """Grammars that could not be compiled."""
        self.compiled = 0
        self.compile_s = 0.0
        """Seconds from the first request for a grammar to its end, of all that were compiled."""
        self._scheduler = scheduler
        self._compiler = compiler
        self._pool = ThreadPoolExecutor(max(1, ((os.cpu_count() or 1) + 1) // 2), thread_name_prefix="grammar")
        self._cache: OrderedDict[Grammar, Prototype] = OrderedDict()
        self._compiling: dict[Grammar, tuple[Future[Prototype], float, list[AddRequest]]] = {}

    @property
    def is_compiling(self) -> bool:
        """True while a grammar compiles. `pump` finds its end."""
        return bool(self._compiling)

    def add(self, message: AddRequest, now: float) -> None:
        """Gives a request that waits its guide, at once or when it is compiled; `now` is Unix time in seconds."""
        grammar = message.grammar
        if grammar is None or not self._scheduler.is_waiting(message.index):
            return
        if not message.input_complete:
            self._scheduler.fail(message.index, "a request with a grammar needs its whole prompt at once")
            return
        source = grammar.source
        if (prototype := self._cache.get(source)) is not None:
            self._cache.move_to_end(source)
            self.hits += 1
            self._guide(message, prototype)
            return
        self._scheduler.park(message.index, "grammar", now)
        if source not in self._compiling:
            self._compiling[source] = (self._pool.submit(self._compiler.compile, source), now, [])
        self._compiling[source][2].append(message)

    def pump(self, now: float) -> None:
        """Takes in what has been compiled."""
        done = [source for source, (future, *_) in self._compiling.items() if future.done()] if self._compiling else ()
        for source in done:
            future, began, messages = self._compiling.pop(source)
            if (error := future.exception()) is not None:
                self._refuse(messages, error)
                continue
            prototype = self._cache[source] = future.result()
            self.compiled, self.compile_s = self.compiled + 1, self.compile_s + max(now - began, 0)
            if prototype.warnings:
                _log.info("a lenient grammar leaves out: %s", "; ".join(prototype.warnings))
            if len(self._cache) > CACHED:
                self._cache.popitem(last=False)
            for message in messages:
                if self._scheduler.is_waiting(message.index):
                    self._guide(message, prototype)
                    self._scheduler.unpark(message.index, now)

    def stats(self) -> GrammarStats | None:
        """What came of them so far; None: no request has had one."""
        found = GrammarStats(self.compiled, self.failures, self.hits, self.compile_s)
        return found if self.compiled or self.failures else None

    def close(self) -> None:
        """Ends the threads, once what they compile is done."""
        self._compiler.close()
        self._pool.shutdown(cancel_futures=True)

    def _guide(self, message: AddRequest, prototype: Prototype) -> None:
        assert message.grammar is not None
        stops, eos = message.sampling.stop_token_ids, self._compiler.eos_token_ids
        self._scheduler.guide(message.index, GrammarGuide(prototype, stops, eos, message.grammar.reasoning))

    def _refuse(self, messages: list[AddRequest], error: BaseException) -> None:
        self.failures += 1
        if not isinstance(error, GrammarError):
            _log.error("a grammar could not be compiled", exc_info=error)
        for message in messages:
            if isinstance(error, GrammarError) and message.grammar is not None:
                param = message.grammar.param
                self._scheduler.fail(message.index, f"{param}: {error}", GRAMMAR_REFUSED, param)
            else:
                self._scheduler.fail(message.index, str(error))
