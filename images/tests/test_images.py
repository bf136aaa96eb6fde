"""The Dockerfiles: pinned, without root, and made by an installation that is done here for real."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from penstock.kernels.cpu.isa import ISAS
from testing.sources import package_index

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
IMAGES = ("operator", "gateway", "engine")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def stages(image: str) -> list[list[tuple[str, str]]]:
    """The instructions of each stage of a Dockerfile: word and arguments."""
    text = (ROOT / "images" / f"{image}.Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    found: list[list[tuple[str, str]]] = []
    for word, arguments in lines:
        if word == "FROM":
            found.append([])
        found[-1].append((word, arguments))
    return found


def arguments(stage: list[tuple[str, str]], word: str) -> list[str]:
    """Of all such instructions."""
    return [rest for it, rest in stage if it == word]


@pytest.mark.parametrize("image", IMAGES)
def test_bases_and_tools_are_pinned(image: str) -> None:
    build, final = stages(image)
    base = r"python:(\d+)\.(\d+)-slim-bookworm@sha256:[0-9a-f]{64}( AS build)?"
    for stage in (build, final):
        found = re.fullmatch(base, arguments(stage, "FROM")[0])
        assert found and f"Programming Language :: Python :: {found[1]}.{found[2]}" in PROJECT["classifiers"], (
            "one that is tested"
        )
    for other in (rest for rest in arguments(build, "COPY") if "--from=" in rest):
        assert re.search(r"--from=[\w.]+:[\w.-]+@sha256:[0-9a-f]{64} ", other)
    wanted = re.search(r"^UV_VERSION := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert wanted
    assert arguments(build, "RUN")[0] == f"pip install --no-cache-dir uv=={wanted[1]}"
    for command in arguments(final, "RUN"):
        packages = re.search(r"apt-get install((?: \S+)+)", command)
        assert packages and all("=" in it for it in packages[1].split("&&")[0].split() if not it.startswith("-"))


@pytest.mark.parametrize("image", IMAGES)
def test_what_runs_is_not_root_and_fetches_nothing(image: str) -> None:
    build, final = stages(image)
    assert arguments(final, "USER") == ["65532:65532"]
    copied = ["--from=build /opt/penstock /opt/penstock"]
    if image == "engine":  # where Triton looks for kernels, and keeps those that it lacks
        copied.append("--from=build --chown=65532:65532 /opt/triton /home/penstock/.triton/cache")
        copied.append("--from=build --chown=65532:65532 /src/examples /home/penstock/examples")
    assert [it for it in final if it[0] in ("COPY", "ADD")] == [("COPY", what) for what in copied]
    assert not [run for run in arguments(final, "RUN") if re.search(r"\b(pip|uv|curl|wget|git)\b", run)]
    install, *more = [it for it in arguments(build, "RUN")[1:] if not it.startswith("apt-get")]
    assert install == f"images/install {image} /opt/penstock"
    if image == "engine":
        [warm] = more
        shapes = re.fullmatch(r'WARM="([^"]+)"', arguments(build, "ARG")[0])
        assert shapes and "penstock warm benchmarks/shapes/$shape --arch $ARCH" in warm
        assert all((ROOT / "benchmarks/shapes" / shape / "config.json").is_file() for shape in shapes[1].split())
    else:
        assert not more
    assert image in PROJECT["optional-dependencies"]
    (command,) = (yaml.safe_load(it) for it in arguments(final, "CMD"))
    assert yaml.safe_load(arguments(final, "ENTRYPOINT")[0]) == ["penstock"]
    needs = PROJECT["entry-points"]["penstock.commands"][command[0]]
    assert needs.endswith(f"[{image}]"), "the image's command needs nothing but its extra"


def test_the_manifests_run_these_images_with_their_own_commands() -> None:
    run: dict[str, set[str]] = {}
    for path in (ROOT / "manifests").rglob("*.yaml"):
        for it in yaml.safe_load_all(path.read_text()):
            for container in (it or {}).get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
                program, command = container["command"]
                assert program == "penstock"
                run.setdefault(container["image"], set()).add(command)
    version = PROJECT["version"]
    assert run == {f"penstock/operator:{version}": {"operator"}, f"penstock/gateway:{version}": {"gateway", "envoy"}}


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """What .dockerignore lets through."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    left_out = [line for line in lines[1:] if not line.startswith("!")]

    def ignored(folder: str, names: list[str]) -> Iterator[str]:
        for name in names:
            path = Path(folder, name).relative_to(ROOT)
            if any(path.match(pattern.removeprefix("**/")) for pattern in left_out):
                yield name

    for line in lines:
        if not line.startswith("!"):
            continue
        source, target = ROOT / line[1:], tmp_path / "src" / line[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=lambda folder, names: set(ignored(folder, names)))
        else:
            shutil.copy(source, target)
    return tmp_path / "src"


