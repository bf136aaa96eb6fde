"""The Dockerfiles: pinned, without root, and made by an installation that is done here for real."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from testing.sources import package_index

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
        assert found and (int(found[1]), int(found[2])) == sys.version_info[:2], "the Python that the tests run with"
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
    assert [it for it in final if it[0] in ("COPY", "ADD")] == [("COPY", what) for what in copied]
    assert not [run for run in arguments(final, "RUN") if re.search(r"\b(pip|uv|curl|wget|git)\b", run)]
    install, *more = arguments(build, "RUN")[1:]
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
            # Links stay links, as Docker's COPY leaves them.
            shutil.copytree(source, target, symlinks=True, ignore=lambda folder, names: set(ignored(folder, names)))
        else:
            shutil.copy(source, target)
    return tmp_path / "src"


@pytest.mark.parametrize(
    ("image", "commands"),
    [("operator", ["operator", "crds", "dashboards"]), ("gateway", ["gateway", "envoy", "epp-conformance"])],
)
def test_the_installation_that_an_image_holds(image: str, commands: list[str], context: Path, tmp_path: Path) -> None:
    folder = tmp_path / "penstock"
    paths = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    environment = {**package_index(), "PATH": paths, "HOME": str(Path.home())}
    subprocess.run([context / "images/install", image, folder], cwd=context, env=environment, check=True)
    here = {"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": str(tmp_path)}

    def said(*words: str) -> str:
        return subprocess.run(words, cwd=tmp_path, env=here, capture_output=True, text=True, check=True).stdout

    assert not [name for name in ("pip", "uv", "torch", "hatchling") if list(folder.glob(f"lib/python*/site-packages/{name}"))]
    listed = said("penstock", "--help")
    for command in commands:
        assert f"\n  {command} " in listed
        assert "usage:" in said("penstock", command, "--help")
    assert "\n  serve " not in listed
    if image == "operator":
        assert "penstock-fleet" in said("penstock", "dashboards")
