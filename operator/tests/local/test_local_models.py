"""What `penstock up` accepts, and the words with which it refuses the rest."""

from pathlib import Path

import pytest
import yaml

from penstock.api.fleet import Canary
from penstock.operator.local.models import ModelFileError, load_models

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny.yaml"


def write(folder: Path, *changes: dict) -> Path:
    """The example with changed fields of its spec, once for each change."""
    documents = []
    for change in changes:
        document = yaml.safe_load(EXAMPLE.read_text())
        document["spec"] |= change
        documents.append(document)
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return path


def test_the_example_is_a_model_with_a_scaled_pool():
    (local,) = load_models(EXAMPLE)
    assert local.model.id == "default/tiny" and local.model.served_names == ["tiny"]
    assert [pool.id for pool in local.pools] == list(local.deployments) == ["default/tiny/cpu"]
    limits = local.limits.pools["cpu"]
    assert (limits.min_replicas, limits.max_replicas, limits.down_window_s) == (2, 4, 300)
    assert local.deployments["default/tiny/cpu"]["spec"]["replicas"] == 2
    assert not local.dry_runs


def test_a_canary_reaches_the_gateway_and_restarts_nothing(tmp_path):
    def canary(weight):
        return {"served": {"name": "new"}, "canary": {"of": "tiny", "weight": weight}}

    (less,), (more,) = (load_models(write(tmp_path, canary(weight))) for weight in (5, 50))
    assert less.model.canary == Canary(of="tiny", weight=5)
    assert more.model.canary == Canary(of="tiny", weight=50)
    assert less.deployments == more.deployments


def test_a_dry_run_is_one(tmp_path):
    (local,) = load_models(write(tmp_path, {"pools": [{"name": "p", "scaling": {"max": 2, "mode": "DryRun"}}]}))
    assert local.dry_runs == {"p"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"speculative": 1}, "document 1: spec.speculative: there is no such field"),
        (
            {"pools": [{"name": "p", "scaleing": {}}]},
            r"spec\.pools\[0\]\.scaleing: there is no such field; did you mean scaling\?",
        ),
        ({"lora": {"sources": [{"prefix": "s3://a"}]}}, r"do nothing yet, remove them: spec.lora.sources\[0\].prefix"),
        ({"replicas": 2}, "replicas is for a model with one pool and no scaling"),
        ({"source": {"uri": "hf://a/b", "secretRef": {"name": "s"}}}, "secretRef: there are no Secrets here; set HF_TOKEN"),
        (
            {
                "engine": {"connector": {"type": "transfer", "memory": "1Gi", "secretRef": {"name": "s"}}},
                "pools": [{"name": "p", "role": "Prefill"}, {"name": "d", "role": "Decode"}],
            },
            "spec.engine.connector.secretRef: there are no Secrets here",
        ),
        (
            {"pools": [{"name": "p", "accelerator": {"resource": "a.b/gpu"}}]},
            r"pools\[p\]\.accelerator: nobody hands out devices",
        ),
        ({"pools": [{"name": "p", "template": {"spec": {"hostNetwork": True}}}]}, "hostNetwork"),
    ],
)
def test_what_cannot_be_run_is_refused_by_place(tmp_path, change, says):
    with pytest.raises(ModelFileError, match=says):
        load_models(write(tmp_path, change))


ADAPTER = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "LoraAdapter",
    "metadata": {"name": "sql", "namespace": "default"},
    "spec": {
        "modelRef": {"name": "tiny"},
        "served": {"name": "tiny-sql", "aliases": ["sql"]},
        "source": {"uri": "file:///adapters/sql"},
    },
}
ROOM = {"lora": {"slots": 2, "sources": [{"prefix": "file:///adapters"}]}}


def write_adapter(folder: Path, spec: dict | None = None, room: dict = ROOM) -> Path:
    """The example, and an adapter with changed fields of its spec."""
    path = write(folder, room)
    path.write_text(path.read_text() + "---\n" + yaml.safe_dump({**ADAPTER, "spec": ADAPTER["spec"] | (spec or {})}))
    return path


def test_an_adapter_is_loaded_by_its_models_engines_and_known_to_the_gateway(tmp_path):
    (local,) = load_models(write_adapter(tmp_path))
    (adapter,) = local.adapters
    assert (adapter.id, adapter.model, adapter.served_names) == ("default/sql", "default/tiny", ["tiny-sql", "sql"])
    args = local.deployments["default/tiny/cpu"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--enable-lora" in args and args[-2:] == ["--lora-modules", "tiny-sql=file:///adapters/sql"]


@pytest.mark.parametrize(
    ("spec", "room", "says"),
    [
        ({}, {}, "document 2: NoRoomForAdapters: .*set spec.lora there"),
        ({"modelRef": {"name": "other"}}, ROOM, "document 2: ModelNotFound: there is no InferenceModel 'other'"),
        ({"source": {"uri": "file:///etc/sql"}}, ROOM, "document 2: SourceNotAllowed"),
        ({"source": {"uri": "file:///adapters/sql", "revision": "1"}}, ROOM, "document 2: spec.source.revision"),
        ({"served": {"name": "tiny"}}, ROOM, "more than one served name tiny"),
        ({"served": {}}, ROOM, "document 2: spec.served.name: is missing"),
    ],
)
def test_an_adapter_that_no_cluster_would_serve_is_refused_by_place(tmp_path, spec, room, says):
    with pytest.raises(ModelFileError, match=says):
        load_models(write_adapter(tmp_path, spec, room))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no InferenceModel"),
        ("{", "models.yaml: while parsing"),
        ("- 1\n", "no Kubernetes resource"),
        ("kind: Pod\napiVersion: v1\n", "expected kind InferenceModel"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path, text, says):
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(ModelFileError, match=says):
        load_models(path)
    with pytest.raises(ModelFileError, match="No such file"):
        load_models(tmp_path / "none.yaml")
