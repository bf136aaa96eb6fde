"""`penstock fetch`."""

import json
import os
import signal
import threading
import urllib.request
from collections import Counter
from contextlib import contextmanager

import pytest

from penstock.sources.cli import fetch
from testing.ports import free_ports
from testing.source_servers import COMMIT


def test_prints_the_folder_and_writes_what_came_of_it(hub, tmp_path, capsys):
    result = tmp_path / "result"
    assert fetch(["hf://org/name", "--to", str(tmp_path / "v"), "--result", str(result)]) == 0
    folder = f"hf--org--name--{COMMIT}"
    assert capsys.readouterr().out == f"{tmp_path}/v/{folder}\n"
    assert json.loads(result.read_text()) == {"folder": folder, "version": COMMIT, "size": 10266}
    assert (tmp_path / "v" / folder / "config.json").is_file()


def test_without_a_folder_it_says_the_commit(hub, capsys):
    assert fetch(["hf://org/name", "--revision=main"]) == 0
    assert capsys.readouterr().out == f"{COMMIT}\n"
    assert hub.ranges == []


def test_the_exit_status_says_whether_another_try_may_help(hub, tmp_path, capsys):
    result = tmp_path / "result"
    for status, code, reason in ((404, 3, "NotFound"), (502, 1, "Unreachable")):
        hub.status = {"": status}
        assert fetch(["hf://org/name", "--to", str(tmp_path), "--result", str(result)]) == code
        assert json.loads(result.read_text())["reason"] == reason
        assert f"penstock fetch: {reason}: hf://org/name" in capsys.readouterr().err


@contextmanager
def halfway(hub, monkeypatch, act):
    """Parts come one by one; when three are there, `act` is called, and the others come after it."""
    answer, acted = hub.answer, threading.Event()

    def slow(handler):
        if "Range" in handler.headers and len(hub.ranges) >= 3 and not acted.is_set():
            act()
            acted.set()
        answer(handler)

    monkeypatch.setattr(hub, "answer", slow)
    monkeypatch.setattr("penstock.sources.parts.AT_ONCE", 1)
    yield
    assert acted.is_set()


def test_it_tells_how_far_it_is(hub, tmp_path, monkeypatch):
    (port,) = free_ports(1)
    said = {}

    def ask():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress") as answered:
            said.update(json.load(answered))

    with halfway(hub, monkeypatch, ask):
        assert fetch(["hf://org/name", "--to", str(tmp_path), f"--port={port}"]) == 0
    assert said["phase"] == "downloading"
    assert 0 < said["done"] < said["total"] == 10266


def test_sigterm_lets_the_next_one_in_with_all_that_came(hub, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    with (
        halfway(hub, monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM)),
        pytest.raises(SystemExit) as end,
    ):
        fetch(["hf://org/name", "--to", str(tmp_path)])
    assert end.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert [it.name for it in (tmp_path / ".penstock").iterdir()] == [f"hf--org--name--{COMMIT}"], "no lock"
    came = len(hub.ranges)
    assert 3 <= came < 12, "what had not begun did not come"
    assert fetch(["hf://org/name", "--to", str(tmp_path)]) == 0
    assert max(Counter(hub.ranges).values()) == 1
