"""Compiles the C++ files beside it for this machine on first use, into the user's cache."""

import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = tuple(Path(__file__).with_name(name) for name in ("ops.cpp", "linear.cpp", "lora.cpp", "replay.cpp"))
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC")


class BuildError(Exception):
    """There is no compiler, it failed, or the cache cannot be written."""


def library(cache: Path) -> Path:
    """Returns the compiled library, building it unless the cache has it.

    The name holds source, flags, compiler and CPU, so that a cache shared by unlike machines is right on each; a finished file
    takes its name in one step, so that processes that start together never load half of one.

    Raises:
        BuildError: With the reason, for the log.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({', '.join(COMPILERS)})")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
        parts = (*(source.read_bytes() for source in SOURCES), " ".join(FLAGS).encode(), version, _cpu())
        target = cache / f"ops-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:20]}.so"
        if not target.is_file():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                built = Path(folder) / target.name
                subprocess.run([compiler, *FLAGS, "-o", built, *SOURCES], capture_output=True, check=True)
                built.replace(target)
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{compiler}: {error.stderr.decode(errors='replace').strip()[-500:]}") from error
    except OSError as error:
        raise BuildError(str(error)) from error
    return target


def _cpu() -> bytes:
    """What `-march=native` depends on."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    features = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), *sorted(set(features))]).encode()
