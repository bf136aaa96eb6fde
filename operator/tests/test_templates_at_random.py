"""A pool's template is whatever its user writes: it is laid over the generated one, or refused in words."""

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.api.resources import InferenceModel
from penstock.operator.desired import Rendering, TemplateError, children
from penstock.operator.desired.source import fetch_job
from penstock.operator.overlay import OverlayError

RENDERING = Rendering(image="penstock/engine:test")
NAMES = [
    "metadata", "labels", "annotations", "spec", "containers", "initContainers", "name", "ports", "containerPort", "env",
    "volumes", "emptyDir", "volumeMounts", "mountPath", "securityContext", "capabilities", "add", "livenessProbe", "httpGet",
    "host", "lifecycle", "preStop", "restartPolicy",
]  # fmt: skip
LEAF = st.none() | st.booleans() | st.integers(-5, 9000) | st.sampled_from(["engine", "x", "http", ""])
TREE = st.recursive(
    LEAF, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from(NAMES), part, max_size=4), max_leaves=12
)
PART = st.dictionaries(st.sampled_from(NAMES), TREE, max_size=4)
CONTAINER = st.tuples(st.sampled_from(["engine", "x"]), PART).map(lambda both: {"name": both[0], **both[1]})
TEMPLATE = (
    PART
    | PART.map(lambda part: {"metadata": part})
    | PART.map(lambda part: {"spec": part})
    | st.lists(CONTAINER | TREE, max_size=3).map(lambda found: {"spec": {"containers": found}})
)


def model_of(template: Any, **source: Any) -> InferenceModel:
    spec = {"served": {"name": "m"}, "source": {"uri": "/m", **source}, "pools": [{"name": "main", "template": template}]}
    kind = {"apiVersion": "penstock.dev/v1alpha1", "kind": "InferenceModel"}
    return InferenceModel.parse({**kind, "metadata": {"name": "m", "uid": "1"}, "spec": spec})


@settings(max_examples=60)
@given(TEMPLATE)
def test_a_template_of_any_shape_is_rendered_or_refused(template: Any) -> None:
    model = model_of(template)
    try:
        made = children(model, RENDERING)
    except (TemplateError, OverlayError) as error:
        assert "template" in str(error)
        return
    assert made[-1]["kind"] == "Deployment"


@settings(max_examples=60)
@given(TEMPLATE)
@example({"spec": {"containers": ["engine"]}})
@example({"spec": {"containers": [{"name": "engine", "env": "x"}]}})
@example({"spec": {"containers": [{"name": "engine", "env": [{"value": "x"}]}]}})
def test_so_it_is_by_the_job_that_brings_the_model(template: Any) -> None:
    model = model_of(template, uri="hf://org/m", cache={"claimName": "models"})
    try:
        job = fetch_job(model, "penstock/engine:test")
    except OverlayError as error:
        assert "template" in str(error)
        return
    assert job is not None
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["env"][0]["name"] == "POD_IP"
