"""The workflow that publishes a release: pinned, and of everything that there is to publish."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())["jobs"]


def test_every_action_has_a_version(jobs: dict[str, Any]) -> None:
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", it) for it in used)


def test_nothing_is_published_before_the_tests_pass(jobs: dict[str, Any]) -> None:
    for name in ("packages", "images"):
        assert "test" in jobs[name]["needs"]


def test_it_publishes_every_distribution(jobs: dict[str, Any]) -> None:
    runs = {step["run"] for job in jobs["packages"]["needs"] for step in jobs[job]["steps"] if "run" in step}
    built = {run for run in runs if run.startswith("uv build") or "wheels" in run}
    assert built == {"uv build --sdist", "uv build --out-dir dist ./conformance", "make native-wheels"}


def test_it_publishes_the_wheels_of_the_compiled_parts(jobs: dict[str, Any]) -> None:
    (upload,) = (step["with"] for step in jobs["native"]["steps"] if "upload-artifact" in step.get("uses", ""))
    assert upload["path"] == "dist/penstock_gateway_native-*.whl"
    assert upload["if-no-files-found"] == "error"


def test_the_gateway_is_tested_without_its_compiled_parts_and_with_them(jobs: dict[str, Any]) -> None:
    before, after = (step["run"].split() for step in jobs["test"]["steps"] if "run" in step)
    assert "test" in before and "native" not in before
    assert after.index("native") < after.index("test") and after[-1] == "ARGS=gateway"


def test_it_builds_every_image(jobs: dict[str, Any]) -> None:
    dockerfiles = {it.name.removesuffix(".Dockerfile") for it in (ROOT / "images").glob("*.Dockerfile")}
    assert set(jobs["images"]["strategy"]["matrix"]["image"]) == dockerfiles


@pytest.mark.parametrize(("tag", "status"), [("v{version}", 0), ("v9.9.9", 1)])
def test_the_tag_must_name_the_project_s_version(jobs: dict[str, Any], tag: str, status: int, tmp_path: Path) -> None:
    (check,) = (step["run"] for step in jobs["version"]["steps"] if "run" in step)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    environment = {
        "PATH": "/usr/bin:/bin",
        "GITHUB_REF_NAME": tag.format(version=version),
        "GITHUB_OUTPUT": str(tmp_path / "out"),
    }
    assert subprocess.run(["bash", "-e", "-c", check], cwd=ROOT, env=environment, check=False).returncode == status
    assert (tmp_path / "out").exists() is (status == 0)


@pytest.mark.parametrize("file", ["pyproject.toml", "conformance/pyproject.toml", "gateway/native/Cargo.toml"])
def test_every_package_must_have_that_version(jobs: dict[str, Any], file: str, tmp_path: Path) -> None:
    (check,) = (step["run"] for step in jobs["version"]["steps"] if "run" in step)
    packages = ["pyproject.toml", "conformance/pyproject.toml", "gateway/native/Cargo.toml", "charts/penstock/Chart.yaml"]
    for package in packages:
        (tmp_path / package).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / package, tmp_path / package)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    environment = {"PATH": "/usr/bin:/bin", "GITHUB_REF_NAME": f"v{version}", "GITHUB_OUTPUT": str(tmp_path / "out")}

    def status() -> int:
        return subprocess.run(["bash", "-e", "-c", check], cwd=tmp_path, env=environment, check=False).returncode

    assert status() == 0
    (tmp_path / file).write_text((tmp_path / file).read_text().replace(f'version = "{version}"', 'version = "9.9.9"'))
    assert status() == 1