class Image:
    """The files that a Dockerfile makes of a build context, below a folder in place of `/`.

    It runs a stage's COPY and RUN, and leaves to the base image what installs tools: those of this machine are there, a compiler
    only where the stage installs one. Both stages have the same folder, one after the other, as an environment knows its place.
    """

    def __init__(self, image: str, context: Path, root: Path, arguments: dict[str, str]) -> None:
        self.root, self._context, self._tools, self._arguments = root, context, root.with_name("tools"), arguments
        self._earlier = root.with_name("build")
        self.environment: dict[str, str] = {}
        self.folder = root
        build, final = stages(image)
        self._make(build)
        self.root.rename(self._earlier)
        self._make(final)

    def run(self, command: str) -> str:
        """What a shell command prints, in the last WORKDIR."""
        ran = subprocess.run(
            ["/bin/sh", "-c", self._placed(command)], cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    def _make(self, stage: list[tuple[str, str]]) -> None:
        self.root.mkdir()
        self.folder = self.root
        self._link_tools(
            compiler=any("g++" in it for it in arguments(stage, "RUN")),
            rust=any("--from=rust:" in it for it in arguments(stage, "COPY")),
        )
        self.environment = {**package_index(), "PATH": str(self._tools), "HOME": str(Path.home())}
        for word, rest in stage:
            match word:
                case "WORKDIR":
                    self.folder = self.root / rest.lstrip("/")
                    self.folder.mkdir(parents=True, exist_ok=True)
                case "ENV":
                    found = (pair.partition("=") for pair in rest.split())
                    # Not uv's, which are for small images, and keep it from using its cache; nor where the base image has Rust.
                    given = {name: value for name, _, value in found if not re.match("UV_|RUSTUP_HOME$|CARGO_HOME$", name)}
                    path = self.environment["PATH"]
                    self.environment |= {name: self._placed(value).replace("$PATH", path) for name, value in given.items()}
                case "ARG":
                    name, _, value = rest.partition("=")
                    self.environment[name] = self._arguments.get(name, value.strip('"'))
                case "COPY" if "--from=rust:" in rest:
                    pass
                case "COPY":
                    self._copy([it for it in rest.split() if not it.startswith("--")], "--from=build" in rest)
                case "RUN":
                    steps = [it for it in rest.split(" && ") if not re.match(r"\s*(apt-get|pip|rm -rf /var/lib/apt)\b", it)]
                    # Only root may give files away.
                    self.run(" && ".join(re.sub(r"--(owner|group)=\d+", "", it) for it in steps) or "true")
                case _:
                    assert word in ("FROM", "LABEL", "USER", "ENTRYPOINT", "CMD"), word

    def _copy(self, paths: list[str], from_build: bool) -> None:
        source, target = paths
        start = self._earlier / source.lstrip("/") if from_build else self._context / source
        # Of the stage before only links: torch alone is gigabytes, and nothing is written to what is there.
        copy = os.link if from_build else shutil.copy2
        shutil.copytree(start, self.root / target.lstrip("/"), symlinks=True, copy_function=copy, dirs_exist_ok=True)

    def _placed(self, text: str) -> str:
        return re.sub(r"(?<![\w.$/}])/(?=(src|opt|home|tmp)\b)", f"{self.root}/", text)

    def _link_tools(self, compiler: bool, rust: bool) -> None:
        shutil.rmtree(self._tools, ignore_errors=True)
        self._tools.mkdir()
        for tool in Path("/usr/bin").iterdir():
            if compiler or not re.search(r"(^|-)(cc|gcc|g\+\+|c\+\+|clang(\+\+)?)(-\d+)?$", tool.name):
                (self._tools / tool.name).symlink_to(tool)
        if rust:
            for tool in ("cargo", "rustc"):
                program = shutil.which(tool)
                assert program
                (self._tools / tool).unlink(missing_ok=True)
                (self._tools / tool).symlink_to(program)
        for name, program in {"uv": Path(sys.executable).with_name("uv"), "python3": Path(sys.executable).resolve()}.items():
            (self._tools / name).unlink(missing_ok=True)
            (self._tools / name).symlink_to(program)


Make = Callable[..., Image]


@pytest.fixture
def make(context: Path, tmp_path: Path) -> Iterator[Make]:
    """Makes an image, and removes it: the engine's has torch."""
    yield lambda image, **arguments: Image(image, context, tmp_path / "image", arguments)
    for folder in ("image", "build"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)


@pytest.mark.parametrize(
    ("image", "commands"),
    [("operator", ["operator", "crds", "dashboards"]), ("gateway", ["gateway", "envoy"])],
)
def test_what_a_dockerfile_makes_runs_its_commands(image: str, commands: list[str], make: Make) -> None:
    if image == "gateway" and shutil.which("cargo") is None:
        pytest.skip("the image's compiled parts are built by cargo, which is not installed")
    made = make(image)
    unwanted = ("pip", "uv", "torch", "hatchling", "grpc_tools", "xds", "maturin")
    assert not [name for name in unwanted if list(made.root.glob(f"opt/penstock/lib/python*/site-packages/{name}"))]
    listed = made.run("penstock --help")
    for command in commands:
        assert f"\n  {command} " in listed
        assert "usage:" in made.run(f"penstock {command} --help")
    assert "\n  serve " not in listed
    if image == "operator":
        assert "penstock-fleet" in made.run("penstock dashboards")
    else:
        asked = "from penstock.gateway.picker.compiled import installed, name_of; print(name_of(installed()))"
        assert made.run(f'/opt/penstock/bin/python -c "{asked}"').startswith("penstock-gateway-native ")


def test_the_engine_s_image_has_its_kernels_and_a_model_to_try(make: Make, context: Path) -> None:
    (warmed,) = (
        it.partition("=")[2].strip('"').split() for it in arguments(stages("engine")[0], "ARG") if it.startswith("WARM=")
    )
    assert warmed and all((context / "benchmarks/shapes" / shape / "config.json").is_file() for shape in warmed)
    made = make("engine", WARM="")  # a minute each
    isas = {isa.name for isa in ISAS if isa.machine in (None, os.uname().machine)}
    assert {it.name.split("-")[1] for it in made.root.glob("opt/penstock/**/kernels/cpu/lib/*.so")} == isas
    assert (made.root / "home/penstock/.triton/cache").is_dir()
    (made.folder / "ask.py").write_text(
        "from penstock.engine import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    with LLM('examples/models/penstock-tiny', device='cpu', kv_cache_memory_bytes=2**24) as llm:\n"
        "        print('said', llm.generate(['json'], SamplingParams(max_tokens=3, temperature=0))[0].outputs[0].text)\n"
    )
    assert "said" in made.run("/opt/penstock/bin/python ask.py")
