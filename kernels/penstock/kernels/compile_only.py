"""Compiles Triton kernels for a GPU that is not there: what is launched within ends up in Triton's cache, and nothing runs.

The launch itself decides which variants a kernel is compiled to (dtypes, alignment, constants), so that launching the real
operations on tensors of the device `meta` fills the cache with exactly what a GPU of that architecture asks for later.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

ARCHITECTURES = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
"""Those that can be named, each with the shared memory that a block may take, in bytes (CUDA C++ Programming Guide, table of
technical specifications per compute capability)."""
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@dataclass(frozen=True)
class CompiledKernel:
    """One variant."""

    name: str
    cubin: bytes
    shared: int
    """Bytes of shared memory a block, known before the launch."""
    ptx: Path
    """The file of what the machine code was made from."""
    cached: bool = False
    """Whether it was in the cache already."""

    def usage(self) -> tuple[int, int]:
        """Registers and bytes of stack a thread; stack other than 0 is spilled registers, as a rule."""
        text = self._dump("--dump-resource-usage")
        found = _USAGE.search(text)
        if found is None:
            raise RuntimeError(f"{self.name}: cuobjdump told no usage: {text!r}")
        return int(found[1]), int(found[2])

    def assembly(self) -> str:
        """The machine code, disassembled."""
        return self._dump("--dump-sass")

    def _dump(self, what: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            return subprocess.run([_CUOBJDUMP, what, file.name], check=True, capture_output=True, text=True).stdout


class _Driver:
    """A GPU of an architecture, on which every launch comes to nothing."""

    def __init__(self, arch: str) -> None:
        self.compiled: list[CompiledKernel] = []
        self._cached, self._ptx = False, Path()
        self._target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
        properties = {"max_shared_mem": ARCHITECTURES[arch]}
        self.utils = SimpleNamespace(load_binary=self._load, get_device_properties=lambda _device: properties)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def launcher_cls(self, _source: Any, _metadata: Any) -> Any:
        return lambda *_arguments: None

    def heard(self, *, cache_hit: bool, metadata_group: dict[str, str], **_: Any) -> None:
        """What Triton tells of a compilation, before it loads what has come of it."""
        self._cached = cache_hit
        self._ptx = next(Path(path) for name, path in metadata_group.items() if name.endswith(".ptx"))

    def _load(self, name: str, cubin: bytes, shared: int, _device: int) -> tuple[object, object, int, int, int]:
        self.compiled.append(CompiledKernel(name, cubin, shared, self._ptx, self._cached))
        return object(), object(), 0, 0, 1024


@contextmanager
def compile_only(arch: str) -> Iterator[list[CompiledKernel]]:
    """Every Triton kernel launched within is compiled for `arch`, and listed; arguments are tensors of the device `meta`.

    A process in which kernels have run, or that has TRITON_INTERPRET set, is none for this: a kernel remembers what it was
    compiled for.

    Raises:
        ValueError: An unknown architecture.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {arch!r} (known: {', '.join(ARCHITECTURES)})")
    driver = _Driver(arch)
    triton.runtime.driver.set_active(driver)  # pyright: ignore[reportArgumentType]  # what a launch asks for, no more
    knobs.compilation.listener = driver.heard
    try:
        yield driver.compiled
    finally:
        knobs.compilation.listener = None
        triton.runtime.driver._active = None
