"""What a pool's `template` may not ask for. Otherwise a user who may create InferenceModels could run any pod on any node.

The list follows Kubernetes' baseline Pod Security Standard, plus ServiceAccounts and their tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from penstock.operator.overlay import mapping

Object = Mapping[str, Any]

_POD = ("hostNetwork", "hostPID", "hostIPC", "serviceAccountName", "serviceAccount", "automountServiceAccountToken", "hostUsers")
_CONTEXT = ("privileged", "allowPrivilegeEscalation", "procMount", "windowsOptions", "sysctls", "seLinuxOptions")
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_HOOKS = ("postStart", "preStop")
_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
# Labels and annotations that selectors and discovery rely on.
OWN_LABELS = "penstock.dev/"
# Of the Deployment controller: it and the operator would change such an annotation back and forth.
_REVISIONS = "deployment.kubernetes.io/"


@dataclass(frozen=True)
class Allowances:
    """What the operator's flags let new templates ask for."""

    secrets: frozenset[str] = frozenset()
    """Names of the Secrets that templates may read."""
    root: bool = False
    node_name: bool = False
    command: bool = False
    system_priority: bool = False


def unlisted(template: Object, allowed: Allowances) -> dict[str, str]:
    """Paths of the fields of a new template that need a flag of the operator, each with that flag. What runs is not held to it:
    an upgrade of the operator changes no replica."""
    spec = mapping(template.get("spec"))
    found: dict[str, str] = {}
    for path, name in _secrets(spec, "template.spec"):
        if name not in allowed.secrets:
            found[path] = f"--template-secret {name}"
    if not allowed.node_name and spec.get("nodeName"):
        found["template.spec.nodeName"] = "--allow-node-name-templates"
    if not allowed.system_priority and str(spec.get("priorityClassName") or "").startswith("system-"):
        found["template.spec.priorityClassName"] = "--allow-system-priority-templates"
    if not allowed.root:
        found |= dict.fromkeys(_root(spec, "template.spec"), "--allow-root-templates")
    for container in _maps(spec.get("containers")):
        if not allowed.command and container.get("name") == "engine" and container.get("command"):
            found["template.spec.containers[engine].command"] = "--allow-command-templates"
    return found


def _secrets(spec: Object, path: str) -> Iterator[tuple[str, str]]:
    """Each place where containers read a Secret, and its name. `imagePullSecrets` are the kubelet's to read."""
    for volume in _maps(spec.get("volumes")):
        at = f"{path}.volumes[{volume.get('name')}]"
        if "secret" in volume:
            yield f"{at}.secret", str(mapping(volume["secret"]).get("secretName"))
        for source in _maps(mapping(volume.get("projected")).get("sources")):
            if "secret" in source:
                yield f"{at}.projected.secret", str(mapping(source["secret"]).get("name"))
        for kind, driver in volume.items():
            for field in ("secretRef", "nodePublishSecretRef"):
                if field in mapping(driver):
                    yield f"{at}.{kind}.{field}", str(mapping(mapping(driver)[field]).get("name"))
            if kind == "azureFile":
                yield f"{at}.azureFile", str(mapping(driver).get("secretName"))
    for kind, container in _containers(spec):
        at = f"{path}.{kind}[{container.get('name')}]"
        for variable in _maps(container.get("env")):
            reference = mapping(mapping(variable.get("valueFrom")).get("secretKeyRef"))
            if reference:
                yield f"{at}.env[{variable.get('name')}]", str(reference.get("name"))
        for source in _maps(container.get("envFrom")):
            if "secretRef" in source:
                yield f"{at}.envFrom", str(mapping(source["secretRef"]).get("name"))


def _root(spec: Object, path: str) -> Iterator[str]:
    """Each place that asks for the root user, or lets the image choose it."""
    contexts = [(path, mapping(spec.get("securityContext")))]
    contexts += [(f"{path}.{kind}[{it.get('name')}]", mapping(it.get("securityContext"))) for kind, it in _containers(spec)]
    for at, context in contexts:
        if context.get("runAsUser") == 0:
            yield f"{at}.securityContext.runAsUser"
        if context.get("runAsNonRoot") is False:
            yield f"{at}.securityContext.runAsNonRoot"


