"""A node without HTTP that has some of a replica's cores: it joins the node with the frontend, and starts them."""

import logging
import os
import select
import socket
import subprocess
import sys
import time
from typing import Final

from penstock.engine import messages
from penstock.engine.config import EngineConfig
from penstock.engine.core.ipc.coupling import Coupling
from penstock.engine.core.ipc.framing import framed
from penstock.engine.environment import computing
from penstock.engine.kv_events_config import KVEventsConfig
from penstock.engine.messages import CoreStart
from penstock.engine.parallel import node_words
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.fingerprint import fingerprint
from penstock.engine.parallel.frames import FrameReader
from penstock.engine.parallel.layout import CoreLayout
from penstock.engine.parallel.node_words import Close, CoreLost
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
        layout = CoreLayout.of(parallel, joined.starts)
        own = joined.starts.index(parallel.data_parallel_start_rank)
        wires = connect(layout, own, joined, parallel.timeout)
        streams = {wire.receiver // layout.tensor: wires.pop(wire) for wire in list(wires) if wire.kind == "core"}
        self._coupling = Coupling(parallel) if parallel.is_in_step else None
        if self._coupling is not None:
            self._coupling.connect(wires)
        self._link, self._reader, self._poll = joined.link, FrameReader(joined.link), select.poll()
        self._poll.register(self._link, select.POLLIN)
        self._cores = dict[int, tuple[int, subprocess.Popen[bytes]]]()
        """By a descriptor that is readable when the core has ended, its number and its process."""
        for core, stream in streams.items():
            self._start(core, stream)
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
            if self._coupling is not None:
                self._coupling.close()

    def _start(self, core: int, stream: socket.socket) -> None:
        config, coupling = self._config.of_rank(core), self._coupling
        with stream:
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
                wave=None if coupling is None else coupling.wave(core),
                experts=None if coupling is None else coupling.experts(core),
            )
            inherited = () if coupling is None else coupling.descriptors(core)
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock.engine.core.ipc.process"],
                stdin=subprocess.PIPE,
                env=computing(config),
                pass_fds=(stream.fileno(), *inherited),
            )
        assert process.stdin is not None
        process.stdin.write(framed(messages.encode(start)))
        process.stdin.flush()
        ended = os.pidfd_open(process.pid)
        self._cores[ended] = core, process
        self._poll.register(ended, select.POLLIN)

    def _obey(self) -> None:
        for frame in self._reader.read():
            match node_words.decode_task(frame):
                case CoreLost(core) if self._coupling is not None:
                    self._coupling.core_ended(core)
                case Close():
                    self._ending = True
                case _:
                    pass  # cores that wait for no others need not know
        if self._reader.ended and not self._ending:
            raise GroupFailed("the node of data-parallel rank 0 is gone, or has ended the replica; its log says why")

    def _bury(self, ended: int) -> None:
        """A core has ended, which its connection tells the first node. Others go on with what they have, unless they need it."""
        core, process = self._cores.pop(ended)
        if self._coupling is not None:
            self._coupling.core_ended(core)
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
