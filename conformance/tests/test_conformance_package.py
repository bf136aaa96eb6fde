"""The distribution's own project file, beside that of all the rest."""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def test_it_goes_into_one_environment_with_the_rest() -> None:
    ours, rest = project(ROOT / "conformance"), project(ROOT)
    assert {*ours["dependencies"]} < {*rest["dependencies"], *rest["optional-dependencies"]["gateway"]}
    assert rest["optional-dependencies"]["conformance"] == [f"{ours['name']}=={ours['version']}"]
    assert ours["version"] == rest["version"]
