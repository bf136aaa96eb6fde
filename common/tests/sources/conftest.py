"""A model on a Hub and in a bucket."""

import pytest

from penstock.sources import parts
from testing.source_servers import BucketServer, HubServer, running

MODEL = {
    "config.json": b'{"architectures": ["X"]}',
    "model.safetensors": bytes(range(256)) * 40,
    "sub/tokenizer.json": b"{}",
    "pytorch_model.bin": b"a pickle",
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """So that a small file has several parts, and a refusal is not asked again for long."""
    monkeypatch.setattr(parts, "PART", 1000)
    monkeypatch.setattr(parts, "TRIES", 1)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    server = HubServer(dict(MODEL))
    with running(server):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield server


@pytest.fixture
def bucket(monkeypatch):
    server = BucketServer({f"team/m/{path}": data for path, data in MODEL.items()} | {"team/m2/config.json": b"of another"})
    with running(server):
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-very-secret-key")
        monkeypatch.setenv("AWS_REGION", "r")
        yield server
