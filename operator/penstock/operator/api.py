"""The API server as the operator uses it: plain dicts, server-side apply."""

import asyncio
import json
from typing import Any, Final, Protocol

from kubernetes.aio.client import ApiClient, ApiException

from penstock.api.labels import GROUP, VERSION
from penstock.kube.client import Object, Resource, asked_to_wait

MODELS: Final = Resource(GROUP, VERSION, "inferencemodels")
ADAPTERS: Final = Resource(GROUP, VERSION, "loraadapters")
DEPLOYMENTS: Final = Resource("apps", "v1", "deployments")
REVISIONS: Final = Resource("apps", "v1", "controllerrevisions")
JOBS: Final = Resource("batch", "v1", "jobs")
CLAIMS: Final = Resource("", "v1", "persistentvolumeclaims")
SERVICES: Final = Resource("", "v1", "services")
BUDGETS: Final = Resource("policy", "v1", "poddisruptionbudgets")
NETWORK_POLICIES: Final = Resource("networking.k8s.io", "v1", "networkpolicies")
POD_MONITORS: Final = Resource("monitoring.coreos.com", "v1", "podmonitors")
INFERENCE_POOLS: Final = Resource("inference.networking.k8s.io", "v1", "inferencepools")
HTTP_ROUTES: Final = Resource("gateway.networking.k8s.io", "v1", "httproutes")
LEADER_WORKER_SETS: Final = Resource("leaderworkerset.x-k8s.io", "v1", "leaderworkersets")
PODS: Final = Resource("", "v1", "pods")
AUTOSCALERS: Final = Resource("autoscaling", "v2", "horizontalpodautoscalers")
EVENTS: Final = Resource("", "v1", "events")
NODES: Final = Resource("", "v1", "nodes")
ENDPOINT_SLICES: Final = Resource("discovery.k8s.io", "v1", "endpointslices")
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases")
CRDS: Final = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions")

RESOURCES: Final = {
    "InferenceModel": MODELS,
    "LoraAdapter": ADAPTERS,
    "Deployment": DEPLOYMENTS,
    "ControllerRevision": REVISIONS,
    "Job": JOBS,
    "PersistentVolumeClaim": CLAIMS,
    "Service": SERVICES,
    "PodDisruptionBudget": BUDGETS,
    "NetworkPolicy": NETWORK_POLICIES,
    "PodMonitor": POD_MONITORS,
    "InferencePool": INFERENCE_POOLS,
    "HTTPRoute": HTTP_ROUTES,
    "LeaderWorkerSet": LEADER_WORKER_SETS,
    "EndpointSlice": ENDPOINT_SLICES,
    "Pod": PODS,
    "Event": EVENTS,
    "Lease": LEASES,
    "CustomResourceDefinition": CRDS,
}
WORKLOADS: Final = ("Deployment", "LeaderWorkerSet")
"""Kinds of a pool's workload; a pool has one of them."""
OPTIONAL: Final = ("LeaderWorkerSet", "InferencePool", "HTTPRoute", "PodMonitor")
"""Kinds of CRDs of others: where one is not installed, its objects are not made."""
CHILDREN: Final = (
    "ControllerRevision", "Job", "PersistentVolumeClaim", "Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment",
    *OPTIONAL,
)  # fmt: skip
"""Kinds of objects that a model owns."""
TIMEOUT_S: Final = 30.0
_NO_FAULT_OF_ITS_OWN: Final = (
    "failed to create typed patch object",  # a field that the kind does not have, or of another type
    "etcdserver: request is too large",
    "failed calling webhook",
)
"""What servers say with the status 500, as if they had broken, of what will not be taken however often it is sent."""
ATTEMPTS: Final = 8
"""Attempts of a request that an overloaded server answers with Retry-After. Without this, a series of many requests would restart
at each refusal and never end."""


class Api(Protocol):
    """What the reconciler needs of an API server. All methods raise ApiException where the server refuses, and
    aiohttp.ClientError or TimeoutError where it does not answer."""

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """The object, or None where there is none; `namespace` None for what is in no namespace."""
        ...

    async def apply(self, body: Object, manager: str, subresource: str = "") -> Object:
        """Apply on the server by a field manager that takes fields from others. Return the resulting object."""
        ...

    async def delete(self, body: Object) -> None:
        """Deletes exactly this object (by UID); gone already is fine."""
        ...

    async def create(self, body: Object) -> Object:
        """Creates an object, such as an Event."""
        ...

    async def events(self, namespace: str, kind: str, name: str | None = None) -> list[Object]:
        """The Events about objects of a kind, or about one of them."""
        ...

    async def replace(self, body: Object) -> Object:
        """Replaces an object if it still has the body's resource version; else the error's status is 409."""
        ...


