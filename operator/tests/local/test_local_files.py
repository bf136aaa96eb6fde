"""What `penstock up` and `penstock operator` say to people who got something wrong."""

import socket
from pathlib import Path

import pytest

from penstock.operator import cli
from penstock.operator.local import network
from penstock.operator.local.models import ModelFileError, load_models

MODEL = """
apiVersion: penstock.dev/v1alpha1
kind: InferenceModel
metadata: {{name: {name}, namespace: default}}
spec:
  served: {{name: {served}}}
  source: {{uri: "file:///models/x"}}
  pools: [{{name: cpu, scaling: {{min: 1, max: 1}}}}]
"""


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"name": "a", "served": "other"}, "more than one InferenceModel default/a$"),
        ({"name": "b", "served": "tiny"}, "more than one served name tiny$"),
    ],
)
def test_a_file_may_not_have_a_name_twice(tmp_path: Path, second: dict[str, str], message: str) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(MODEL.format(name="a", served="tiny") + "---" + MODEL.format(**second))
    with pytest.raises(ModelFileError, match=message):
        load_models(file)
    file.write_text(MODEL.format(name="a", served="tiny") + "---" + MODEL.format(name="b", served="other"))
    assert len(load_models(file)) == 2


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http"])
def test_a_port_that_is_none_is_refused_by_name(capsys: pytest.CaptureFixture[str], port: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.up(["-f", "models.yaml", f"--port={port}"])
    assert f"argument --port: '{port}' is not a port" in capsys.readouterr().err


def test_a_taken_port_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(MODEL.format(name="a", served="tiny"))
    runs = tmp_path / "runs"
    runs.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runs))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.up(["-f", str(file), f"--port={port}"]) == 1
    assert f"port {port} of 127.0.0.1 is in use" in capsys.readouterr().err
    assert list(runs.iterdir()) == []


def test_a_program_on_all_addresses_is_said_to_be_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "port_is_free", lambda _host, port: port != 9002)
    with pytest.raises(network.NetworkError, match=r"8000, 9002, 9090 is in use on every address"):
        next(network.addresses())


def test_an_address_that_is_not_ours_is_no_free_port() -> None:
    with pytest.raises(network.NetworkError, match=r"port 8000 of 192\.0\.2\.1: Cannot assign"):
        network.port_is_free("192.0.2.1", 8000)


def test_an_operator_without_an_api_server_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.operator([f"--kubeconfig={tmp_path / 'none'}"]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("penstock operator: no API server to go to; see --kubeconfig: ")


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"^\S+/no\.yaml cannot be read: No such file or directory$"):
        load_models(tmp_path / "no.yaml")
