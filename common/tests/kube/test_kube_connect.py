"""What is said where no API server can be reached for want of configuration."""

from pathlib import Path

import pytest
import yaml

from penstock.kube import client
from penstock.kube.errors import NoApiServer

KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "here",
    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
    "clusters": [{"name": "here", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "me", "user": {}}],
}


async def test_a_kubeconfig_is_used(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(yaml.dump(KUBECONFIG))
    async with await client.connect(str(file)) as api:
        assert api.configuration.host == "http://127.0.0.1:1"


async def test_outside_a_pod_and_without_a_file_both_places_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(client, "KUBE_CONFIG_DEFAULT_LOCATION", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    with pytest.raises(NoApiServer, match=r"^looked for a pod's ServiceAccount \(.+\) and the file .*/a:.*/b \(not there\)$"):
        await client.connect()


@pytest.mark.parametrize("content", ["", "- a list", "{}", "{unclosed", "current-context: nowhere", "\x00"])
async def test_a_file_that_is_no_kubeconfig_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "config"
    file.write_text(content)
    with pytest.raises(NoApiServer, match=rf"^looked for the file {file} \(.+\)$"):
        await client.connect(str(file))


def test_the_namespace_is_the_contexts_where_none_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    there = {"name": "there", "context": {"cluster": "here", "user": "me", "namespace": "team-a"}}
    file = tmp_path / "config"
    file.write_text(yaml.dump({**KUBECONFIG, "contexts": [*KUBECONFIG["contexts"], there]}))
    assert client.usual_namespace(str(file)) == "default"
    assert client.usual_namespace(str(file), "there") == "team-a"
    file.write_text("a list")
    assert client.usual_namespace(str(file)) == "default"


def test_the_namespace_of_a_pod_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(client, "POD_NAMESPACE", tmp_path / "namespace")
    (tmp_path / "namespace").write_text("mine\n")
    assert client.usual_namespace() == "mine"


async def test_a_context_that_is_not_there_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(yaml.dump(KUBECONFIG))
    with pytest.raises(NoApiServer, match="nowhere"):
        await client.connect(str(file), "nowhere")
