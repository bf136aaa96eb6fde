"""Pages by NIXL, where it is installed: the reader reads the lender's memory over UCX, that is RDMA, shared memory or TCP.

NIXL knows no deadline, and a peer that was stopped never answers. A read that was given up can still write to memory later. So
pages are read into a stage, and copied from there. The stage of such a read is used again only when NIXL says that it has ended.
"""

import importlib
import importlib.util
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine.config import ConfigError
from penstock.engine.connectors.transfer import wire
from penstock.engine.connectors.transfer.transport import Bytes, await_read
from penstock.engine.connectors.transfer.wire import Stream

PACKAGES: Final = ("nixl_cu12", "nixl_cu13", "nixl")
INSTALL: Final = "pip install --no-deps nixl-cu12"
STAGE_BYTES: Final = 16 << 20
_MEMORY, _DEVICE = "DRAM", 0
_POLL_S, _SPINS = 2e-4, 200

_log = logging.getLogger(__name__)


class _Offer(msgspec.Struct, frozen=True):
    metadata: bytes
    """NIXL's, of the lender's agent."""
    address: int
    """Of slot 0, in the lender's process."""


def installed() -> str | None:
    """Name of the package; None: NIXL is not installed."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is not None), None)


class NixlOutlet:
    """Registers the lender's memory.

    Args:
        name: Of the agent; no other one in the fleet has it.
        slots: [slots, bytes of a page].

    Raises:
        ConfigError: NIXL is not installed.
    """

    def __init__(self, name: str, slots: npt.NDArray[np.uint8]) -> None:
        self._slots = slots  # as long as it is registered
        self._agent = _agent(name)
        self._registered = self._agent.register_memory([_range(slots)], _MEMORY)
        self._offer = _Offer(self._agent.get_agent_metadata(), slots.ctypes.data)

    def offer(self) -> bytes:
        """The agent, and where the slots lie."""
        return msgspec.msgpack.encode(self._offer)

    def send(self, stream: Stream, slots: Sequence[int]) -> None:
        """Waits until the reader has read them."""
        await_read(stream)

    def close(self) -> None:
        """Takes the registration back. That does not stop a reader: its lease does."""
        self._agent.deregister_memory(self._registered)


class NixlInlet:
    """Reads lenders' memory.

    Args:
        name: Of the agent.
        stage_bytes: Of each stage, but one page at least.

    Raises:
        ConfigError: NIXL is not installed.
    """

    def __init__(self, name: str, stage_bytes: int = STAGE_BYTES) -> None:
        self._stage_bytes = stage_bytes
        self._agent = _agent(name)
        self._lock = threading.Lock()
        self._free: list[Bytes] = []
        self._given_up: list[tuple[Any, Bytes]] = []
        self._users = Counter[str]()
        """Ways that are open, by agent."""

    @property
    def num_given_up(self) -> int:
        """Stages of reads that have not ended in time, and that may still be written to."""
        return len(self._given_up)

    def open(self, offer: bytes, deadline: float) -> "_Remote":
        """Makes the lender's agent known to ours."""
        read = msgspec.msgpack.decode(offer, type=_Offer)
        with self._lock:
            try:
                name = self._agent.add_remote_agent(read.metadata)
            except Exception as error:  # its errors have no common class
                raise OSError(f"NIXL does not take the lender's agent: {error}") from error
            self._users[name.decode()] += 1
        return _Remote(self, name.decode(), read.address)

    def read(self, peer: str, address: int, theirs: Sequence[int], into: Sequence[Bytes], deadline: float) -> None:
        """Reads pages of a lender whose slot 0 is at `address`, a stage at a time."""
        size = len(into[0]) if into else 1
        pages = max(1, self._stage_bytes // size)
        for first in range(0, len(theirs), pages):
            there, here = theirs[first : first + pages], into[first : first + pages]
            stage = self._take_stage(pages * size)
            handle = None
            try:
                handle = self._begin(peer, address, there, stage, size)
                self._await(handle, deadline)
                for number, buffer in enumerate(here):
                    buffer[:] = stage[number * size : (number + 1) * size]
            except Exception as error:
                if handle is not None and self._is_under_way(handle):
                    with self._lock:
                        self._given_up.append((handle, stage))
                    handle, stage = None, None
                if isinstance(error, OSError):
                    raise
                raise OSError(f"NIXL: {type(error).__name__}: {error}") from error
            finally:
                with self._lock:
                    if handle is not None:
                        self._agent.release_xfer_handle(handle)
                    if stage is not None:
                        self._free.append(stage)

    def forget(self, peer: str) -> None:
        """A way to the lender is closed. Its agent is forgotten with the last one, unless a read that was given up needs it."""
        with self._lock:
            self._users[peer] -= 1
            if not self._users[peer]:
                del self._users[peer]
                if not self._given_up:
                    self._agent.remove_remote_agent(peer)

    def _begin(self, peer: str, address: int, theirs: Sequence[int], stage: Bytes, size: int) -> Any:
        to = [(stage.ctypes.data + number * size, size, _DEVICE) for number in range(len(theirs))]
        of = [(address + slot * size, size, _DEVICE) for slot in theirs]
        with self._lock:
            local, remote = (self._agent.get_xfer_descs(side, _MEMORY) for side in (to, of))
            handle = self._agent.initialize_xfer("READ", local, remote, peer)
            try:
                self._agent.transfer(handle)
            except Exception:
                self._agent.release_xfer_handle(handle)
                raise
        return handle

    def _await(self, handle: Any, deadline: float) -> None:
        looks = 0
        while (state := self._state(handle)) == "PROC":
            if time.monotonic() > deadline:
                raise TimeoutError("the lender's memory could not be read in time")
            looks += 1
            time.sleep(0 if looks < _SPINS else _POLL_S)
        if state != "DONE":
            raise OSError(f"a read ended as {state}")

    def _state(self, handle: Any) -> str:
        with self._lock:
            return self._agent.check_xfer_state(handle)

    def _is_under_way(self, handle: Any) -> bool:
        try:
            return self._state(handle) == "PROC"
        except Exception as error:  # noqa: BLE001  its errors have no common class; each ends the read
            _log.debug("a read of KV pages ended: %s", error)
            return False

    def _take_stage(self, size: int) -> Bytes:
        """A stage of so many bytes that nobody writes to, one of a read that has ended meanwhile perhaps."""
        ended = [it for it in list(self._given_up) if not self._is_under_way(it[0])]
        with self._lock:
            for it in ended:
                self._given_up.remove(it)
                self._agent.release_xfer_handle(it[0])
                self._free.append(it[1])
            if (fits := next((it for it in self._free if len(it) >= size), None)) is not None:
                self._free = [it for it in self._free if it is not fits]
                return fits
        stage = np.empty(size, np.uint8)
        with self._lock:
            self._agent.register_memory([_range(stage)], _MEMORY)
        return stage


class _Remote:
    """One lender's memory."""

    def __init__(self, inlet: NixlInlet, peer: str, address: int) -> None:
        self._inlet, self._peer, self._address = inlet, peer, address

    def read(self, stream: Stream, theirs: Sequence[int], into: Sequence[Bytes]) -> None:
        """Reads pages, and says so."""
        self._inlet.read(self._peer, self._address, theirs, into, stream.deadline)
        stream.send(wire.Read())

    def close(self) -> None:
        """Forgets the lender's agent."""
        self._inlet.forget(self._peer)


def check_installed() -> str:
    """Return the name of NIXL's package; `ConfigError` where there is none."""
    if (package := installed()) is None:
        raise ConfigError(f"--kv-transfer-config: the transport nixl needs NIXL, which is not installed: {INSTALL}")
    return package


def _agent(name: str) -> Any:
    module = importlib.import_module(check_installed())
    return module.nixl_agent(name, module.nixl_agent_config(backends=["UCX"]))


def _range(memory: npt.NDArray[np.uint8]) -> tuple[int, int, int, str]:
    return memory.ctypes.data, memory.nbytes, _DEVICE, ""
