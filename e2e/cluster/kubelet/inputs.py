"""What a pod is given: the environment of its containers and the files of its volumes."""

import base64
import os
import re
from collections.abc import Mapping

from e2e.cluster import network
from e2e.cluster.kubelet.api import Api, ApiError, Object


def expand(text: str, environment: Mapping[str, str]) -> str:
    """Kubernetes' `$(NAME)`; a name that is not set stays as it is, and `$$(NAME)` is a literal `$(NAME)`."""
    pattern = r"\$(\$\([\w.-]+\))|\$\(([\w.-]+)\)"
    return re.sub(pattern, lambda match: match[1] or environment.get(match[2], match[0]), text)


class Inputs:
    """The inputs of one pod. Methods raise ValueError for what is missing or not supported, ApiError when the server refuses."""

    def __init__(self, api: Api, pod: Object, address: str, node: str, host_address: str, base: Mapping[str, str]) -> None:
        """`base` is the environment that every container starts from, as an image's would be."""
        self.api, self.pod, self.address, self.node, self.host_address, self.base = api, pod, address, node, host_address, base
        self.namespace, self.name, self.uid = (pod["metadata"][key] for key in ("namespace", "name", "uid"))
        self.host_name: str = pod["spec"].get("hostname", self.name)

    def files(self, source: Object) -> dict[str, bytes]:
        """What a volume, or one part of a projected volume, puts into its folder, by path."""
        match source:
            case {"projected": {"sources": parts}}:
                return {path: data for part in parts for path, data in self.files(part).items()}
            case {"serviceAccountToken": token}:
                return {token["path"]: self._token(token)}
            case {"downwardAPI": {"items": items}}:
                return {item["path"]: self.field(item["fieldRef"]["fieldPath"]).encode() for item in items}
            case {"configMap": reference}:
                return self._chosen(reference, self._data("configmaps", reference["name"], reference.get("optional", False)))
            case {"secret": reference}:
                name = reference.get("secretName") or reference["name"]  # a volume says secretName, a projection name
                return self._chosen(reference, self._data("secrets", name, reference.get("optional", False)))
        raise ValueError(f"a volume of a kind that this node does not support: {sorted(source)}")

    def claimed(self, name: str) -> Object:
        """The hostPath of the volume that a claim is bound to."""
        claim = self.api.get(f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims/{name}")
        if not (volume := claim["spec"].get("volumeName")):
            raise ValueError(f"claim {name} is not bound")
        spec = self.api.get(f"/api/v1/persistentvolumes/{volume}")["spec"]
        if "hostPath" not in spec:
            raise ValueError(f"volume {volume} is of a kind that this node does not support")
        return spec["hostPath"]

    def environment(self, container: Object) -> dict[str, str]:
        result = dict(self.base)
        result |= {
            "HOSTNAME": self.host_name,
            "KUBERNETES_SERVICE_HOST": network.GATEWAY,
            "KUBERNETES_SERVICE_PORT": str(self.api.port),
        }
        for source in container.get("envFrom", []):
            plural, reference = _reference(source, "configMapRef", "secretRef")
            data = self._data(plural, reference["name"], reference.get("optional", False))
            result |= {source.get("prefix", "") + key: value.decode() for key, value in data.items()}
        for variable in container.get("env", []):
            value = self._value(variable, result)
            if value is not None:
                result[variable["name"]] = value
        return result

    def field(self, path: str) -> str:
        """A fieldRef's value."""
        metadata, keyed = self.pod["metadata"], re.fullmatch(r"metadata\.(labels|annotations)(?:\['(.+)'\])?", path)
        if keyed:
            pairs = metadata.get(keyed[1], {})
            return pairs.get(keyed[2], "") if keyed[2] else "\n".join(f'{key}="{value}"' for key, value in sorted(pairs.items()))
        known = {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "metadata.uid": self.uid,
            "status.podIP": self.address,
            "status.podIPs": self.address,
            "status.hostIP": self.host_address,
            "status.hostIPs": self.host_address,
            "spec.nodeName": self.node,
            "spec.serviceAccountName": self.pod["spec"].get("serviceAccountName", ""),
        }
        if path not in known:
            raise ValueError(f"fieldPath {path} is not supported by this node")
        return known[path]

    def _value(self, variable: Object, environment: Mapping[str, str]) -> str | None:
        """None: an optional key that is not there leaves its variable unset."""
        source = variable.get("valueFrom")
        if not source:
            return expand(variable.get("value", ""), environment)
        if "fieldRef" in source:
            return self.field(source["fieldRef"]["fieldPath"])
        if "resourceFieldRef" in source:
            return _own_resource(source["resourceFieldRef"])
        plural, reference = _reference(source, "configMapKeyRef", "secretKeyRef")
        optional = reference.get("optional", False)
        data = self._data(plural, reference["name"], optional)
        if reference["key"] not in data:
            if optional:
                return None
            raise ValueError(f"{plural} {reference['name']} has no key {reference['key']}")
        return data[reference["key"]].decode()

    def _token(self, wanted: Object) -> bytes:
        bound = {"kind": "Pod", "apiVersion": "v1", "name": self.name, "uid": self.uid}
        spec = {"expirationSeconds": wanted.get("expirationSeconds", 3600), "boundObjectRef": bound}
        spec["audiences"] = [wanted["audience"]] if "audience" in wanted else []
        account = self.pod["spec"].get("serviceAccountName", "default")
        answer = self.api.post(f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{account}/token", {"spec": spec})
        return answer["status"]["token"].encode()

    def _chosen(self, reference: Object, data: dict[str, bytes]) -> dict[str, bytes]:
        """Under the paths that `items` names, if it does."""
        if "items" not in reference:
            return data
        missing = [item["key"] for item in reference["items"] if item["key"] not in data]
        if missing and not reference.get("optional", False):
            raise ValueError(f"references non-existent key: {', '.join(missing)}")
        return {item["path"]: data[item["key"]] for item in reference["items"] if item["key"] in data}

    def _data(self, plural: str, name: str, optional: bool) -> dict[str, bytes]:
        """The data of a ConfigMap or Secret."""
        try:
            found = self.api.get(f"/api/v1/namespaces/{self.namespace}/{plural}/{name}")
        except ApiError as problem:
            if optional and problem.status == 404:
                return {}
            raise ValueError(str(problem)) from problem
        plain, encoded = (
            ({}, found.get("data", {})) if plural == "secrets" else (found.get("data", {}), found.get("binaryData", {}))
        )
        return {key: value.encode() for key, value in plain.items()} | {
            key: base64.b64decode(value) for key, value in encoded.items()
        }


def _own_resource(reference: Object) -> str:
    """What a resourceFieldRef gives a container without limits, as there are none here: what the machine has."""
    match reference["resource"].rpartition(".")[2]:
        case "cpu":
            return str(os.cpu_count())
        case "memory":
            return str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        case other:
            raise ValueError(f"resourceFieldRef {other} is not supported by this node")


def _reference(source: Object, config_map: str, secret: str) -> tuple[str, Object]:
    """(plural, reference) of a source that names either."""
    if config_map in source:
        return "configmaps", source[config_map]
    if secret in source:
        return "secrets", source[secret]
    raise ValueError(f"an environment source that this node does not support: {sorted(source)}")
