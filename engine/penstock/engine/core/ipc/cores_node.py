"""A node without HTTP that has some of a replica's cores: it joins the node with the frontend, and starts them."""

import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Final

from penstock.engine import messages
from penstock.engine.config import EngineConfig
from penstock.engine.core.ipc.framing import framed
from penstock.engine.environment import computing
from penstock.engine.kv_events_config import KVEventsConfig
from penstock.engine.messages import CoreStart
from penstock.engine.parallel import node_words
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.fingerprint import fingerprint
from penstock.engine.parallel.frames import FrameReader
from penstock.engine.parallel.layout import CoreLayout, Wire
from penstock.engine.parallel.node_words import Close
from penstock.engine.parallel.rendezvous import connect, join

_CLOSE_S: Final = 5.0

log = logging.getLogger(__name__)


class CoresNode:
    """One node, from joining the first one to the end of the replica. Each core has a connection of its own to the frontend.

    Args:
        config: Of the replica; its `parallel` says which cores are here.
        runner: `module:Class` of the model runner; None: the device's.
        kv_events: Where the cores publish KV events in vLLM's form; None: nowhere.

    Raises:
        ConfigError: The first node has turned this one away.
        GroupFailed: The nodes have not found each other.
    """

    def __init__(self, config: EngineConfig, runner: str | None, kv_events: KVEventsConfig | None) -> None:
        parallel = config.parallel
        self._config, self._runner, self._kv_events = config, runner, kv_events
        joined = join(parallel, fingerprint(config))
        layout = CoreLayout(joined.starts, parallel.data_parallel_size)
        wires = connect(layout, layout.node(parallel.data_parallel_start_rank), joined, parallel.timeout)
        self._link, self._reader, self._poll = joined.link, FrameReader(joined.link), select.poll()
        self._poll.register(self._link, select.POLLIN)
        self._cores = dict[int, tuple[int, subprocess.Popen[bytes]]]()
        """By a descriptor that is readable when the core has ended, its number and its process."""
        for core in parallel.local_cores:
            self._start(core, wires)
        self._ending = False

    def run(self) -> None:
        """Serve until the first node ends the replica in good order; raises `GroupFailed` where it ends otherwise."""
        try:
            while not self._ending:
                for fd, _ in self._poll.poll():
                    self._obey() if fd == self._link.fileno() else self._bury(fd)
        finally:
            self._link.close()
            self._close()

    def _start(self, core: int, wires: Mapping[Wire, socket.socket]) -> None:
        config = self._config.of_rank(core)
        with wires[Wire(0, core, "core")] as stream:
            own = stream.getsockname()[0]
            anywhere = f"tcp://[{own}]:*" if ":" in own else f"tcp://{own}:*"
            start = CoreStart(
                config=config,
                engine_index=core,
                address=None,
                # The first node forwards connections from the ports by which clients know them.
                events_addresses=[anywhere],
                replay_addresses=[anywhere],
                runner=self._runner,
                kv_events=self._kv_events,
                stream=stream.fileno(),
            )
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock.engine.core.ipc.process"],
                stdin=subprocess.PIPE,
                env=computing(config),
                pass_fds=(stream.fileno(),),
            )
        assert process.stdin is not None
        process.stdin.write(framed(messages.encode(start)))
        process.stdin.flush()
        ended = os.pidfd_open(process.pid)
        self._cores[ended] = core, process
        self._poll.register(ended, select.POLLIN)

    def _obey(self) -> None:
        for frame in self._reader.read():
            if isinstance(node_words.decode_task(frame), Close):
                self._ending = True
        if self._reader.ended and not self._ending:
            raise GroupFailed("the node of data-parallel rank 0 is gone, or has ended the replica; its log says why")

    def _bury(self, ended: int) -> None:
        """A core has ended, which its connection tells the first node. The others go on with what they have."""
        core, process = self._cores.pop(ended)
        self._poll.unregister(ended)
        os.close(ended)
        status = process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        # At the end of the replica, cores may be gone before this node hears of it.
        log.log(logging.ERROR if status else logging.INFO, "the core of data-parallel rank %d %s", core, how)

    def _close(self) -> None:
        """End the cores, which follow this process."""
        for _, process in self._cores.values():
            assert process.stdin is not None
            process.stdin.close()
        deadline = time.monotonic() + _CLOSE_S
        for ended, (_, process) in self._cores.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(ended)
        self._cores = {}
