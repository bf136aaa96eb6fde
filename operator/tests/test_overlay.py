"""Laying a template over another as server-side apply would."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.operator.overlay import OverlayError, covers, merge
from penstock.operator.restrictions import forbidden, reserved

BASE = {
    "spec": {
        "containers": [{"name": "engine", "image": "a", "env": [{"name": "A", "value": "1"}], "args": ["x", "y"]}],
        "volumes": [{"name": "v", "emptyDir": {}}],
        "tolerations": [{"key": "k"}],
    }
}


def test_lists_merge_by_the_keys_of_server_side_apply() -> None:
    overlay = {
        "spec": {
            "containers": [
                {"name": "engine", "image": "b", "env": [{"name": "B", "value": "2"}, {"name": "A", "value": "3"}]},
                {"name": "sidecar", "image": "s"},
            ],
            "volumes": [{"name": "w", "emptyDir": {}}],
        }
    }
    spec = merge(BASE, overlay)["spec"]
    engine, sidecar = spec["containers"]
    assert (engine["image"], engine["args"], sidecar["name"]) == ("b", ["x", "y"], "sidecar")
    assert engine["env"] == [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}]
    assert [volume["name"] for volume in spec["volumes"]] == ["v", "w"]


def test_lists_without_keys_are_replaced_and_nulls_are_absent() -> None:
    overlay = {"spec": {"tolerations": [{"key": "other"}], "containers": [{"name": "engine", "args": ["z"], "image": None}]}}
    spec = merge(BASE, overlay)["spec"]
    assert spec["tolerations"] == [{"key": "other"}]
    assert (spec["containers"][0]["args"], spec["containers"][0]["image"]) == (["z"], "a")


def test_ports_differ_by_number_and_protocol() -> None:
    base = {"ports": [{"containerPort": 1, "name": "a"}]}
    assert len(merge(base, {"ports": [{"containerPort": 1, "protocol": "UDP"}]})["ports"]) == 2
    assert merge(base, {"ports": [{"containerPort": 1, "protocol": "TCP"}]})["ports"] == [
        {"containerPort": 1, "name": "a", "protocol": "TCP"}
    ]


@pytest.mark.parametrize(
    ("overlay", "named"),
    [
        ({"spec": {"containers": [{"image": "x"}]}}, r"template\.spec\.containers: an item lacks name"),
        ({"spec": {"containers": [{"name": "a"}, {"name": "a"}]}}, "comes twice"),
        ({"spec": {"containers": {"name": "a"}}}, r"template\.spec\.containers must not be an object"),
        ({"spec": "x"}, r"template\.spec must be an object"),
        ({"spec": {"containers": ["x"]}}, "each item must be an object"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_by_path(overlay: dict[str, Any], named: str) -> None:
    with pytest.raises(OverlayError, match=named):
        merge(BASE, overlay)


values = st.recursive(
    st.integers() | st.text(max_size=3) | st.booleans(),
    lambda children: st.dictionaries(st.sampled_from("abcd"), children, max_size=3) | st.lists(st.integers(), max_size=2),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from("abcd"), values, max_size=4)


@given(objects, objects)
def test_the_result_covers_the_overlay_and_laying_it_again_changes_nothing(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    try:
        merged = merge(base, overlay)
    except OverlayError:
        return
    assert covers(merged, overlay)
    assert merge(merged, overlay) == merged


def test_covers_knows_keyed_lists_and_what_the_server_drops() -> None:
    wanted = {"paused": False, "env": [{"name": "A", "value": "1"}], "labels": {"x": "1"}}
    live = {"env": [{"name": "Z", "value": "0"}, {"name": "A", "value": "1"}], "labels": {"x": "1", "y": "2"}}
    assert covers(live, wanted)
    assert not covers({**live, "env": [{"name": "A", "value": "2"}]}, wanted)
    assert not covers({**live, "labels": {}}, wanted)
    ports = [{"port": 1, "name": "a"}, {"port": 2, "name": "b"}]
    assert covers({"ports": ports}, {"ports": ports})
    assert not covers({"ports": ports}, {"ports": [{"port": 1, "name": "a"}, {"port": 3, "name": "b"}]})


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"hostNetwork": True}, "template.spec.hostNetwork"),
        ({"hostPID": True}, "template.spec.hostPID"),
        ({"serviceAccountName": "admin"}, "template.spec.serviceAccountName"),
        ({"automountServiceAccountToken": True}, "template.spec.automountServiceAccountToken"),
        ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "template.spec.volumes[v].hostPath"),
        (
            {"volumes": [{"name": "v", "projected": {"sources": [{"serviceAccountToken": {}}]}}]},
            "template.spec.volumes[v].projected.serviceAccountToken",
        ),
        (
            {"containers": [{"name": "engine", "securityContext": {"privileged": True}}]},
            "template.spec.containers[engine].securityContext.privileged",
        ),
        (
            {"initContainers": [{"name": "i", "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}]},
            "template.spec.initContainers[i].securityContext.capabilities.add",
        ),
        (
            {"containers": [{"name": "engine", "ports": [{"containerPort": 1, "hostPort": 1}]}]},
            "template.spec.containers[engine].ports[1].hostPort",
        ),
        ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "template.spec.securityContext.seccompProfile"),
        (
            {"containers": [{"name": "engine", "livenessProbe": {"httpGet": {"port": 10250, "host": "127.0.0.1"}}}]},
            "template.spec.containers[engine].livenessProbe.httpGet.host",
        ),
        (
            {"containers": [{"name": "s", "lifecycle": {"preStop": {"tcpSocket": {"port": 1, "host": "10.0.0.1"}}}}]},
            "template.spec.containers[s].lifecycle.preStop.tcpSocket.host",
        ),
    ],
)
def test_privileges_are_named(spec: dict[str, Any], path: str) -> None:
    assert forbidden({"spec": spec}) == [path]


def test_apparmor_is_not_turned_off_by_its_old_annotation() -> None:
    name = "container.apparmor.security.beta.kubernetes.io/engine"
    assert forbidden({"metadata": {"annotations": {name: "unconfined"}}}) == [f"template.metadata.annotations[{name}]"]
    assert forbidden({"metadata": {"annotations": {name: "runtime/default"}}}) == []


def test_a_harmless_template_is_allowed_and_penstocks_own_fields_are_reserved() -> None:
    harmless = {"spec": {"nodeSelector": {"a": "b"}, "containers": [{"name": "engine", "resources": {"limits": {"cpu": 1}}}]}}
    assert forbidden(harmless) == []
    assert reserved(harmless) == []
    assert reserved({"metadata": {"labels": {"penstock.dev/model": "x", "a": "b"}}}) == [
        "template.metadata.labels[penstock.dev/model]"
    ]
    assert reserved({"metadata": {"annotations": {"penstock.dev/cordoned": "true", "a": "b"}}}) == [
        "template.metadata.annotations[penstock.dev/cordoned]"
    ]
    assert reserved({"spec": {"terminationGracePeriodSeconds": 1}})
