"""The chart says what the manifests say, honours every value, and refuses those that it does not know."""

import json
import re
import subprocess
import textwrap
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from charts import readme
from charts.tests.rendered_chart import CHART, DIGEST, MODES, ROOT, Object, Render
from e2e.cluster.build import programs_folder
from e2e.cluster.commands import CommandError
from e2e.cluster.helm import Helm
from penstock.gateway import cli as gateway_cli
from penstock.gateway import envoy as envoy_cli
from penstock.operator import cli as operator_cli
from penstock.operator.acceptance import accept
from penstock.operator.desired.network_policy import OPERATOR, PICKERS

pytestmark = pytest.mark.slow

# Labels that only Helm's objects have, besides those that name a component.
HELMS = {f"app.kubernetes.io/{name}" for name in ("name", "part-of", "instance", "version", "managed-by")} | {"helm.sh/chart"}


@pytest.fixture(params=MODES)
def objects(request: pytest.FixtureRequest, render: Render) -> list[Object]:
    """What a mode renders."""
    return render(MODES[request.param])


def named(objects: list[Object], kind: str, name: str) -> Object:
    """The object of that kind and name."""
    (found,) = (it for it in objects if (it["kind"], it["metadata"]["name"]) == (kind, name))
    return found


def pods(objects: list[Object]) -> Iterator[Object]:
    """The specs of all pods."""
    return (it["spec"]["template"]["spec"] for it in objects if it["kind"] in ("Deployment", "StatefulSet"))


def leaves(values: Object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its path."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield path + name, value


def bare(objects: Iterator[Object] | list[Object]) -> dict[tuple[str, str], Object]:
    """Objects by kind and name, without what is Helm's own."""
    found: dict[tuple[str, str], Object] = {}
    for it in objects:
        metadata = {key: value for key, value in it["metadata"].items() if key not in ("labels", "annotations")}
        for field in ("labels", "annotations"):
            own = {
                key: value
                for key, value in it["metadata"].get(field, {}).items()
                if key not in HELMS | {"helm.sh/resource-policy"}
            }
            metadata |= {field: own} if own else {}
        found[it["kind"], it["metadata"]["name"]] = it | {"metadata": metadata}
    return found


UNKNOWN = {"digest": f"sha256:{'0' * 64}"}


@pytest.mark.parametrize(
    ("folder", "values"),
    [
        (".", {}),
        ("overlays/namespaced", {"watchNamespaces": ["team-a"]}),
        (
            "overlays/mirror",
            {
                "image": {"registry": "registry.example.com"},
                "operator": {"image": UNKNOWN, "engineImage": UNKNOWN},
                "gateway": {"image": UNKNOWN},
            },
        ),
    ],
)
def test_the_chart_and_the_manifests_say_the_same(render: Render, folder: str, values: Object) -> None:
    command = [programs_folder() / "kubectl", "kustomize", ROOT / "manifests" / folder]
    kustomized = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    manifests = bare(it for it in yaml.safe_load_all(kustomized) if it["kind"] != "Namespace")
    rendered = bare(render(values))
    assert rendered.keys() == manifests.keys()
    for key, manifest in manifests.items():
        assert rendered[key] == manifest, key


def test_helm_finds_no_fault(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART)


def test_a_package_holds_what_the_chart_only_points_at(helm: Helm, render: Render, tmp_path: Path) -> None:
    helm("package", CHART, f"--destination={tmp_path}")
    (package,) = tmp_path.glob("penstock-*.tgz")
    assert render(chart=package) == render()


def test_the_chart_has_the_version_of_what_it_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == project["version"]


def test_every_pod_is_hardened(objects: list[Object]) -> None:
    specs = list(pods(objects))
    assert len(specs) == 3
    for spec in specs:
        context = spec["securityContext"]
        assert (context["runAsNonRoot"], context["seccompProfile"]["type"]) == (True, "RuntimeDefault")
        assert context["runAsUser"] > 0
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
        for container in spec["containers"]:
            context = container["securityContext"]
            assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


def test_nobody_reads_secrets_runs_commands_or_makes_roles(objects: list[Object]) -> None:
    for it in objects:
        for rule in it.get("rules", []):
            assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])
            assert not {"secrets", "pods/exec", "pods/attach", "roles", "clusterroles", "rolebindings"} & {*rule["resources"]}
            assert not {"escalate", "bind", "impersonate"} & {*rule["verbs"]}


