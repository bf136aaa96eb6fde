"""The workflow that publishes a release: pinned, and of everything that there is to publish."""

import re
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
    built = {step["run"] for job in jobs["packages"]["needs"] for step in jobs[job]["steps"] if "uv build" in step.get("run", "")}
    assert built == {"uv build --sdist", "uv build --out-dir dist ./conformance"}


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
