"""Pages in an LMCache server on this node, on one rank: memory, and what lies behind it, for all replicas on the node.

The server hands out slots of a memory segment that both processes map; calls over gRPC say which. Its other way to pass pages on
is Python's pickle, which is refused: whoever reached the server could have this process run anything. LMCache names content by
hashes of token ids, so a page's name is passed as such. A page that is damaged, gone or late is a page that is not there.
"""

import mmap
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine.config import ConfigError
from penstock.engine.connectors import lmcache_protocol
from penstock.engine.connectors.lookups import PATIENCE_S
from penstock.engine.connectors.moves import Move, PageFile, page_name
from penstock.engine.connectors.namespace import Namespace
from penstock.engine.connectors.page_mover import PageMover, page_header
from penstock.engine.connectors.store_address import StoreAddress

THREADS: Final = 4
TIMEOUT_S: Final = 5.0
"""Of each move; a read that takes longer is a miss."""
CALL_S: Final = 2.0
"""Of each call to the server."""
FIND_S: Final = 0.6 * PATIENCE_S
"""Until an answer to a look-up is given, with what has been found by then: each page is a few calls."""
AT_ONCE: Final = 32
"""Pages that are looked up together."""
SHUNNED: Final = 65_536
"""Most pages that are remembered as bad: the server deletes none of them."""
INSTALL: Final = "pip install grpcio protobuf"
_SEGMENTS: Final = Path("/dev/shm")
_HEADER_BYTES: Final = 64
"""Before each page: its header, and zeros."""
_WORD_BYTES: Final = 4
"""Of a token id, as the server hashes it."""


class _Slot(msgspec.Struct):
    """Where a page lies in the segment."""

    offset: int
    length: int


class _Slots(msgspec.Struct):
    """What the server's `encoded_context` says."""

    slots: list[_Slot] = []


class _Segment(NamedTuple):
    """The server's memory, as this process maps it."""

    path: Path
    inode: int
    memory: mmap.mmap
    chunk: int
    """Tokens that make one name."""


