"""What must be equal on all ranks, or they would give different tokens. Light to import: no torch."""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.parallel import words
from penstock.kernels.cpu.build import library_name
from penstock.kernels.cpu.isa import choose

Fingerprint = dict[str, str]
"""Values by name, in the order in which they are compared."""


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
        "flags": _digest(words.encode(config)),
    }


def check_same(ranks: Sequence[Mapping[str, str]]) -> None:
    """ConfigError, naming the first rank that differs from rank 0 and in what."""
    for rank, other in enumerate(ranks):
        for name, value in ranks[0].items():
            if other.get(name) != value:
                raise ConfigError(f"rank {rank} differs from rank 0 in its {name}: {other.get(name)} there, {value} on rank 0")


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
