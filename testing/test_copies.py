"""The copies of manifests in the chart and in the wheel are the manifests, and nothing in the repository is a symbolic link."""

import shutil
import subprocess
from pathlib import Path

import pytest

from manifests import copies
from manifests.copies import FOLDERS, ROOT


@pytest.mark.parametrize("folder", FOLDERS)
def test_copies_are_equal_to_what_they_copy(folder: str) -> None:
    wanted = {path.name: content for path, content in copies.copies().items() if path.parent == ROOT / folder}
    assert wanted
    assert {it.name: it.read_bytes() for it in (ROOT / folder).iterdir()} == wanted, "run make crds"


def test_writing_them_replaces_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "manifests", tmp_path / "manifests")
    monkeypatch.setattr(copies, "ROOT", tmp_path)
    copies.write()
    first, *_ = files = sorted((tmp_path / "charts/penstock/files/crds").iterdir())
    first.write_text("changed")
    (tmp_path / "charts/penstock/files/crds/gone.yaml").write_text("")
    copies.write()
    assert sorted((tmp_path / "charts/penstock/files/crds").iterdir()) == files
    assert first.read_bytes() == (ROOT / "manifests/crds" / first.name).read_bytes()


def test_lint_refuses_a_symbolic_link(tmp_path: Path) -> None:
    recipe = (ROOT / "Makefile").read_text()
    (check,) = (line.strip().removeprefix("@") for line in recipe.splitlines() if "^120000" in line)

    def linted() -> subprocess.CompletedProcess[str]:
        subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
        command = ["bash", "-euo", "pipefail", "-c", check.replace("$$", "$")]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / "file").write_text("")
    assert linted().returncode == 0
    (tmp_path / "link").symlink_to("file")
    found = linted()
    assert found.returncode == 1 and "\tlink" in found.stdout and "symbolic links" in found.stderr