class LmcacheStore(PageMover):
    """The pages of one namespace.

    Args:
        address: Of the server's gRPC port.
        namespace: The model's name at the server.
        slots: [slots, bytes of a page] of the host's memory.

    Raises:
        ConfigError: gRPC is not installed.
    """

    def __init__(self, address: StoreAddress, namespace: Namespace, slots: npt.NDArray[np.uint8]) -> None:
        actions = {"write": self._write, "read": self._read, "delete": self._delete, "find": self._find}
        super().__init__(slots, actions, THREADS, "page-store", TIMEOUT_S)
        self._address = address
        self._model = namespace.name
        self._instance = secrets.randbits(62)
        self._shunned: OrderedDict[str, None] = OrderedDict()
        self._opening = threading.Lock()
        self._segment: _Segment | None = None
        try:
            import grpc  # pyright: ignore[reportMissingTypeStubs]

            self._messages = lmcache_protocol.message_classes()
        except ImportError as error:
            raise ConfigError(f"--kv-offload-store: gRPC for LMCache is missing ({error}): {INSTALL}") from None
        self._failed: type[Exception] = grpc.RpcError
        on_this_node = [("grpc.enable_http_proxy", 0)]
        self._channel: Any = grpc.insecure_channel(address.target, on_this_node)
        self._methods = lmcache_protocol.methods(self._channel, self._messages)
        self._threads[0].submit(self._opened)  # no request has to wait for that; the next move tells what is wrong

    def close(self) -> None:
        """Waits until all moves have ended, or have had their time."""
        super().close()
        if self._segment is not None:
            with suppress(OSError):  # a server that is gone knows nobody
                self._call("UnregisterKvCacheEngineDrivenContext", instance_id=self._instance)
        self._channel.close()

    def _opened(self) -> _Segment:
        """The server's memory, mapped beside the start, which does not depend on it; where that failed, at the next use."""
        with self._opening:
            if (held := self._segment) is not None and held.path.exists() and held.path.stat().st_ino == held.inode:
                return held
            chunk = self._call("GetChunkSize").chunk_size
            told = self._call(
                "RegisterKvCacheEngineDrivenContext",
                instance_id=self._instance,
                model_name=self._model,
                world_size=1,
                block_size=chunk,
                num_layers=1,
                hidden_dim_size=self._page_bytes,  # a chunk of the server is one page of ours: bytes to it
                num_physical_slots=1,
                dtype_str="uint8",
                use_mla=True,
            )
            name = told.shm_name.lstrip("/")
            if not name or "/" in name or not told.pool_size:
                raise OSError(
                    f"{self._address} passes pages on as Python objects alone, which is not safe:"
                    " start it with --supported-transfer-mode engine_driven --shm-name NAME"
                )
            descriptor = os.open(_SEGMENTS / name, os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = mmap.mmap(descriptor, told.pool_size)
                self._segment = _Segment(_SEGMENTS / name, os.fstat(descriptor).st_ino, memory, chunk)
            finally:
                os.close(descriptor)
            return self._segment

    @property
    def _page_bytes(self) -> int:
        return _HEADER_BYTES + self.slots.shape[1]

    def _call(self, name: str, **fields: Any) -> Any:
        """The server's answer; see `_calls`."""
        [answer] = self._calls(name, [fields])
        return answer

    def _calls(self, name: str, all_fields: Sequence[dict[str, Any]]) -> list[Any]:
        """The server's answers to calls that are made at once; `OSError` where one has none. The next move registers anew: the
        server may be another one."""
        message = self._messages[f"{name}Request"]
        begun = [self._methods[name].future(message(**fields), timeout=CALL_S) for fields in all_fields]
        try:
            return [it.result() for it in begun]
        except self._failed as error:
            self._segment = None
            told: Any = error
            raise OSError(f"{self._address}: {name}: {told.code().name}: {told.details()}") from None

    def _key(self, segment: _Segment, page: Move | PageFile, *, worker: bool = True) -> Any:
        """A page's name in LMCache's form; look-ups are for all workers, of which there is one."""
        name = bytes.fromhex(page_name(page))
        words = [int.from_bytes(name[at : at + _WORD_BYTES]) for at in range(0, len(name), _WORD_BYTES)]
        if len(words) > segment.chunk:
            raise OSError(f"{self._address} has chunks of {segment.chunk} tokens: a page's name needs --chunk-size {len(words)}")
        return self._messages["IpcCacheServerKey"](
            model_name=self._model,
            world_size=1,
            token_ids=words + [0] * (segment.chunk - len(words)),
            end=segment.chunk,
            request_id=secrets.token_hex(8),
            num_kv_readers=1,
            **({"worker_id": 0} if worker else {}),
        )

    def _slot(self, segment: _Segment, encoded: bytes) -> _Slot | None:
        """The one slot that the server names, checked; None: it names none."""
        slots = msgspec.msgpack.decode(encoded, type=_Slots).slots if encoded else []
        if not slots:
            return None
        [slot] = slots
        if slot.length != self._page_bytes or not 0 <= slot.offset <= len(segment.memory) - slot.length:
            raise ValueError(f"{self._address} names {slot.length:,} bytes at {slot.offset:,}, which is no slot of a page")
        return slot

    def _write(self, move: Move) -> None:
        page = self.slots[move.slot].tobytes()  # the slot may be another page's, should this come too late
        header = page_header(move, memoryview(page))
        segment = self._opened()
        key = self._key(segment, move)
        try:
            slot = self._slot(segment, self._call("PrepareStore", key=key, instance_id=self._instance).encoded_context)
            if slot is None:
                if not self._found(segment, [PageFile(move.group, move.block_hash)])[0]:
                    raise OSError(f"{self._address} has no room for a page")
            else:
                segment.memory[slot.offset : slot.offset + slot.length] = header.ljust(_HEADER_BYTES, b"\0") + page
                if not self._call("CommitStore", key=key, instance_id=self._instance).success:
                    raise OSError(f"{self._address}: a page was not stored")
        finally:
            self._call("EndSession", request_id=key.request_id)
        self._shunned.pop(page_name(move), None)

    def _read(self, move: Move) -> None:
        segment = self._opened()
        key = self._key(segment, move)
        whole = self._key(segment, move, worker=False)
        whole.request_id = key.request_id
        try:
            self._call("Lookup", key=whole, tp_size=1)  # pins it
            if not self._call("WaitPrefetchStatus", request_id=key.request_id, timeout=CALL_S / 2).chunk_count:
                raise FileNotFoundError(f"{self._address}: the page is not there")
            got = self._call("PrepareRetrieve", key=key, instance_id=self._instance)
            slot = self._slot(segment, got.encoded_context)
            if slot is None:
                raise FileNotFoundError(f"{self._address}: the page is there no more")
            body = memoryview(segment.memory[slot.offset : slot.offset + slot.length])
            self._call("CommitRetrieve", key=key, instance_id=self._instance)
        finally:
            self._call("EndSession", request_id=key.request_id)
        page = body[_HEADER_BYTES:]
        if body[:_HEADER_BYTES] != page_header(move, page).ljust(_HEADER_BYTES, b"\0"):
            raise ValueError(f"{self._address} has {len(body):,} bytes that are not this page")
        self.fill(move, page)

    def _delete(self, move: Move) -> None:
        """The page is not found any more by this replica, until it is written again: the server deletes no page by name."""
        self._shunned[page_name(move)] = None
        if len(self._shunned) > SHUNNED:
            self._shunned.popitem(last=False)

    def _find(self, move: Move) -> list[PageFile]:
        began = time.perf_counter()
        segment = self._opened()
        found: list[PageFile] = []
        wanted = [page for page in move.pages if page_name(page) not in self._shunned]
        for at in range(0, len(wanted), AT_ONCE):
            some = wanted[at : at + AT_ONCE]
            there = self._found(segment, some)
            found += [page for page, count in zip(some, there, strict=True) if count]
            if not any(there) or time.perf_counter() - began > FIND_S:
                break
        return found

    def _found(self, segment: _Segment, pages: Sequence[PageFile]) -> list[int]:
        """How many of each page there are: one or none."""
        keys = [self._key(segment, page, worker=False) for page in pages]
        self._calls("Lookup", [{"key": key, "tp_size": 1} for key in keys])
        waits = [{"request_id": key.request_id, "timeout": CALL_S / 2} for key in keys]
        counts = [it.chunk_count for it in self._calls("WaitPrefetchStatus", waits)]
        pinned = [{"key": key, "tp_size": 1} for key, count in zip(keys, counts, strict=True) if count]
        self._calls("FreeLookupLocks", pinned)
        self._calls("EndSession", [{"request_id": key.request_id} for key in keys])
        return counts
