"""What must be equal on all ranks, or they would give different tokens. Light to import: no torch."""

import hashlib
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any, Final

import msgspec

from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.connectors.transfer.secret_file import read_secret
from penstock.kernels.cpu.build import library_name
from penstock.kernels.cpu.isa import choose

Fingerprint = dict[str, str]
"""Values by name, in the order in which they are compared."""
_OWN: Final = {
    *("model.path", "model.source", "model.tokenizer", "profile_dir", "cache.disk_folder"),
    *("parallel.node_rank", "parallel.master_addr", "parallel.master_port"),
    *("parallel.data_parallel_size_local", "parallel.data_parallel_start_rank"),
    *("parallel.data_parallel_address", "parallel.data_parallel_rpc_port"),
    *("transfer.engine_id", "transfer.secret", "transfer.host"),
}
"""Where something is differs among nodes; what is there is compared by its content."""
_LONGEST: Final = 100
"""Characters of a value that are told; longer ones are told by a digest."""


def fingerprint(config: EngineConfig) -> Fingerprint:
    """This process's."""
    isa = choose(config.cpu_isa)
    return {
        "version": version("penstock"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "instruction set": isa.name,
        "kernels": library_name(isa),
        "checkpoint": _checkpoint(config),
        "KV transfer secret": "none" if config.transfer is None else _digest(read_secret(config.transfer.secret)),
        **dict(_settings("", msgspec.to_builtins(config, enc_hook=str))),
    }


def check_same(ranks: Sequence[Fingerprint]) -> None:
    """ConfigError, naming the first rank that differs from rank 0 and in what."""
    for rank, other in enumerate(ranks):
        if (told := difference(ranks[0], other, f"rank {rank}", "rank 0")) is not None:
            raise ConfigError(told)


def difference(own: Fingerprint, other: Fingerprint, whose: str, ours: str) -> str | None:
    """Say what differs first; None: nothing does.

    Args:
        own: What is compared with.
        other: What is compared.
        whose: Name of the other.
        ours: Name of whoever is compared with.
    """
    for name in (*own, *(name for name in other if name not in own)):
        if other.get(name) != own.get(name):
            return f"{whose} differs from {ours} in its {name}: {other.get(name)} there, {own.get(name)} on {ours}"
    return None


def _settings(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The engine's settings by name, but for those that a node has of its own."""
    if name in _OWN:
        return
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _settings(f"{name}.{key}" if name else str(key), part)
    else:
        # A flag gives a whole number where its default has a fraction.
        text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
        yield f"setting {name}", text if len(text) <= _LONGEST else _digest(text.encode())


def _checkpoint(config: EngineConfig) -> str:
    """Return a digest of the checkpoint: its configuration, and the names and sizes of its weights. Reading all weights would
    take as long
    as loading."""
    path = config.model.path
    if not path.is_dir():
        return "none"
    parts = [f"{file.name} {file.stat().st_size}".encode() for file in sorted(path.glob("*.safetensors"))]
    parts += [file.read_bytes() for file in sorted(path.glob("*.json"))]
    return _digest(b"\0".join(parts))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
