"""One of several frontends of a core, as its own process: started and told what to do by the supervisor."""

import asyncio
import logging
import os
import shutil
import signal
import sys
from collections.abc import Sequence

import msgspec
import uvloop

from penstock.engine.config import ConfigError
from penstock.engine.core.ipc.attached import AttachedClient
from penstock.engine.core.ipc.client import CoreError
from penstock.engine.core.ipc.framing import LENGTH_BYTES
from penstock.engine.frontend.observe.shared_counts import SharedCounts
from penstock.engine.frontend.processes import words
from penstock.engine.frontend.processes.serve import Ending, serve_http
from penstock.engine.frontend.processes.words import CoreGone, FrontendStart, Stop, StopNow, Word


def main() -> int:
    """Runs the frontend described on standard input; exit statuses are those of `penstock serve`. Why it cannot start as asked is
    all that it writes to standard output, where the supervisor reads it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the whole process group: the supervisor's to handle
        signal.signal(number, signal.SIG_IGN)
    try:
        return uvloop.run(_run())
    except ConfigError as error:
        sys.stdout.write(str(error))
        return 2
    except CoreError as error:
        sys.stderr.write(f"penstock serve: {error}\n")
        return 1


async def _run() -> int:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    start = await _read(reader)
    if not isinstance(start, FrontendStart):
        raise ConfigError(
            "standard input holds no start message: this module is started by penstock.engine.frontend.processes.supervisor"
        )
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s frontend {start.frontend}: %(name)s: %(message)s")
    ending, cores = Ending(), [AttachedClient(start.frontend, address) for address in start.core_addresses]
    listening = asyncio.create_task(_listen(reader, ending, cores, start.core_addresses))
    try:
        counts = [SharedCounts(each, start.config.api_server_count, start.row) for each in start.counts]
        # The line in the log is about all of them.
        config = msgspec.structs.replace(start.config, log_stats=start.config.log_stats and start.row == 0)
        return await serve_http(cores, config, ending, counts)
    finally:
        listening.cancel()


async def _listen(
    reader: asyncio.StreamReader, ending: Ending, cores: Sequence[AttachedClient], addresses: Sequence[str]
) -> None:
    """Obey the supervisor's messages. End the process with the supervisor, which may have been killed and left the sockets'
    folders behind."""
    while (word := await _read(reader)) is not None:
        match word:
            case Stop():
                ending.stop.set()
            case StopNow():
                ending.now.set()
            case CoreGone(rank, reason):
                cores[rank].gone(reason)
            case FrontendStart():
                raise ValueError("a second start")
    for address in addresses:
        shutil.rmtree(os.path.dirname(address), ignore_errors=True)  # noqa: PTH120
    os._exit(1)


async def _read(reader: asyncio.StreamReader) -> Word | None:
    """The next word; None at the end."""
    try:
        length = await reader.readexactly(LENGTH_BYTES)
        return words.decode(await reader.readexactly(int.from_bytes(length, "little")))
    except asyncio.IncompleteReadError:
        return None


if __name__ == "__main__":
    sys.exit(main())
