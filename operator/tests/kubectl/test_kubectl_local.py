"""`penstock status --local` and `top --local`: the system of `penstock up`."""

import json
from pathlib import Path

import pytest

from penstock import local_system
from penstock.api.fleet import PoolLoad, PoolsView, ReplicaLoad
from penstock.operator.kubectl import cli
from penstock.operator.kubectl.local import trees


def replica(name: str, *, ready: bool) -> ReplicaLoad:
    return ReplicaLoad(
        uid=name, name=name, port=8000, ready=ready, cordoned=False, report=None, report_age_s=None, pending=0, in_flight=0
    )


def test_models_are_trees_with_what_the_autoscaler_says() -> None:
    members = [replica("r1", ready=True), replica("r2", ready=False)]
    view = PoolsView(gateway="local", version=1, pools=[PoolLoad(id="d/m/p", model="d/m", held=0, replicas=members)])
    models = {"names": {"m": {"model": "d/m"}, "alias": {"model": "d/m"}}, "scaling": {"d/m/p": "Demand: 8 requests"}}
    (tree,) = trees(view, models, "http://127.0.0.1:8080", None)
    assert tree.text == "d/m  http://127.0.0.1:8080"
    served, pool = tree.below
    assert served.text == "served as m, alias"
    assert pool.text == "pool p  1/2"
    assert [it.text for it in pool.below] == ["autoscaler: Demand: 8 requests", "r1  Ready", "r2  Starting"]
    assert trees(view, models, "", "alias") and not trees(view, models, "", "other")


def test_without_a_system_they_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for command in (cli.status, cli.top):
        assert command(["--local"]) == 1
        assert capsys.readouterr().err == "penstock: no system of penstock up runs on this machine\n"


def test_a_gateway_that_does_not_answer_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = local_system.announce("http://127.0.0.1:1", "http://127.0.0.1:1", "http://127.0.0.1:1", {})
    assert json.loads(path.read_text())["gateway"] == "http://127.0.0.1:1"
    assert cli.top(["--local", "--once"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
