"""Pages in an object store, on one rank: S3 and what speaks its protocol.

An object that is damaged, gone, late or refused is a page that is not there. Credentials and place are the AWS variables, as for
checkpoints from a bucket.
"""

import logging
import os
import re
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from penstock.engine.config import ConfigError
from penstock.engine.connectors.moves import Move, PageFile, page_name, page_of
from penstock.engine.connectors.namespace import Namespace
from penstock.engine.connectors.page_mover import PageMover, page_header

if TYPE_CHECKING:
    from obstore.store import S3Store

THREADS: Final = 8
TIMEOUT_S: Final = 5.0
"""Of one request; a read that takes longer is a miss."""
_ADDRESS: Final = re.compile(r"s3://([^/]+)/(.*[^/])/*")

_log = logging.getLogger(__name__)


def bucket_and_path(uri: str) -> tuple[str, str]:
    """Return the two parts of `s3://BUCKET/PATH`; `ConfigError` for anything else."""
    if (read := _ADDRESS.fullmatch(uri)) is None:
        raise ConfigError(f"--kv-offload-bucket {uri!r}: expected s3://BUCKET/PATH")
    return read[1], read[2]


class PageObjects(PageMover):
    """The objects of one namespace.

    Args:
        uri: `--kv-offload-bucket`.
        namespace: Names the folder below it.
        slots: [slots, bytes of a page] of the host's memory.
    """

    def __init__(self, uri: str, namespace: Namespace, slots: npt.NDArray[np.uint8]) -> None:
        actions = {"write": self._write, "read": self._read, "delete": self._delete, "list": self._list}
        super().__init__(slots, actions, THREADS, "page-objects")
        self._bucket, path = bucket_and_path(uri)
        self._folder = f"{path}/{namespace.name}"

    @cached_property
    def _store(self) -> "S3Store":
        from obstore.store import S3Store

        plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        limit = timedelta(seconds=TIMEOUT_S)
        return S3Store(
            self._bucket,
            client_options={"allow_http": plain, "timeout": limit, "connect_timeout": limit},
            retry_config={"max_retries": 0, "retry_timeout": limit},  # to compute the tokens is faster
        )

    def _path(self, move: Move) -> str:
        return f"{self._folder}/{page_name(move)}"

    def _write(self, move: Move) -> None:
        import obstore

        page = self.slots[move.slot].tobytes()  # the store's threads read it beside other work
        obstore.put(self._store, self._path(move), page_header(move, memoryview(page)) + page)

    def _read(self, move: Move) -> None:
        import obstore

        body = memoryview(bytes(obstore.get(self._store, self._path(move)).bytes()))
        page = body[-self.slots.shape[1] :]
        header = body[: -self.slots.shape[1]]
        if len(page) != self.slots.shape[1] or header != page_header(move, page):
            raise ValueError(f"s3://{self._bucket}/{self._path(move)} has {len(body):,} bytes that are not this page")
        self.slots[move.slot] = np.frombuffer(page, np.uint8)

    def _delete(self, move: Move) -> None:
        import obstore

        obstore.delete(self._store, self._path(move))

    def _list(self, move: Move) -> list[PageFile]:
        import obstore

        listed = obstore.list(self._store, prefix=self._folder).collect()
        names = sorted((it["last_modified"], it["path"].rpartition("/")[2]) for it in listed)
        return [page for _, name in names if (page := page_of(name)) is not None]
