"""The process in which xgrammar tries grammars, since only a process can be killed.

`CompileProcess` starts and stops it, and `main` is what it runs. Nothing but the verdict comes back: as JSON, what a grammar
compiles to is so large that it takes longer to write and read than to compile again.
"""

import contextlib
import re
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from penstock.engine.core.grammar.libraries import GrammarError, GrammarsUnavailable

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler

_PLACE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")
"""Time, file and line, with which the library begins its errors."""
START_S = 120.0
"""Seconds within which the process must have imported xgrammar."""


class Work(msgspec.Struct, frozen=True, array_like=True):
    """One grammar to compile."""

    kind: Literal["json_schema", "grammar", "regex", "lark", "structural_tag"]
    text: str
    options: dict[str, Any] = {}
    """Keyword arguments of `compile_json_schema`."""


class CompileProcess:
    """Compiles in a process, which is started with the first grammar and again after it was killed. Not safe to use from several
    threads at once.

    Args:
        tokenizer: A `TokenizerInfo` as JSON.
    """

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = tokenizer
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None

    @property
    def pid(self) -> int | None:
        """The process; None: there is none at present."""
        return None if self._running is None else self._running[0].pid

    def check(self, work: Work, seconds: float) -> None:
        """Compiles a grammar.

        Args:
            work: The grammar.
            seconds: After which the process is killed.

        Raises:
            GrammarError: The grammar is not well-formed or takes too long.
            GrammarsUnavailable: The process cannot be started.
        """
        _, connection = self._running or self._start()
        try:
            connection.send_bytes(msgspec.msgpack.encode(work))
            if not connection.poll(seconds):
                self.close()
                raise GrammarError(f"xgrammar has not compiled the grammar after {seconds:.0f} s")
            error = connection.recv_bytes().decode()
        except (EOFError, OSError) as lost:
            self.close()
            raise GrammarError("xgrammar's process ended while it compiled the grammar") from lost
        if error:
            raise GrammarError(error)

    def close(self) -> None:
        """Kills the process, if there is one."""
        running, self._running = self._running, None
        if running is not None:
            process, connection = running
            process.kill()
            process.wait()
            connection.close()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "penstock.engine.core.grammar.xgrammar_process", str(theirs.fileno())]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        connection = Connection(ours.detach())
        self._running = process, connection
        try:
            connection.send_bytes(self._tokenizer.encode())
            if not connection.poll(START_S):
                raise GrammarsUnavailable(f"xgrammar's process has not started after {START_S:.0f} s")
            connection.recv_bytes()
        except (EOFError, OSError) as error:
            self.close()
            raise GrammarsUnavailable("xgrammar's process ended at its start; the log says why") from error
        except GrammarsUnavailable:
            self.close()
            raise
        return process, connection


def main() -> None:
    """Compiles until the other end closes."""
    with Connection(int(sys.argv[1])) as connection, contextlib.suppress(EOFError):
        tokenizer = connection.recv_bytes().decode()
        from xgrammar import GrammarCompiler, TokenizerInfo

        compiler = GrammarCompiler(TokenizerInfo.deserialize_json(tokenizer), max_threads=1, cache_enabled=False)
        connection.send_bytes(b"ready")
        while True:
            work = msgspec.msgpack.decode(connection.recv_bytes(), type=Work)
            try:
                compile_with(compiler, work)
                error = ""
            except (RuntimeError, ValueError, TypeError) as problem:
                error = _PLACE.sub("", str(problem)).strip() or type(problem).__name__
            connection.send_bytes(error.encode())


def compile_with(compiler: "GrammarCompiler", work: Work) -> "CompiledGrammar":
    """What a grammar compiles to; raises whatever the library raises."""
    match work.kind:
        case "json_schema":
            return compiler.compile_json_schema(work.text, **work.options)
        case "grammar":
            return compiler.compile_grammar(work.text)
        case "regex":
            return compiler.compile_regex(work.text)
        case "lark":
            return compiler.compile_lark(work.text)
        case "structural_tag":
            return compiler.compile_structural_tag(work.text)


if __name__ == "__main__":
    main()
