"""`penstock gateway` where Kubernetes is to be watched and there is none."""

import pytest

from penstock.gateway import cli
from penstock.kube import client


def test_a_gateway_without_an_api_server_says_so(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(client, "KUBE_CONFIG_DEFAULT_LOCATION", f"{tmp_path}/none")
    assert cli.gateway(["--discovery=kubernetes", "--grpc-port=0", "--http-port=0"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("penstock gateway: ")]
    assert line.startswith("penstock gateway: no API server to go to; see --discovery: looked for a pod's ServiceAccount")
    assert line.endswith("/none (not there)")
