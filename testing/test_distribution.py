"""The sdists and wheels of a clean clone, installed into empty environments without a compiler, do what the README says."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from conformance.tests.small_picker import MODEL, serving
from penstock.kernels.cpu.isa import ISAS, choose
from testing.ports import free_ports
from testing.sources import ROOT, clone, package_index

pytestmark = pytest.mark.slow

UV = Path(sys.executable).with_name("uv")
TINY = ROOT / "examples/models/penstock-tiny"
START_S = 120.0


def uv(*arguments: str | Path, cwd: Path = ROOT, path: str = "/usr/bin:/bin") -> str:
    """Runs uv, which builds with what is on `path`."""
    environment = {**package_index(), "PATH": path, "HOME": str(Path.home())}
    ran = subprocess.run([UV, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


class Built(NamedTuple):
    """What a release publishes."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist of a clone, and the wheel that a build without the protobuf generator makes of that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--quiet", "--sdist", "--out-dir", folder, clone(tmp_path_factory.mktemp("clone")))
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [it.name for it in archive if it.issym() or it.islnk()]
        archive.extractall(folder, filter="data")
    builder = folder / "builder"
    uv("venv", "--quiet", "--python", sys.executable, builder)
    uv("pip", "install", "--quiet", "--python", builder, "--require-hashes", "--requirements", "requirements/build.txt")
    sources = folder / sdist.name.removesuffix(".tar.gz")
    uv("build", "--quiet", "--wheel", "--no-build-isolation", "--python", builder, "--out-dir", folder, sources)
    (wheel,) = folder.glob("*.whl")
    return Built(sdist, wheel)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the conformance suite, made from its sdist."""
    folder = tmp_path_factory.mktemp("suite")
    uv("build", "--quiet", "--out-dir", folder, clone(tmp_path_factory.mktemp("clone")) / "conformance")
    (wheel,) = folder.glob("*.whl")
    return wheel


class Running(NamedTuple):
    """A command in the background, and the file of what it prints."""

    process: subprocess.Popen[bytes]
    log: Path


class Installed(NamedTuple):
    """An environment with nothing but what it was made of. Its programs find no compiler, and an empty home."""

    folder: Path
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.folder}/bin", "HOME": str(self.home), "PYTHONUNBUFFERED": "1"}

    def run(self, *arguments: str, program: str = "penstock") -> str:
        """What a command prints."""
        command = [self.folder / "bin" / program, *arguments]
        ran = subprocess.run(command, cwd=self.home, env=self.environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    @contextmanager
    def running(self, *arguments: str) -> Iterator[Running]:
        """Runs a command meanwhile, which Ctrl-C must end without an error."""
        log = self.home / "log"
        with log.open("wb") as out:
            command = [self.folder / "bin/penstock", *arguments]
            process = subprocess.Popen(command, cwd=self.home, env=self.environment, stdout=out, stderr=out)
            try:
                yield Running(process, log)
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 0, log.read_text()
            finally:
                process.kill()
                process.wait()


Install = Callable[..., Installed]


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Install]:
    """Makes such environments, of requirements."""
    made: list[Path] = []

    def installed(*wanted: str) -> Installed:
        folder = tmp_path_factory.mktemp("environment")
        made.append(folder)
        uv("venv", "--quiet", "--python", sys.executable, folder / "venv")
        locked = ("--constraints", ROOT / "requirements/dev.txt", "--build-constraints", ROOT / "requirements/build.txt")
        uv("pip", "install", "--quiet", "--python", folder / "venv", *locked, *wanted, path=str(folder))
        (folder / "home").mkdir()
        return Installed(folder / "venv", folder / "home")

    yield installed
    for folder in made:  # torch's gigabyte: pytest would keep it
        shutil.rmtree(folder)


def penstock(distribution: Path, extras: str) -> str:
    """A wheel or an sdist, and the extras' names, as a requirement."""
    return f"penstock[{extras}] @ file://{distribution}"


def asked(url: str, question: object = None, server: Running | None = None) -> str:
    """The answer to a question, asked until there is one or the server ends."""
    body = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.read().decode()
        except (urllib.error.URLError, OSError) as error:
            said = error.read().decode() if isinstance(error, urllib.error.HTTPError) else str(error)
            ended = server is not None and server.process.poll() is not None
            assert not ended and time.monotonic() < deadline, f"{said}\n{server.log.read_text() if server else ''}"
            time.sleep(0.2)


def test_the_wheel_holds_what_is_generated(built: Built) -> None:
    names = zipfile.ZipFile(built.wheel).namelist()
    assert "penstock/gateway/_pb/envoy/service/ext_proc/v3/external_processor_pb2.py" in names
    assert not [it for it in names if "/tests/" in it or it.endswith(".stamp")]
    typed = {it.removesuffix("py.typed") for it in names if it.endswith("/py.typed")}
    packages = {re.match(r"penstock/\w+/", it) for it in names}
    assert typed == {it[0] for it in packages if it}
    here = os.uname().machine
    assert built.wheel.name.endswith(f"-py3-none-linux_{here}.whl")
    compiled = {it.split("ops-")[1].split("-")[0] for it in names if it.endswith(".so")}
    assert compiled == {isa.name for isa in ISAS if isa.machine in (None, here)}


