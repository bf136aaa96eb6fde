"""What `penstock up` accepts, and the words with which it refuses the rest."""

from pathlib import Path

import pytest
import yaml

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
    assert [pool.id for pool in local.pools] == list(local.deployments) == list(local.limits) == ["default/tiny/cpu"]
    limits = local.limits["default/tiny/cpu"]
    assert (limits.min_replicas, limits.max_replicas, limits.down_window_s) == (2, 4, 300)
    assert local.deployments["default/tiny/cpu"]["spec"]["replicas"] == 2
    assert not local.dry_runs


def test_a_dry_run_is_one(tmp_path):
    (local,) = load_models(write(tmp_path, {"pools": [{"name": "p", "scaling": {"max": 2, "mode": "DryRun"}}]}))
    assert local.dry_runs == {"default/tiny/p"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"speculative": 1}, "document 1: .*speculative"),
        ({"lora": {"slots": 2}}, "these fields do nothing yet, remove them: spec.lora"),
        ({"replicas": 2}, "replicas is for a model with one pool and no scaling"),
        ({"source": {"uri": "hf://a/b", "secretRef": {"name": "s"}}}, "secretRef: there are no Secrets here; set HF_TOKEN"),
        ({"pools": [{"name": "p", "template": {"spec": {"hostNetwork": True}}}]}, "hostNetwork"),
    ],
)
def test_what_cannot_be_run_is_refused_by_place(tmp_path, change, says):
    with pytest.raises(ModelFileError, match=says):
        load_models(write(tmp_path, change))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no InferenceModel"),
        ("{", "models.yaml: while parsing"),
        ("- 1\n", "no Kubernetes resource"),
        ("kind: LoraAdapter\n", "adapters do nothing yet"),
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
