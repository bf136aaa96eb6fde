"""What `penstock up` leaves for other commands to find, and a model without a file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import local_system
from penstock.client import cli as client
from penstock.operator.local.models import ModelFileError, one_model

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "penstock"


def test_the_newest_running_system_is_found_until_it_ends() -> None:
    assert local_system.running() is None
    assert client._found(None) == ("http://127.0.0.1:8000", None)
    path = local_system.announce(
        "http://127.0.0.1:8080",
        "http://127.3.0.1:9090",
        "http://127.3.0.1:9091",
        {"tiny": "file:///models/tiny", "b": "hf://o/b"},
    )
    found = local_system.running()
    assert found is not None
    assert (found.pid, found.url, found.gateway) == (os.getpid(), "http://127.0.0.1:8080", "http://127.3.0.1:9090")
    assert client._found(None) == ("http://127.0.0.1:8080", "/models/tiny")
    assert client._found("b") == ("http://127.0.0.1:8080", "o/b")
    assert client._found("an alias") == ("http://127.0.0.1:8080", None)
    path.unlink()
    assert local_system.running() is None


def test_the_file_of_a_process_that_was_killed_is_removed(folder: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    mine = local_system.announce("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3", {})
    content = mine.read_text()
    (folder / "gone.json").write_text(content.replace(f'"pid":{os.getpid()}', f'"pid":{ended.pid}'))
    born = local_system._born(os.getpid())
    (folder / "reused.json").write_text(content.replace(f'"born":"{born}"', '"born":"1"'))
    found = local_system.running()
    assert found is not None and found.url == "http://127.0.0.1:1"
    assert [path.name for path in folder.iterdir()] == [mine.name]


def test_a_file_that_is_none_of_ours_says_so(folder: Path) -> None:
    folder.mkdir()
    (folder / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="not a state file of penstock up"):
        local_system.running()


def test_a_model_needs_no_file() -> None:
    tiny = one_model(str(ROOT / "examples/models/penstock-tiny"))
    assert (tiny.model.id, tiny.model.name) == ("default/penstock-tiny", "penstock-tiny")
    assert tiny.source == f"file://{ROOT / 'examples/models/penstock-tiny'}"
    hub = one_model("Qwen/Qwen3-0.6B")
    assert (hub.model.id, hub.model.name, hub.source) == ("default/qwen3-0-6b", "Qwen/Qwen3-0.6B", "hf://Qwen/Qwen3-0.6B")
    with pytest.raises(ModelFileError, match="nowhere is neither a folder nor a name on the Hugging Face Hub"):
        one_model("nowhere")