def forbidden(template: Object) -> list[str]:
    """Paths of the fields that need `--allow-privileged-templates`; empty: the template is harmless."""
    return sorted({*_pod(mapping(template.get("spec")), "template.spec"), *_unconfined(template)})


def reserved(template: Object) -> list[str]:
    """Paths of what no template may set, whatever the operator's flags: labels and annotations by which Penstock knows its
    replicas, the grace period, which follows from `drainTimeout`, and the engine's arguments, which follow from the fields."""
    paths = list(_named(mapping(template.get("metadata")), "template.metadata", (OWN_LABELS,)))
    if "terminationGracePeriodSeconds" in mapping(template.get("spec")):
        paths.append("template.spec.terminationGracePeriodSeconds (use drainTimeout)")
    for container in _maps(mapping(template.get("spec")).get("containers")):
        if container.get("name") == "engine" and "args" in container:
            paths.append("template.spec.containers[engine].args (use engine.extraArgs)")
    return paths


def reserved_of_workload(metadata: Object) -> list[str]:
    """Paths of the labels and annotations of a pool's workload that are not its user's to set."""
    return list(_named(metadata, "metadata", (OWN_LABELS, _REVISIONS)))


def _named(metadata: Object, path: str, prefixes: tuple[str, ...]) -> Iterator[str]:
    for field in ("labels", "annotations"):
        yield from (f"{path}.{field}[{name}]" for name in mapping(metadata.get(field)) if name.startswith(prefixes))


def _unconfined(template: Object) -> Iterator[str]:
    """The annotations that did what `appArmorProfile` does, and still do."""
    for name, profile in mapping(mapping(template.get("metadata")).get("annotations")).items():
        if name.startswith(_APPARMOR) and profile == "unconfined":
            yield f"template.metadata.annotations[{name}]"


def _pod(spec: Object, path: str) -> Iterator[str]:
    for name in _POD:
        if spec.get(name):
            yield f"{path}.{name}"
    yield from _context(mapping(spec.get("securityContext")), f"{path}.securityContext")
    for volume in _maps(spec.get("volumes")):
        name = f"{path}.volumes[{volume.get('name')}]"
        if "hostPath" in volume:
            yield f"{name}.hostPath"
        if any("serviceAccountToken" in source for source in _maps(mapping(volume.get("projected")).get("sources"))):
            yield f"{name}.projected.serviceAccountToken"
    for kind, container in _containers(spec):
        yield from _container(container, f"{path}.{kind}[{container.get('name')}]")


def _containers(spec: Object) -> Iterator[tuple[str, Object]]:
    """Every container with the field that it stands in."""
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in _maps(spec.get(kind)):
            yield kind, container


def _container(container: Object, path: str) -> Iterator[str]:
    context = mapping(container.get("securityContext"))
    yield from _context(context, f"{path}.securityContext")
    if mapping(context.get("capabilities")).get("add"):
        yield f"{path}.securityContext.capabilities.add"
    for port in _maps(container.get("ports")):
        if port.get("hostPort"):
            yield f"{path}.ports[{port.get('containerPort')}].hostPort"

    handlers = {name: container.get(name) for name in _PROBES}
    handlers |= {f"lifecycle.{name}": mapping(container.get("lifecycle")).get(name) for name in _HOOKS}
    for name, handler in handlers.items():
        for kind in ("httpGet", "tcpSocket"):
            if mapping(mapping(handler).get(kind)).get("host"):  # the kubelet asks it, from the node's network
                yield f"{path}.{name}.{kind}.host"


def _context(context: Object, path: str) -> Iterator[str]:
    for name in _CONTEXT:
        if context.get(name):
            yield f"{path}.{name}"
    for profile in ("seccompProfile", "appArmorProfile"):
        if mapping(context.get(profile)).get("type") == "Unconfined":
            yield f"{path}.{profile}"


def _maps(value: Any) -> list[Object]:
    return [mapping(item) for item in cast(list[Any], value)] if isinstance(value, list) else []
