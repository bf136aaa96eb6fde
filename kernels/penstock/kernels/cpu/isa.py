"""Instruction sets that the compiled operations are built for, and which of them this CPU has. Light to import."""

import ctypes
import platform
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

IsaName = Literal["amx", "avx512_bf16", "avx2", "neon_bf16", "neon", "portable"]


@dataclass(frozen=True)
class Isa:
    """One instruction set.

    Args:
        name: What `--cpu-isa`, the log and `/version` call it.
        machine: As `platform.machine` names the architecture; None: any.
        features: As `/proc/cpuinfo` names what the CPU must have.
        flags: What tells the compiler.
        environment: What keeps torch and oneDNN, in a new process, to this instruction set too.
    """

    name: IsaName
    machine: str | None
    features: frozenset[str]
    flags: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni", "avx2", "fma", "f16c"})
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mavx512vnni", *_AVX2_FLAGS)
ISAS = (
    Isa(
        "amx",
        "x86_64",
        _AVX512 | {"amx_tile", "amx_bf16", "amx_int8"},
        (*_AVX512_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    Isa("avx512_bf16", "x86_64", _AVX512, _AVX512_FLAGS, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}),
    Isa(
        "avx2",
        "x86_64",
        frozenset({"avx2", "fma", "f16c"}),
        _AVX2_FLAGS,
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    ),
    Isa("neon_bf16", "aarch64", frozenset({"asimd", "bf16"}), ("-march=armv8.2-a+bf16",)),
    Isa("neon", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",)),
    Isa("portable", None, frozenset(), (), {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}),
)
"""Best first."""


_TILES = "amx_tile"
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18


def cpu_features() -> frozenset[str]:
    """The CPU's features as Linux names them; empty on other systems, where only `portable` is known to run."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    found = {word for line in lines if line.startswith(("flags", "Features")) for word in line.partition(":")[2].split()}
    return frozenset(found - {_TILES} if _TILES in found and not _request_tiles() else found)


def _request_tiles() -> bool:
    """Asks Linux for the registers of AMX, which a process has only then; a sandbox may refuse."""
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0


def available(machine: str | None = None, features: Set[str] | None = None) -> tuple[Isa, ...]:
    """The instruction sets of a CPU, best first.

    Args:
        machine: Its architecture; None: this machine's.
        features: What it has; None: what this CPU has.
    """
    machine = machine or platform.machine()
    features = cpu_features() if features is None else features
    return tuple(isa for isa in ISAS if isa.machine in (None, machine) and isa.features <= features)


def choose(name: IsaName | None) -> Isa:
    """The instruction set of this name, or the best that this CPU has; ValueError where the CPU lacks it."""
    found = available()
    if name is None:
        return found[0]
    for isa in found:
        if isa.name == name:
            return isa
    raise ValueError(f"this CPU does not have {name} (it has {', '.join(isa.name for isa in found)})")
