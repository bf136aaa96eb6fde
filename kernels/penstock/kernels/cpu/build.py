"""Finds the compiled operations: the package's, else what it compiles on first use into the user's cache."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.kernels.cpu.isa import Isa

_NAMES = (
    "ops.cpp",
    "linear.cpp",
    "head_linear.cpp",
    "quantized_linear.cpp",
    "rounding.cpp",
    "integer_linear.cpp",
    "experts.cpp",
    "lora.cpp",
    "replay.cpp",
    "sampling.cpp",
    "drafts.cpp",
    "collective.cpp",
)
SOURCES = tuple(Path(__file__).with_name(name) for name in _NAMES)
HEADERS = tuple(Path(__file__).with_name(name) for name in ("vector.h", "rounding.h", "tiles.h", "tile_linear.h"))
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC")
PACKAGED = Path(__file__).with_name("lib")
"""Where a wheel keeps what `compile_for` made."""
CACHE = Path("~/.cache/penstock/kernels")
"""Where a user's compiled operations are kept."""


class BuildError(Exception):
    """There is no compiler, it failed, or the cache cannot be written."""


def library(isa: Isa, cache: Path) -> Path:
    """Returns the compiled operations for an instruction set: the package's if it was built from these sources, else the
    cache's, compiled first if need be.

    Raises:
        BuildError: With the reason, for the log.
    """
    packaged = PACKAGED / library_name(isa)
    if packaged.is_file():
        return packaged
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({', '.join(COMPILERS)})")
    try:
        return cached(isa, cache, compiler)
    except subprocess.CalledProcessError as error:
        raise _failed(compiler, error) from error
    except OSError as error:
        raise BuildError(str(error)) from error


def cached(isa: Isa, cache: Path, compiler: str) -> Path:
    """Returns the cache's operations for an instruction set. Compiles them first if need be: one process, and others wait.

    Another compiler, or another system that shares the cache, has a folder of its own.

    Raises:
        BuildError: With what the compiler said.
        OSError: The cache cannot be written.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    built = cache / hashlib.sha256(version).hexdigest()[:12] / library_name(isa)
    if not built.is_file():
        built.parent.mkdir(parents=True, exist_ok=True)
        with _locked(built.parent):
            if not built.is_file():
                compile_for(isa, built.parent, compiler)
    return built


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a folder's lock, where its file system has locks: without, each process compiles for itself."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def library_name(isa: Isa) -> str:
    """The file's name, which changes with the sources and the compiler's flags."""
    parts = (*(source.read_bytes() for source in (*SOURCES, *HEADERS)), " ".join((*FLAGS, *isa.flags)).encode())
    return f"ops-{isa.name}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:20]}.so"


def compile_for(isa: Isa, folder: Path, compiler: str) -> Path:
    """Compiles the operations for an instruction set, which this machine need not have, and returns the file.

    The file takes its name in one step, so that processes that start together never load half of one.

    Args:
        isa: The instruction set.
        folder: Where the file goes; made if need be.
        compiler: Its program, a cross compiler for another architecture.

    Raises:
        BuildError: With what the compiler said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / library_name(isa)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / target.name
        try:
            subprocess.run([compiler, *FLAGS, *isa.flags, "-o", built, *SOURCES], capture_output=True, check=True)
        except subprocess.CalledProcessError as error:
            raise _failed(compiler, error) from error
        built.replace(target)
    return target


def _failed(compiler: str, error: subprocess.CalledProcessError) -> BuildError:
    return BuildError(f"{compiler}: {error.stderr.decode(errors='replace').strip()[-500:]}")