class Refused(ApiException):
    """The server's refusal in one line; the client's own text has several."""

    def __str__(self) -> str:
        return f"{self.status}: {said(self)}"


class ServerApi:
    """`Api` over a connection."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        try:
            return await self._call("GET", f"{RESOURCES[kind].path(namespace)}/{name}")
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    async def apply(self, body: Object, manager: str, subresource: str = "") -> Object:
        meta = body["metadata"]
        path = f"{RESOURCES[body['kind']].path(meta['namespace'])}/{meta['name']}"
        query = {"fieldManager": manager, "force": "true", "fieldValidation": "Strict"}
        return await self._call(
            "PATCH", f"{path}/{subresource}" if subresource else path, query, body, "application/apply-patch+yaml"
        )

    async def delete(self, body: Object) -> None:
        meta = body["metadata"]
        options = {"preconditions": {"uid": meta["uid"]}, "propagationPolicy": "Background"}
        try:
            await self._call("DELETE", f"{RESOURCES[body['kind']].path(meta['namespace'])}/{meta['name']}", {}, options)
        except ApiException as error:
            if error.status not in (404, 409):  # gone, or another object by now
                raise

    async def create(self, body: Object) -> Object:
        return await self._call("POST", RESOURCES[body["kind"]].path(body["metadata"]["namespace"]), {}, body)

    async def replace(self, body: Object) -> Object:
        meta = body["metadata"]
        return await self._call("PUT", f"{RESOURCES[body['kind']].path(meta['namespace'])}/{meta['name']}", {}, body)

    async def evict(self, namespace: str, name: str, uid: str) -> None:
        """Deletes a pod if it is this one and its PodDisruptionBudget allows it; else the error's status is 409 or 429."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        await self._call("POST", f"{PODS.path(namespace)}/{name}/eviction", {}, body)

    async def cordon(self, node: str, cordoned: bool) -> None:
        """Says whether new pods may go to a node."""
        body = {"spec": {"unschedulable": cordoned}}
        await self._call("PATCH", f"{NODES.path(None)}/{node}", {}, body, "application/merge-patch+json")

    async def own_account(self, namespace: str) -> Object | None:
        """A reference to the ServiceAccount that we are, if we are one of that namespace and may ask who we are."""
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        try:
            answer = await self._call("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", {}, review)
        except ApiException as error:
            if error.status in (403, 404):
                return None
            raise
        user = answer["status"]["userInfo"]
        prefix = f"system:serviceaccount:{namespace}:"
        if not user["username"].startswith(prefix) or not user.get("uid"):
            return None
        name = user["username"].removeprefix(prefix)
        return {"apiVersion": "v1", "kind": "ServiceAccount", "name": name, "uid": user["uid"]}

    async def listed(self, kind: str, namespace: str, selector: str) -> list[Object]:
        """The objects of a kind with these labels."""
        return list((await self._call("GET", RESOURCES[kind].path(namespace), {"labelSelector": selector}))["items"])

    async def events(self, namespace: str, kind: str, name: str | None = None) -> list[Object]:
        about = f"involvedObject.kind={kind}" + (f",involvedObject.name={name}" if name is not None else "")
        return list((await self._call("GET", EVENTS.path(namespace), {"fieldSelector": about}))["items"])

    async def proxied(self, namespace: str, service: str, path: str) -> Object:
        """What a Service (`NAME:PORT`) answers with JSON, by way of the API server."""
        return await self._call("GET", f"/api/v1/namespaces/{namespace}/services/{service}/proxy{path}")

    async def _call(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Object:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        request = await self._client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        attempt = 1
        while True:
            response = (await self._client.call_api(*request, _request_timeout=TIMEOUT_S)).response
            data = await response.read()
            if response.status < 300:
                return json.loads(data)
            error = Refused(status=response.status, reason=response.reason, body=data.decode(errors="replace"))
            error.headers = response.headers
            pause_s = asked_to_wait(error)
            if pause_s is None or attempt == ATTEMPTS:
                raise error
            attempt += 1
            await asyncio.sleep(pause_s)


def refuses(error: ApiException) -> bool:
    """Whether the server says no to what it was given, rather than that it cannot answer now."""
    if error.status == 500:
        return any(words in said(error) for words in _NO_FAULT_OF_ITS_OWN)
    return error.status is not None and 400 <= error.status < 500 and error.status not in (409, 429)


def said(error: ApiException) -> str:
    """The server's own sentence."""
    try:
        return str(json.loads(error.body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.status} {error.reason}"
