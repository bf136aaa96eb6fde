"""`make wheelhouse`: the wheels that an offline GPU machine lacks, small enough to take along.

    python requirements/wheelhouse.py [--host requirements/gpu-host.txt] [--folder build/wheelhouse]

Which they are follows from the engine's lock, whose comments say who needs what, less what the machine has. They are fetched for
its Python and platform with the lock's hashes, and a wheel of Penstock itself is put beside them for its commands.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from packaging.markers import Marker

HERE = Path(__file__).parent
ROOT = HERE.parent
OURS = "penstock (pyproject.toml)"
TESTS = ("pytest-asyncio", "pytest-timeout")
"""What the GPU tests need beside the engine, from dev.txt."""
PYTHON = "3.12"
PLATFORMS = ["manylinux1_x86_64", "manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34))]
ENVIRONMENT = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.3",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "implementation_name": "cpython",
    "os_name": "posix",
}
LIMIT = 64 << 20
"""Bytes of all wheels together."""
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)(?: ; (?P<marker>.*?))? \\$")


class Pin(NamedTuple):
    """A line of a lock and those below it."""

    version: str
    hashes: tuple[str, ...]
    needed_by: tuple[str, ...]


def read_lock(text: str, environment: Mapping[str, str]) -> dict[str, Pin]:
    """The distributions of a lock that uv has written which apply to an environment, by name."""
    pins: dict[str, Pin] = {}
    for block in re.split(r"\n(?=[A-Za-z])", text):
        lines = block.splitlines()
        if not lines or (pin := _PIN.match(lines[0])) is None:
            continue
        if pin["marker"] and not Marker(pin["marker"]).evaluate(dict(environment)):
            continue
        hashes = tuple(found[1] for line in lines if (found := re.search(r"--hash=(\S+)", line)))
        needed_by = (name for name in re.findall(r"^    # +(?:via ?)?(.*)$", block, re.MULTILINE) if name)
        pins[pin["name"]] = Pin(pin["version"], hashes, tuple(name for name in needed_by if not name.startswith("-c")))
    return pins


def missing(pins: Mapping[str, Pin], host: set[str], wanted: set[str]) -> list[str]:
    """Names that are not on the host and that somebody needs who is not either, sorted.

    Args:
        pins: A lock.
        host: Names that are there; what they need is there as well.
        wanted: Whose needs count: names in `needed_by` that need no other reason.
    """
    needed: set[str] = set()
    while more := {name for name, pin in pins.items() if name not in needed | host and set(pin.needed_by) & (wanted | needed)}:
        needed |= more
    return sorted(needed)


def requirement(name: str, pin: Pin) -> str:
    """The line for pip."""
    return " ".join([f"{name}=={pin.version}", *(f"--hash={digest}" for digest in pin.hashes)])


def too_large(sizes: Mapping[str, int], limit: int = LIMIT) -> str | None:
    """Says so, and names the largest; None: they fit."""
    total = sum(sizes.values())
    if total <= limit:
        return None
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:5]
    names = ", ".join(f"{name} {sizes[name] / 2**20:.1f}" for name in largest)
    return f"{total / 2**20:.1f} MiB are more than the {limit >> 20} that travel; the largest: {names}"


def plan(host: set[str]) -> list[str]:
    """Lines for pip, of everything that a host lacks."""
    engine = read_lock((HERE / "engine.txt").read_text(), ENVIRONMENT)
    tests = read_lock((HERE / "dev.txt").read_text(), ENVIRONMENT)
    lines = [requirement(name, engine[name]) for name in missing(engine, host, {OURS})]
    return lines + [requirement(name, tests[name]) for name in TESTS]


def main() -> int:
    """Fetches them and prints their size; 1 where that is too much."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", type=Path, default=HERE / "gpu-host.txt", help="names that the machine has")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/wheelhouse", help="where the wheels go")
    args = parser.parse_args()
    host = {line.strip() for line in args.host.read_text().splitlines() if line.strip() and not line.startswith("#")}
    args.folder.mkdir(parents=True, exist_ok=True)
    for stale in args.folder.glob("*.whl"):
        stale.unlink()
    uv = Path(sys.executable).with_name("uv")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as lock:
        lock.write("\n".join(plan(host)) + "\n")
        lock.flush()
        platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
        target = ["--python-version", PYTHON, "--implementation", "cp", *platforms]
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        checked = ["--require-hashes", "--only-binary=:all:", "--dest", args.folder, "-r", lock.name]
        subprocess.run([*download, *target, *checked], check=True)
    subprocess.run([uv, "build", "--quiet", "--wheel", "--out-dir", args.folder, ROOT], check=True)
    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(args.folder.glob("*.whl"))}
    for name, size in sizes.items():
        sys.stdout.write(f"{size / 2**20:6.2f} MiB  {name}\n")
    sys.stdout.write(f"{sum(sizes.values()) / 2**20:6.2f} MiB  {len(sizes)} wheels in {args.folder}\n")
    if (problem := too_large(sizes)) is not None:
        sys.stderr.write(f"{problem}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