def test_engine_gateway_and_bench_from_the_wheel_work_together(built: Built, install: Install, tmp_path: Path) -> None:
    port, events, replay, grpc, http = free_ports(5)
    url = f"http://127.0.0.1:{port}"
    engine = install(penstock(built.wheel, "engine"))
    small = ("--device", "cpu", "--kv-cache-memory-bytes", "16777216", "--served-model-name", "tiny")
    ports = ("--port", str(port), "--events-port", str(events), "--replay-port", str(replay))
    with engine.running("serve", str(TINY), *ports, *small) as server:
        asked(f"{url}/ready", server=server)
        kernels = re.search(r"penstock_engine_info\{[^}]*kernels=\"([^\"]+)\"", asked(f"{url}/metrics"))
        assert kernels and choose(None).name in kernels[1], "the wheel's own, as nothing could be compiled"
        assert not (engine.home / ".cache/penstock/kernels").exists()
        bench = install(penstock(built.wheel, "client"))
        load = ("--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "4")
        said = bench.run("bench", "serve", "--base-url", url, "--model", "tiny", "--dataset-name", "random", *load)
        assert re.search(r"requests +4 completed", said), said
        gateway = install(penstock(built.wheel, "gateway"))
        fleet = tmp_path / "fleet.json"
        fleet.write_text("{}")
        with gateway.running(
            "gateway", "--discovery", f"file:{fleet}", "--grpc-port", str(grpc), "--http-port", str(http)
        ) as server:
            assert "pools" in asked(f"http://127.0.0.1:{http}/pools", server=server)


def test_the_operator_from_the_wheel_has_its_commands_and_files(built: Built, install: Install) -> None:
    operator = install(penstock(built.wheel, "operator"))
    assert "usage: penstock operator" in operator.run("operator", "--help")
    assert "penstock-fleet" in operator.run("dashboards")
    assert "kind: CustomResourceDefinition" in operator.run("crds")


def test_the_sdist_makes_a_system_on_one_machine(built: Built, install: Install) -> None:
    everything = install(penstock(built.sdist, "engine,gateway,operator,client"))
    (port,) = free_ports(1)
    manifest = everything.home / "tiny.yaml"
    text = (ROOT / "examples/tiny.yaml").read_text().replace("./examples/models/penstock-tiny", str(TINY))
    manifest.write_text(text.replace("min: 2", "min: 1"))
    question = {"model": "tiny", "prompt": "json.loads", "max_tokens": 3, "temperature": 0}
    with everything.running("up", "-f", str(manifest), "--port", str(port)) as server:
        answer = json.loads(asked(f"http://127.0.0.1:{port}/v1/completions", question, server))
    assert answer["usage"]["completion_tokens"] > 0


JUDGED = ("pick", "envoy-picked", "envoy-forged-destination")


@pytest.mark.parametrize(("fault", "status", "failed"), [("", 0, set()), ("believes_clients", 1, {"forged", "envoy-forged"})])
async def test_the_conformance_suite_alone_judges_a_picker(
    alone: Installed, fault: str, status: int, failed: set[str], tmp_path: Path
) -> None:
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(2)]
    told = [flag for endpoint in endpoints for flag in ("--endpoint", endpoint)]
    only = [flag for name in JUDGED for flag in ("--only", name)]
    result = tmp_path / "result.json"
    async with serving(endpoints, fault) as port:
        process = await asyncio.create_subprocess_exec(
            *(alone.folder / "bin/penstock-epp-conformance", "--target", f"127.0.0.1:{port}", "--model", MODEL, *told, *only),
            *("--serve-endpoints", "--json", result),
            cwd=alone.home,
            env=alone.environment,
        )
        assert await process.wait() == status
    outcomes = {check["name"]: check["outcome"] for check in json.loads(result.read_text())["checks"]}
    assert {name for name, outcome in outcomes.items() if outcome != "pass"} == {f"{name}-destination" for name in failed}
    assert set(JUDGED[1:]) < outcomes.keys()


@pytest.fixture(scope="module")
def alone(suite: Path, install: Install) -> Installed:
    """The suite with nothing but what it needs."""
    return install(f"penstock-epp-conformance @ file://{suite}")


def test_the_conformance_suite_brings_nothing_of_the_others(alone: Installed) -> None:
    others = ("torch", *(f"penstock.{name}" for name in ("api", "cli", "engine", "gateway", "operator", "prompt")))
    look = f"import importlib.util as it; print([name for name in {others} if it.find_spec(name)])"
    assert alone.run("-c", f"import penstock.epp_conformance.cli; {look}", program="python") == "[]\n"


def test_beside_penstock_the_conformance_suite_is_one_of_its_commands(built: Built, suite: Path, install: Install) -> None:
    assert not {*zipfile.ZipFile(built.wheel).namelist()} & {*zipfile.ZipFile(suite).namelist()}
    both = install(penstock(built.wheel, "conformance"), f"penstock-epp-conformance @ file://{suite}")
    assert both.run("epp-conformance", "--list") == both.run("--list", program="penstock-epp-conformance") != ""
