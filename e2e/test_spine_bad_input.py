"""Bad resources that the API server takes: what is found out later is said in a condition and an Event."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e import models
from e2e.cluster.cluster import Cluster
from e2e.cluster.phases import Phases
from e2e.system import System
from e2e.waiting import eventually


def test_field_that_nothing_honours_is_named_and_nothing_runs(system: System, namespace: str) -> None:
    cluster, name = system.cluster, "eager"
    engine = {"speculative": {"method": "medusa"}, "quantization": {"weights": "fp8_per_tensor_static"}}
    with models.applied(cluster, namespace, models.small(name, engine=engine)):

        def refused() -> dict[str, Any]:
            found = models.conditions(cluster, namespace, name)
            assert found["Accepted"]["status"] == "False"
            return found

        found = eventually(refused)
        assert found["Accepted"]["reason"] == "UnsupportedField"
        for field in (
            "spec.engine.speculative.method (medusa; ngram, suffix, draft_model, eagle, eagle3, mtp, auto work)",
            "spec.engine.quantization.weights (fp8_per_tensor_static; int8_per_channel_weight_only, int8_per_group_32",
        ):
            assert field in found["Accepted"]["message"]
        assert found["Ready"]["status"] == "False"
        assert [item["kind"] for item in models.belongings(cluster, namespace, name)] == ["InferenceModel"]


WRONG_TEMPLATES: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"spec": {"nodeSelectr": {"disk": "ssd"}}}, ".spec.template.spec.nodeSelectr: field not declared in schema"),
    "mistyped": ({"spec": {"nodeSelector": "ssd"}}, ".spec.template.spec.nodeSelector"),
    "refused": ({"spec": {"restartPolicy": "Never"}}, "spec.template.spec.restartPolicy"),
}


def test_template_that_no_pod_can_have_is_told_in_the_servers_words(system: System, namespace: str) -> None:
    cluster = system.cluster
    resources = [
        models.small(name, pools=[{"name": "cpu", "template": template}]) for name, (template, _) in WRONG_TEMPLATES.items()
    ]

    def refused(name: str, words: str) -> None:
        found = models.conditions(cluster, namespace, name)
        assert (found["Accepted"]["status"], found["Accepted"]["reason"]) == ("False", "ApplyRefused")
        assert words in found["Accepted"]["message"]
        assert found["Ready"]["status"] == "False"

    with models.applied(cluster, namespace, *resources):
        for name, (_, words) in WRONG_TEMPLATES.items():
            eventually(lambda name=name, words=words: refused(name, words))


def not_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickled")


def unknown_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["architectures"], config["model_type"] = ["MysteryForCausalLM"], "mystery"
    (folder / "config.json").write_text(json.dumps(config))


def truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])


BROKEN_MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (shutil.rmtree, "{folder}"),
    "pickled": (not_safetensors, "safetensors"),
    "unknown": (unknown_architecture, "MysteryForCausalLM"),
    "truncated": (truncated, "model.safetensors"),
}


def test_model_that_cannot_be_loaded_says_why(system: System, namespace: str, tmp_path: Path, phases: Phases) -> None:
    cluster, resources = system.cluster, []
    for name, (breaks, _) in BROKEN_MODELS.items():
        shutil.copytree(models.DEMO_MODEL, tmp_path / name)
        breaks(tmp_path / name)
        resources.append(models.with_source(models.small(name), f"file://{tmp_path / name}"))
    with phases("four broken models applied → said why"), models.applied(cluster, namespace, *resources):
        for name, (_, words) in BROKEN_MODELS.items():
            expected = words.format(folder=tmp_path / name)
            eventually(lambda name=name, expected=expected: expect_said(cluster, namespace, name, expected), seconds=120)


def expect_said(cluster: Cluster, namespace: str, name: str, words: str) -> None:
    found = models.conditions(cluster, namespace, name)
    assert found["Ready"]["status"] == "False"
    assert found["ModelAvailable"]["status"] == "False", found["ModelAvailable"]
    assert words in found["ModelAvailable"]["message"], found["ModelAvailable"]
    assert words in found["Ready"]["message"], found["Ready"]
    warnings = [event["message"] for event in models.events(cluster, namespace, name) if event["type"] == "Warning"]
    assert any(words in message for message in warnings), warnings


def test_old_replica_goes_on_serving_when_the_new_model_cannot_be_loaded(
    system: System, namespace: str, tmp_path: Path, phases: Phases
) -> None:
    cluster, name = system.cluster, "careful"
    good, nowhere = models.small(name), str(tmp_path / "nowhere")

    def ask() -> str:
        answer = system.openai().completions.create(model=name, prompt="json.loads", max_tokens=8, temperature=0)
        return answer.choices[0].text

    with models.applied(cluster, namespace, good):
        models.wait_until_ready(cluster, namespace, name)
        text = eventually(ask)
        with phases("a model that is not there applied over a good one → said why"):
            cluster.apply(models.with_source(good, nowhere), namespace=namespace)
            eventually(lambda: expect_said(cluster, namespace, name, nowhere), seconds=120)
        assert models.conditions(cluster, namespace, name)["Serving"]["status"] == "True"
        assert ask() == text
        with phases("the good one applied again → Ready"):
            cluster.apply(good, namespace=namespace)
            models.wait_until_ready(cluster, namespace, name, seconds=120)
        assert ask() == text