def test_every_flag_is_one_that_the_commands_know(objects: list[Object]) -> None:
    gateway = ArgumentParser(exit_on_error=False)
    for add in (
        gateway_cli._add_addresses,
        gateway_cli._add_certificates_and_pools,
        gateway_cli._add_limits_and_engines,
    ):
        add(gateway)
    parsers = {"operator": operator_cli._operator_parser(), "gateway": gateway, "envoy": envoy_cli._parser()}
    for spec in pods(objects):
        (container,) = spec["containers"]
        values = {entry["name"]: entry.get("value", "10.0.0.1") for entry in container["env"]}
        words = list(container["args"])
        for name, value in values.items():
            words = [word.replace(f"$({name})", value) for word in words]
        assert not [word for word in words if "$(" in word]
        _, unknown = parsers[container["name"]].parse_known_args(words)
        assert unknown == []


def test_what_is_mounted_is_there_and_services_find_their_pods(objects: list[Object]) -> None:
    workloads = [it for it in objects if it["kind"] in ("Deployment", "StatefulSet")]
    for workload in workloads:
        spec = workload["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]} == volumes
    for it in objects:
        if it["kind"] not in ("Service", "PodDisruptionBudget"):
            continue
        selector = it["spec"]["selector"].get("matchLabels", it["spec"]["selector"])
        (chosen,) = (one for one in workloads if selector.items() <= one["spec"]["template"]["metadata"]["labels"].items())
        if it["kind"] == "Service":
            (container,) = chosen["spec"]["template"]["spec"]["containers"]
            assert {port["targetPort"] for port in it["spec"]["ports"]} <= {port["name"] for port in container["ports"]}


def test_only_of_some_namespaces(render: Render) -> None:
    objects = render(MODES["namespaced"])
    assert not [it["kind"] for it in objects if it["kind"].startswith("Cluster") or it["kind"] == "CustomResourceDefinition"]
    assert {it["metadata"]["namespace"] for it in objects} == {"penstock-system", "team-a", "team-b"}
    cluster = {(it["kind"], it["metadata"]["name"]): it["rules"] for it in render() if it["kind"] == "ClusterRole"}
    for component in ("operator", "gateway"):
        name = f"penstock-{component}"
        for namespace in ("team-a", "team-b"):
            at = [it for it in objects if it["metadata"]["namespace"] == namespace]
            assert named(at, "Role", name)["rules"] == cluster["ClusterRole", name]
            binding = named(at, "RoleBinding", name)
            assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": "penstock-system"}]
        workload = next(it for it in objects if it["kind"] in ("Deployment", "StatefulSet") and it["metadata"]["name"] == name)
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        assert [word for word in container["args"] if word.startswith("--namespace")] == [
            "--namespace=team-a",
            "--namespace=team-b",
        ]


def test_a_mirror_and_digests_reach_every_image(render: Render) -> None:
    objects = render(MODES["mirror"])
    for spec in pods(objects):
        assert spec["imagePullSecrets"] == [{"name": "mirror"}]
        (container,) = spec["containers"]
        assert container["image"].startswith("registry.example.com/mirror/penstock/")
        assert container["image"].endswith(f"@{DIGEST}")
    (container,) = named(objects, "Deployment", "penstock-operator")["spec"]["template"]["spec"]["containers"]
    assert f"--engine-image=registry.example.com/mirror/penstock/engine@{DIGEST}" in container["args"]


def test_the_crds_are_upgraded_with_the_release_and_stay_without_it(render: Render) -> None:
    def annotations(values: Object) -> list[str | None]:
        crds = [it for it in render(values) if it["kind"] == "CustomResourceDefinition"]
        return [it["metadata"].get("annotations", {}).get("helm.sh/resource-policy") for it in crds]

    assert not (CHART / "crds").exists()  # Helm would install it, and never look at it again
    assert annotations({}) == ["keep"] * 2
    assert annotations({"crds": {"keep": False}}) == [None] * 2
    assert annotations({"crds": {"install": False}}) == []


def test_all_that_ask_replicas_find_their_certificates_at_the_same_place(render: Render) -> None:
    objects = render(MODES["closed"])
    places = set()
    own = ("StatefulSet", "penstock-gateway"), ("Deployment", "penstock-envoy"), ("Deployment", "penstock-operator")
    for kind, name in own:
        spec = named(objects, kind, name)["spec"]["template"]["spec"]
        (volume,) = (it["name"] for it in spec["volumes"] if it.get("secret", {}).get("secretName") == "replica-tls")
        places |= {it["mountPath"] for it in spec["containers"][0]["volumeMounts"] if it["name"] == volume}
    (place,) = places
    for kind, name in (own[0], own[2]):
        args = named(objects, kind, name)["spec"]["template"]["spec"]["containers"][0]["args"]
        assert {f"--replica-tls={place}", "--replica-name=replica.example.com"} <= set(args)


def test_envoy_asks_every_gateway_and_trusts_only_them(render: Render) -> None:
    objects = render(MODES["closed"])
    spec = named(objects, "Deployment", "penstock-envoy")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert [word for word in container["args"] if word.startswith("--gateway=")] == [
        f"--gateway=$(GATEWAY_{n})" for n in range(3)
    ]
    ca = next(volume for volume in spec["volumes"] if volume["name"] == "gateway")
    assert ca["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]  # and not the gateways' private key
    policies = {it["metadata"]["name"]: it["spec"]["ingress"] for it in objects if it["kind"] == "NetworkPolicy"}
    (grpc,) = (rule for rule in policies["penstock-gateway"] if rule["ports"][0]["port"] == "grpc")
    assert grpc["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "penstock-envoy"}}}]
    clients, scrapes = policies["penstock-envoy"]
    assert clients == {
        "from": [{"podSelector": {"matchLabels": {"client": "yes"}}}],
        "ports": [{"port": "http", "protocol": "TCP"}],
    }
    assert scrapes == {"from": [{"namespaceSelector": {}}], "ports": [{"port": "metrics", "protocol": "TCP"}]}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replicas": 2}, "additional properties 'replicas' not allowed"),
        ({"operator": {"replica": 2}}, "at '/operator': additional properties 'replica' not allowed"),
        ({"gateway": {"replicaCount": "two"}}, "at '/gateway/replicaCount': got string, want integer"),
        ({"operator": {"image": {"digest": "latest"}}}, "at '/operator/image/digest': 'latest' does not match"),
        ({"watchNamespaces": "team-a"}, "at '/watchNamespaces': got string, want array"),
        ({"envoy": {"service": {"type": "ExternalName"}}}, "at '/envoy/service/type'"),
        ({"operator": {"extraArgs": ["resync=1"]}}, "at '/operator/extraArgs/0': 'resync=1' does not match"),
    ],
)
def test_wrong_values_are_refused_by_name(render: Render, values: Object, said: str) -> None:
    with pytest.raises(CommandError) as refusal:
        render(values)
    assert said in str(refusal.value)


def test_the_schema_knows_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def walk(node: Object, path: str = "") -> Iterator[str]:
        node = schema["definitions"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        if "properties" not in node or path == "global.":
            yield path.rstrip(".")
            return
        assert node["additionalProperties"] is False, path
        for name, child in node["properties"].items():
            yield from walk(child, f"{path}{name}.")

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    # Kubernetes' own objects are not described again.
    known = {path for path in walk(schema) if not path.rpartition("resources.")[1]} - {"global"}
    stated = {path.partition(".resources.")[0] + (".resources" if ".resources." in path else "") for path, _ in leaves(values)}
    assert {path for path in stated if not path.endswith(".resources")} == known


MARKED: Object = {
    "podAnnotations": {"example.com/note": "M-note"},
    "podLabels": {"example.com/team": "M-team"},
    "nodeSelector": {"example.com/pool": "M-pool"},
    "tolerations": [{"key": "M-taint", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "M-affinity"}]}},
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "M-spread", "whenUnsatisfiable": "DoNotSchedule"}],
    "priorityClassName": "M-priority",
    "extraArgs": ["--M-flag=1"],
    "extraEnv": [{"name": "M_ENV", "value": "1"}],
    "extraVolumes": [{"name": "more", "configMap": {"name": "M-files"}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/etc/M-path"}],
    "resources": {"requests": {"cpu": "M-cpu"}, "limits": {"memory": "M-memory"}},
    "podDisruptionBudget": {"enabled": True, "maxUnavailable": "M%"},
    "replicaCount": 7,
}
ACCOUNT: Object = {"create": True, "name": "M-account", "annotations": {"example.com/role": "M-role"}}


@pytest.mark.parametrize("component", ["operator", "gateway", "envoy"])
def test_what_is_said_of_a_component_reaches_it_and_no_other(render: Render, component: str) -> None:
    values = MARKED | ({} if component == "envoy" else {"serviceAccount": ACCOUNT})
    objects = render({component: values})
    of_it = [it for it in objects if it["metadata"].get("labels", {}).get("app.kubernetes.io/name") == f"penstock-{component}"]
    text, others = (yaml.safe_dump(part) for part in (of_it, [it for it in objects if it not in of_it]))
    marks = re.findall(r"\bM[-_%][\w-]*", yaml.safe_dump(values))
    assert len(marks) >= len(MARKED) - 1  # all but the number of replicas
    assert [mark for mark in marks if mark not in text] == []
    assert [mark for mark in marks if mark in others] == []
    workload = next(it for it in of_it if it["kind"] in ("Deployment", "StatefulSet"))
    assert workload["spec"]["replicas"] == 7


def test_the_remaining_values_are_honoured(render: Render) -> None:
    objects = render(
        {
            "image": {"tag": "1.2.3", "pullPolicy": "Always"},
            "rbac": {"aggregate": False},
            "operator": {
                "gatewayUrl": "https://models.example.com",
                "allowPrivilegedTemplates": True,
                "templateSecrets": ["tls", "keys"],
                "namespaceBudgets": {"team-a": 1000000},
                "cacheStorageClass": "fast",
                "nodeCache": "/var/models",
                "allowRootTemplates": True,
                "allowNodeNameTemplates": True,
                "allowCommandTemplates": True,
                "allowSystemPriorityTemplates": True,
                "logLevel": "DEBUG",
                "image": {"repository": "mine/operator", "tag": "mine"},
            },
            "gateway": {
                "tenants": {"secretName": "keys", "key": "keys.yaml"},
                "auditLog": "-",
                "debugToken": {"secretName": "debug"},
                "console": False,
            },
            "envoy": {
                "service": {
                    "type": "LoadBalancer",
                    "port": 80,
                    "nodePort": 30080,
                    "annotations": {"example.com/lb": "internal"},
                    "loadBalancerClass": "example.com/lb",
                    "loadBalancerSourceRanges": ["10.0.0.0/8"],
                    "externalTrafficPolicy": "Local",
                }
            },
            "monitoring": {"enabled": True, "interval": "7s", "labels": {"release": "prometheus"}},
            "networkPolicy": {"enabled": True, "metrics": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]},
        }
    )
    operator, *_ = named(objects, "Deployment", "penstock-operator")["spec"]["template"]["spec"]["containers"]
    assert (operator["image"], operator["imagePullPolicy"]) == ("mine/operator:mine", "Always")
    assert {
        "--gateway-url=https://models.example.com",
        "--allow-privileged-templates",
        "--template-secret=tls",
        "--template-secret=keys",
        "--allow-root-templates",
        "--allow-node-name-templates",
        "--allow-command-templates",
        "--allow-system-priority-templates",
        "--log-level=DEBUG",
        "--engine-image=penstock/engine:1.2.3",
    } <= set(operator["args"])
    gateway, *_ = named(objects, "StatefulSet", "penstock-gateway")["spec"]["template"]["spec"]["containers"]
    assert {"--tenants=/etc/penstock/tenants/keys.yaml", "--audit-log=-"} <= set(gateway["args"])
    assert {"--debug-token-file=/etc/penstock/debug/token", "--no-console"} <= set(gateway["args"])
    assert {"name": "debug-token", "mountPath": "/etc/penstock/debug", "readOnly": True} in gateway["volumeMounts"]
    service = named(objects, "Service", "penstock-envoy")
    assert service["metadata"]["annotations"] == {"example.com/lb": "internal"}
    expected = {
        "type": "LoadBalancer",
        "loadBalancerClass": "example.com/lb",
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "externalTrafficPolicy": "Local",
        "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP", "nodePort": 30080}],
    }
    assert expected.items() <= service["spec"].items()
    assert not [it for it in objects if it["metadata"]["name"] in ("penstock-view", "penstock-edit")]
    monitors = [it for it in objects if it["kind"] == "PodMonitor"]
    assert {it["metadata"]["labels"]["release"] for it in monitors} == {"prometheus"}
    assert {end["interval"] for it in monitors for end in it["spec"]["podMetricsEndpoints"]} == {"7s"}
    (rule,) = named(objects, "NetworkPolicy", "penstock-operator")["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]


def test_dashboards_and_alerts_are_those_of_the_manifests(render: Render) -> None:
    folder = ROOT / "manifests" / "monitoring"
    objects = render({"monitoring": {"enabled": True}})
    boards = {
        it["metadata"]["name"]: it for it in objects if it["kind"] == "ConfigMap" and "-dashboard" in it["metadata"]["name"]
    }
    assert boards.keys() == {f"{path.stem}-dashboard" for path in (folder / "dashboards").iterdir()}
    for board in boards.values():
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((name, text),) = board["data"].items()
        assert json.loads(text) == json.loads((folder / "dashboards" / name).read_text())
    rule = named(objects, "PrometheusRule", "penstock")
    assert rule["spec"] == yaml.safe_load((folder / "rules" / "penstock.yaml").read_text())
    monitors = {it["metadata"]["name"]: it["spec"] for it in yaml.safe_load_all((folder / "podmonitors.yaml").read_text())}
    assert {it["metadata"]["name"]: it["spec"] for it in objects if it["kind"] == "PodMonitor"} == monitors


def test_runbooks_are_where_the_values_say_and_parts_can_be_left_out(render: Render) -> None:
    told = {"enabled": True, "labels": {"release": "prometheus"}, "runbookUrl": "https://wiki.example.com/r/"}
    objects = render({"monitoring": told | {"dashboards": {"labels": {"team": "a"}, "annotations": {"grafana_folder": "LLM"}}}})
    rule = named(objects, "PrometheusRule", "penstock")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    alerts = [it for group in rule["spec"]["groups"] for it in group["rules"] if "alert" in it]
    assert {it["annotations"]["runbook_url"] for it in alerts} == {
        f"https://wiki.example.com/r/{it['alert']}.md" for it in alerts
    }
    board = named(objects, "ConfigMap", "penstock-engine-dashboard")
    assert "Runbook: https://wiki.example.com/r/" in board["data"]["penstock-engine.json"]
    assert board["metadata"]["labels"]["team"] == "a"
    assert board["metadata"]["annotations"] == {"grafana_folder": "LLM"}
    fewer = render({"monitoring": {"enabled": True, "rules": False, "dashboards": {"enabled": False}}})
    kinds = {(it["kind"], it["metadata"]["name"]) for it in fewer}
    assert "PodMonitor" in {kind for kind, _ in kinds}
    assert not {it for it in kinds if it[0] == "PrometheusRule" or it[1].endswith("-dashboard")}


def test_the_notes_say_what_to_do_next(helm: Helm) -> None:
    values = yaml.safe_dump(MODES["namespaced"])
    said = helm("install", "penstock", CHART, "--namespace=penstock-system", "--dry-run=client", values=values).partition(
        "NOTES:"
    )[2]
    commands = [line.strip() for line in said.splitlines() if line.strip().startswith("kubectl")]
    assert len(commands) == 2
    assert all("-n team-a" in command for command in commands)
    (written,) = re.findall(r"<<END\n(.*?)\n +END", said, re.DOTALL)
    model, refusal = accept(yaml.safe_load(textwrap.dedent(written)))
    assert model is not None and refusal is None, refusal
    assert model.spec.source.uri == "hf://Qwen/Qwen3-0.6B"
    assert f"inferencemodel/{model.metadata.name} " in said
    assert "http://penstock-envoy.penstock-system.svc:8080/v1" in said


def test_the_readme_says_what_the_values_say() -> None:
    text = (CHART / "values.yaml").read_text()
    assert (CHART / "README.md").read_text() == readme.readme(text), "run make chart"
    found = list(readme.values(text))
    assert [it.path for it in found if not it.help] == []
    read = {path: value for it in found for path, value in leaves({it.path: yaml.safe_load(it.default)})}
    assert read == dict(leaves(yaml.safe_load(text)))


def test_the_chart_shows_its_icon_without_a_server() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["icon"] == readme.icon(), "run make chart"
    assert ElementTree.parse(readme.ICON).getroot().tag.endswith("svg")
    assert [it["name"] for it in chart["maintainers"]] == ["Penstock"]


def test_every_value_is_documented() -> None:
    words = set(re.findall(r"`([\w.]+)`", (ROOT / "docs/operator/install.md").read_text()))
    components = ("operator.", "gateway.", "envoy.")

    def is_described(path: str) -> bool:
        """By its path, as one of every component, or with what it is part of."""
        parts = path.removeprefix(next((it for it in components if path.startswith(it)), "")).split(".")
        ways = {
            path,
            path.rpartition(".")[0],
            f".{parts[-1]}",
            *(".".join(parts[:length]) for length in range(1, len(parts) + 1)),
        }
        return bool(ways & words)

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert [path for path, _ in leaves(values) if not is_described(path)] == []


def test_replicas_let_in_the_pods_that_the_chart_makes(objects: list[Object]) -> None:
    workloads = (named(objects, "Deployment", OPERATOR), named(objects, "StatefulSet", PICKERS[0]))
    labelled = [it["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"] for it in workloads]
    assert labelled == [OPERATOR, PICKERS[0]]
    assert "--system-namespace=$(POD_NAMESPACE)" in workloads[0]["spec"]["template"]["spec"]["containers"][0]["args"]
