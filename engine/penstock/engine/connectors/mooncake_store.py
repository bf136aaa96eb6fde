"""Pages in a Mooncake store, on one rank: memory on other hosts that all replicas of a model share.

The store's client runs in this process, and gives no memory to the store. Its calls may take half a minute where the store hangs,
so each move has a deadline of its own. A page that is damaged, gone or late is a page that is not there.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.engine.config import ConfigError
from penstock.engine.connectors.moves import Move, PageFile, page_name
from penstock.engine.connectors.namespace import Namespace
from penstock.engine.connectors.page_mover import PageMover, page_header
from penstock.engine.connectors.store_address import StoreAddress

THREADS: Final = 4
TIMEOUT_S: Final = 5.0
"""Of each move; a read that takes longer is a miss."""
CONNECT_S: Final = 3.0
"""To connect, a process of its own included that tries it first."""
INSTALL: Final = "pip install --no-deps mooncake-transfer-engine-non-cuda, and Debian's package libibverbs1"
_MIN_BUFFER_BYTES: Final = 16 << 20
_ABSENT: Final = -704
"""The store's code for a page that it does not have."""
_SETTINGS: Final = {"MC_LOG_LEVEL": "ERROR", "MC_RPC_TIMEOUT_MS": "2000", "MC_STORE_CLIENT_SETUP_RETRIES": "1"}
"""Of the client, where the environment says nothing else. Its own times are half a minute, five times over at the start."""
_TRIAL: Final = """\
import sys
from mooncake.store import MooncakeDistributedStore
sys.exit(MooncakeDistributedStore().setup(sys.argv[1], "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[2]) != 0)
"""


def store_client() -> Callable[[], Any]:
    """The class of the store's client; `ConfigError` where that is not installed."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.store import MooncakeDistributedStore  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"--kv-offload-store: the client of Mooncake is missing ({error}): {INSTALL}") from None
    return MooncakeDistributedStore


class MooncakeStore(PageMover):
    """The pages of one namespace.

    Args:
        address: Of the store's master.
        namespace: With which the names of the pages begin.
        slots: [slots, bytes of a page] of the host's memory.

    Raises:
        ConfigError: The store's client is not installed.
    """

    def __init__(self, address: StoreAddress, namespace: Namespace, slots: npt.NDArray[np.uint8]) -> None:
        actions = {"write": self._write, "read": self._read, "delete": self._delete, "find": self._find}
        super().__init__(slots, actions, THREADS, "page-store", TIMEOUT_S)
        self._address = address
        self._folder = namespace.name
        self._make = store_client()
        self._opening = threading.Lock()
        self._client: Any = None
        self._threads[0].submit(self._opened)  # no request has to wait for that; the next move tells what is wrong

    def _opened(self) -> Any:
        """The client, connected beside the start, which does not depend on the store; where that failed, at the next use."""
        with self._opening:
            if self._client is None:
                with socket.create_connection((self._address.host, self._address.port), CONNECT_S) as probe:
                    here = probe.getsockname()[0]
                # While the client connects it holds the interpreter's lock: a store that hangs would stop the engine.
                trial = [sys.executable, "-c", _TRIAL, here, self._address.target]
                subprocess.run(trial, timeout=CONNECT_S, check=True, stderr=subprocess.DEVNULL)
                buffer_bytes = max(_MIN_BUFFER_BYTES, 4 * THREADS * self.slots.shape[1])
                client = self._make()
                code = client.setup(here, "P2PHANDSHAKE", 0, buffer_bytes, "tcp", "", self._address.target)
                self._check(code, "the client does not start")
                self._client = client
            return self._client

    def _check(self, code: int, what: str) -> None:
        if code < 0:
            raise OSError(f"{self._address}: {what}: error {code} of the store")

    def _name(self, page: Move | PageFile) -> str:
        return f"{self._folder}/{page_name(page)}"

    def _write(self, move: Move) -> None:
        page = self.slots[move.slot].tobytes()  # the slot may be another page's, should this come too late
        header = page_header(move, memoryview(page))
        self._check(self._opened().put_parts(self._name(move), header, page), "a page was not stored")

    def _read(self, move: Move) -> None:
        body = memoryview(self._opened().get(self._name(move)))
        page = body[-self.slots.shape[1] :]
        header = body[: -self.slots.shape[1]]
        if not body:
            raise FileNotFoundError(f"{self._address}: the page is not there")
        if len(page) != self.slots.shape[1] or header != page_header(move, page):
            raise ValueError(f"{self._address} has {len(body):,} bytes that are not this page")
        self.fill(move, page)

    def _delete(self, move: Move) -> None:
        code = self._opened().remove(self._name(move), True)  # though another may be reading it
        if code != _ABSENT:
            self._check(code, "a page was not deleted")

    def _find(self, move: Move) -> list[PageFile]:
        codes: list[int] = self._opened().batch_is_exist([self._name(page) for page in move.pages])
        self._check(min(codes), "its pages are not known")
        return [page for page, there in zip(move.pages, codes, strict=True) if there]
