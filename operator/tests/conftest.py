"""Resources and pods to test with, and an API server that keeps objects in memory."""

from collections.abc import Callable
from typing import Any

import pytest
from kubernetes.aio.client import ApiException
from operator_world import World

from penstock.api.resources import InferenceModel
from penstock.kube.cache import Change
from penstock.operator.api import CHILDREN, WORKLOADS
from penstock.operator.desired import Rendering
from penstock.operator.store import Children, Key, trimmed_workload

Object = dict[str, Any]


class Factory:
    """Makes test objects."""

    rendering = Rendering(image="penstock/engine:test")

    def resource(self, name: str = "tiny", generation: int = 1, uid: str = "", **changes: Any) -> Object:
        """An InferenceModel as the API server gives it."""
        spec: Object = {"served": {"name": name}, "source": {"uri": "/models/tiny"}, "pools": [{"name": "main"}], **changes}
        meta = {
            "name": name,
            "namespace": "default",
            "uid": uid or f"uid-{name}",
            "generation": generation,
            "resourceVersion": "1",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        return {"apiVersion": "penstock.dev/v1alpha1", "kind": "InferenceModel", "metadata": meta, "spec": spec}

    def model(self, **changes: Any) -> InferenceModel:
        """The same, parsed."""
        return InferenceModel.parse(self.resource(**changes))

    def pod(self, name: str = "p", revision: str = "r1", pool: str = "main", model: str = "tiny", **status: Any) -> Object:
        """A running pod that is not ready, with more in its status."""
        labels = {"penstock.dev/model": model, "penstock.dev/pool": pool, "penstock.dev/revision": revision}
        meta = {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "labels": labels,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": {"phase": "Running", **status}}

    def ready_pod(self, name: str = "p", **fields: Any) -> Object:
        """A pod that is ready."""
        return self.pod(name, conditions=[{"type": "Ready", "status": "True"}], **fields)

    def crashed_pod(
        self, name: str = "p", message: str = "it broke", waiting: bool = True, exit_code: int = 1, **fields: Any
    ) -> Object:
        """A pod whose engine ended with an error; between two tries it waits or runs."""
        ended = {"terminated": {"exitCode": exit_code, "reason": "Error", "message": f"INFO loading\n{message}\n"}}
        state = {"waiting": {"reason": "CrashLoopBackOff"}} if waiting else {"running": {}}
        container = {"name": "engine", "ready": False, "state": state, "lastState": ended}
        return self.pod(name, containerStatuses=[container], **fields)


@pytest.fixture
def make() -> Factory:
    return Factory()


class FakeApi:
    """`Api` in memory: objects with versions, generations and owners of `replicas`; children are told at once."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.calls: list[tuple[str, str, str]] = []
        """(verb, kind, name), events aside."""
        self.posted: list[Object] = []
        """Events."""
        self.told: list[Object] = []
        """Events of others."""
        self.refuse: dict[str, ApiException] = {}
        """By kind: what an apply is answered with."""
        self.children: Children | None = None
        self._version = 100

    def put(self, body: Object) -> None:
        """Places an object as somebody else would."""
        self._store(body)

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        return self.objects.get((kind, namespace, name))

    async def apply(self, body: Object, manager: str, subresource: str = "") -> Object:
        if error := self.refuse.get(body["kind"]):
            raise error
        self.calls.append(("status" if subresource else "apply", body["kind"], body["metadata"]["name"]))
        old = self.objects.get((body["kind"], body["metadata"]["namespace"], body["metadata"]["name"]), {})
        if subresource:
            return self._store({**old, "status": body["status"]})
        merged = {**old, **body, "metadata": {**old.get("metadata", {}), **body["metadata"]}}
        if "spec" in body or "spec" in old:
            merged["spec"] = {**old.get("spec", {}), **body.get("spec", {})}
        owners = {entry["manager"] for entry in merged["metadata"].get("managedFields", [])}
        owners = owners | {manager} if "replicas" in body.get("spec", {}) else owners - {manager}
        if body["kind"] in WORKLOADS:
            if not owners:
                merged["spec"]["replicas"] = 1  # what becomes of a field without an owner
            fields = {"f:spec": {"f:replicas": {}}}
            merged["metadata"]["managedFields"] = [{"manager": it, "fieldsV1": fields} for it in sorted(owners)]
        return self._store(merged)

    async def delete(self, body: Object) -> None:
        self.calls.append(("delete", body["kind"], body["metadata"]["name"]))
        key = (body["kind"], body["metadata"]["namespace"], body["metadata"]["name"])
        self._tell(key, self.objects.pop(key), None)

    async def create(self, body: Object) -> Object:
        if body["kind"] == "Event":
            self.posted.append(body)
            return body
        return self._store(body)

    async def events(self, namespace: str, kind: str, name: str | None = None) -> list[Object]:
        abouts = ((it["involvedObject"], it) for it in self.told)
        return [it for about, it in abouts if about["kind"] == kind and name in (None, about["name"])]

    async def replace(self, body: Object) -> Object:
        key = (body["kind"], body["metadata"]["namespace"], body["metadata"]["name"])
        if self.objects[key]["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            raise ApiException(status=409, reason="Conflict")
        return self._store(body)

    def _store(self, body: Object) -> Object:
        key = (body["kind"], body["metadata"]["namespace"], body["metadata"]["name"])
        old = self.objects.get(key)
        self._version += 1
        generation = old["metadata"].get("generation", 1) if old else body["metadata"].get("generation", 1)
        if old is not None and old.get("spec") != body.get("spec"):
            generation += 1
        uid = body["metadata"].get("uid") or f"uid-{self._version}"
        meta = {**body["metadata"], "uid": uid, "generation": generation, "resourceVersion": str(self._version)}
        self.objects[key] = {**body, "metadata": meta}
        self._tell(key, old, self.objects[key])
        return self.objects[key]

    def _tell(self, key: tuple[str, str, str], old: Object | None, new: Object | None) -> None:
        kind, namespace, name = key
        if self.children is not None and kind in (*CHILDREN, "Pod"):
            if kind in WORKLOADS and new is not None:
                new = trimmed_workload(new)
            labelled = [it for it in (old, new) if it is not None and "penstock.dev/model" in it["metadata"].get("labels", {})]
            if labelled:
                self.children.observe(kind, Change((namespace, name), old, new))


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture(scope="session")
def new_world() -> Callable[[], World]:
    """Makes worlds, for tests that need many."""
    return lambda: World(FakeApi(), Factory())


@pytest.fixture
def key() -> Key:
    return Key("InferenceModel", "default", "tiny")
