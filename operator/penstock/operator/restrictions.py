"""What a pool's `template` may not ask for: else whoever may create InferenceModels could run any pod on any node.

The list follows Kubernetes' baseline Pod Security Standard, plus ServiceAccounts and their tokens.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

Object = Mapping[str, Any]

_POD = ("hostNetwork", "hostPID", "hostIPC", "serviceAccountName", "serviceAccount", "automountServiceAccountToken", "hostUsers")
_CONTEXT = ("privileged", "allowPrivilegeEscalation", "procMount", "windowsOptions", "sysctls", "seLinuxOptions")
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_HOOKS = ("postStart", "preStop")
_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
# Labels and annotations that selectors and discovery rely on.
OWN_LABELS = "penstock.dev/"


def forbidden(template: Object) -> list[str]:
    """Paths of the fields that need `--allow-privileged-templates`; empty: the template is harmless."""
    return sorted({*_pod(_map(template.get("spec")), "template.spec"), *_unconfined(template)})


def reserved(template: Object) -> list[str]:
    """Paths of what no template may set, whatever the operator's flags: labels and annotations by which Penstock knows its
    replicas, the grace period, which follows from `drainTimeout`, and the engine's arguments, which follow from the fields."""
    metadata = _map(template.get("metadata"))
    paths = [
        f"template.metadata.{field}[{name}]"
        for field in ("labels", "annotations")
        for name in _map(metadata.get(field))
        if name.startswith(OWN_LABELS)
    ]
    if "terminationGracePeriodSeconds" in _map(template.get("spec")):
        paths.append("template.spec.terminationGracePeriodSeconds (use drainTimeout)")
    for container in _maps(_map(template.get("spec")).get("containers")):
        if container.get("name") == "engine" and "args" in container:
            paths.append("template.spec.containers[engine].args (use engine.extraArgs)")
    return paths


def _unconfined(template: Object) -> Iterator[str]:
    """The annotations that did what `appArmorProfile` does, and still do."""
    for name, profile in _map(_map(template.get("metadata")).get("annotations")).items():
        if name.startswith(_APPARMOR) and profile == "unconfined":
            yield f"template.metadata.annotations[{name}]"


def _pod(spec: Object, path: str) -> Iterator[str]:
    for name in _POD:
        if spec.get(name):
            yield f"{path}.{name}"
    yield from _context(_map(spec.get("securityContext")), f"{path}.securityContext")
    for volume in _maps(spec.get("volumes")):
        name = f"{path}.volumes[{volume.get('name')}]"
        if "hostPath" in volume:
            yield f"{name}.hostPath"
        if any("serviceAccountToken" in source for source in _maps(_map(volume.get("projected")).get("sources"))):
            yield f"{name}.projected.serviceAccountToken"
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in _maps(spec.get(kind)):
            yield from _container(container, f"{path}.{kind}[{container.get('name')}]")


def _container(container: Object, path: str) -> Iterator[str]:
    context = _map(container.get("securityContext"))
    yield from _context(context, f"{path}.securityContext")
    if _map(context.get("capabilities")).get("add"):
        yield f"{path}.securityContext.capabilities.add"
    for port in _maps(container.get("ports")):
        if port.get("hostPort"):
            yield f"{path}.ports[{port.get('containerPort')}].hostPort"

    handlers = {name: container.get(name) for name in _PROBES}
    handlers |= {f"lifecycle.{name}": _map(container.get("lifecycle")).get(name) for name in _HOOKS}
    for name, handler in handlers.items():
        for kind in ("httpGet", "tcpSocket"):
            if _map(_map(handler).get(kind)).get("host"):  # the kubelet asks it, from the node's network
                yield f"{path}.{name}.{kind}.host"


def _context(context: Object, path: str) -> Iterator[str]:
    for name in _CONTEXT:
        if context.get(name):
            yield f"{path}.{name}"
    for profile in ("seccompProfile", "appArmorProfile"):
        if _map(context.get(profile)).get("type") == "Unconfined":
            yield f"{path}.{profile}"


def _map(value: Any) -> Object:
    return cast(Object, value) if isinstance(value, dict) else {}


def _maps(value: Any) -> list[Object]:
    return [_map(item) for item in cast(list[Any], value)] if isinstance(value, list) else []
