"""`--kv-offload-store`: which kind of shared store, and where it listens."""

import re
from typing import Final, Literal, get_args

import msgspec

from penstock.engine.config import ConfigError

StoreKind = Literal["mooncake", "lmcache"]

_ADDRESS: Final = re.compile(rf"({'|'.join(get_args(StoreKind))})://([^/\s:]+|\[[0-9a-fA-F:]+\]):([1-9][0-9]{{0,4}})")


class StoreAddress(msgspec.Struct, frozen=True):
    """Where a shared store listens."""

    kind: StoreKind
    host: str
    """An IPv6 address without brackets."""
    port: int

    @property
    def target(self) -> str:
        """As `HOST:PORT`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.kind}://{self.target}"


def store_address(uri: str) -> StoreAddress:
    """Return what `--kv-offload-store` says; `ConfigError` where it is no address of a store."""
    if (read := _ADDRESS.fullmatch(uri)) is None or int(read[3]) > 65535:
        raise ConfigError(f"--kv-offload-store {uri!r}: expected mooncake://HOST:PORT or lmcache://HOST:PORT")
    kind: StoreKind = "mooncake" if read[1] == "mooncake" else "lmcache"
    return StoreAddress(kind, read[2].strip("[]"), int(read[3]))
