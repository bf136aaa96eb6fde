"""`--kv-transfer-config`, in vLLM's form."""

import uuid
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.engine.config import ConfigError, TransferConfig, TransferRole, TransportName
from penstock.engine.connectors.transfer import nixl
from penstock.engine.connectors.transfer.secret_file import read_secret
from penstock.plain_errors import explained
from penstock.suggest import suggestion

CONNECTOR = "transfer"
_HERE = {
    "NixlConnector": """'transfer' with "kv_connector_extra_config": {"transports": ["nixl"]}""",
    "OffloadingConnector": "--kv-offload-memory-bytes",
    "MooncakeStoreConnector": "--kv-offload-store mooncake://HOST:PORT",
    "LMCacheConnectorV1": "--kv-offload-store lmcache://HOST:PORT",
    "LMCacheMPConnector": "--kv-offload-store lmcache://HOST:PORT",
}
"""What does here what connectors of vLLM do there."""
_LAST_PORT = 65535
_HERE_ALONE = "127.0.0.1"
_Seconds = Annotated[float, Meta(gt=0)]


class _Extra(msgspec.Struct, frozen=True):
    """`kv_connector_extra_config`."""

    kv_lease_duration: _Seconds = 30.0
    prefill_timeout: _Seconds = 30.0
    transports: Annotated[tuple[TransportName, ...], Meta(min_length=1)] = ("shm", "tcp")


class _Keys(msgspec.Struct, frozen=True):
    kv_connector: str
    kv_role: TransferRole
    engine_id: str = "penstock"
    kv_ip: str | None = None
    kv_port: Annotated[int, Meta(ge=1, le=_LAST_PORT)] = 14579
    kv_connector_extra_config: dict[str, Any] = {}


def transfer_config(keys: dict[str, Any], secret: str | None, ranks: int = 1, *, several_nodes: bool = False) -> TransferConfig:
    """Return what the keys say; `ConfigError` names the one that is wrong.

    Args:
        keys: vLLM's.
        secret: `--kv-transfer-secret-file`.
        ranks: Of all cores, each of which lends on a port of its own.
        several_nodes: Whether they are distributed among nodes.
    """
    given = _read(keys, _Keys, "--kv-transfer-config")
    if given.kv_connector != CONNECTOR:
        instead = _HERE.get(given.kv_connector, repr(CONNECTOR))
        raise ConfigError(f"--kv-transfer-config: kv_connector {given.kv_connector!r} is not here; there is {instead}")
    extra = _read(given.kv_connector_extra_config, _Extra, "--kv-transfer-config: kv_connector_extra_config")
    if secret is None:
        raise ConfigError("--kv-transfer-config needs --kv-transfer-secret-file: pages go only to replicas that know the secret")
    if len(set(extra.transports)) < len(extra.transports):
        raise ConfigError(
            f"--kv-transfer-config: kv_connector_extra_config: transports names one twice: {list(extra.transports)}"
        )
    if given.kv_role != "kv_consumer" and (last := given.kv_port + ranks - 1) > _LAST_PORT:
        raise ConfigError(
            f"--kv-transfer-config: kv_port {given.kv_port}: {ranks} ranks lend on ports up to {last}, and the last port is "
            f"{_LAST_PORT}"
        )
    if given.kv_ip is None and several_nodes and given.kv_role != "kv_consumer":
        raise ConfigError(
            "--kv-transfer-config: with several nodes a replica that lends needs kv_ip on each of them: the "
            "address of that node by which other replicas reach it"
        )
    if "nixl" in extra.transports:
        nixl.check_installed()
    path = Path(secret).absolute()
    read_secret(path)  # what cannot be read is said now, not when the model has been loaded
    return TransferConfig(
        role=given.kv_role,
        # A restarted replica has none of the pages that it lent before.
        engine_id=f"{given.engine_id}-{uuid.uuid4().hex[:16]}",
        secret=path,
        host=given.kv_ip or _HERE_ALONE,
        port=given.kv_port,
        lease_s=extra.kv_lease_duration,
        prefill_timeout_s=extra.prefill_timeout,
        transports=extra.transports,
    )


def _read(keys: dict[str, Any], kind: type[Any], where: str) -> Any:
    for name in keys:
        if name not in kind.__struct_fields__:
            raise ConfigError(f"{where}: there is no key {name!r}{suggestion(name, kind.__struct_fields__)}")
    try:
        return msgspec.convert(keys, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {explained(error, kind)}") from None
