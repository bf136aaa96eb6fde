"""The API server as the operator uses it: plain dicts, server-side apply."""

import json
from typing import Any, Final, Protocol

from kubernetes.aio.client import ApiClient, ApiException

from penstock.api.labels import GROUP, VERSION
from penstock.kube.client import Object, Resource

MODELS: Final = Resource(GROUP, VERSION, "inferencemodels")
ADAPTERS: Final = Resource(GROUP, VERSION, "loraadapters")
DEPLOYMENTS: Final = Resource("apps", "v1", "deployments")
SERVICES: Final = Resource("", "v1", "services")
BUDGETS: Final = Resource("policy", "v1", "poddisruptionbudgets")
PODS: Final = Resource("", "v1", "pods")
EVENTS: Final = Resource("", "v1", "events")
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases")

RESOURCES: Final = {
    "InferenceModel": MODELS,
    "LoraAdapter": ADAPTERS,
    "Deployment": DEPLOYMENTS,
    "Service": SERVICES,
    "PodDisruptionBudget": BUDGETS,
    "Pod": PODS,
    "Event": EVENTS,
    "Lease": LEASES,
}
TIMEOUT_S: Final = 30.0


class Api(Protocol):
    """What the reconciler needs of an API server. All methods raise ApiException where the server refuses, and
    aiohttp.ClientError or TimeoutError where it does not answer."""

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """The object, or None where there is none."""
        ...

    async def apply(self, body: Object, manager: str, subresource: str = "") -> Object:
        """Server-side apply by a field manager that takes fields from others; returns the object as it is then."""
        ...

    async def delete(self, body: Object) -> None:
        """Deletes exactly this object (by UID); gone already is fine."""
        ...

    async def create(self, body: Object) -> Object:
        """Creates an object, such as an Event."""
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

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
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

    async def serves(self, group: str, version: str) -> bool:
        """Whether the server knows this version of this API."""
        try:
            await self._call("GET", f"/apis/{group}/{version}")
        except ApiException as error:
            if error.status == 404:
                return False
            raise
        return True

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
        response = (await self._client.call_api(*request, _request_timeout=TIMEOUT_S)).response
        data = await response.read()
        if response.status >= 300:
            raise Refused(status=response.status, reason=response.reason, body=data.decode(errors="replace"))
        return json.loads(data)


def said(error: ApiException) -> str:
    """The server's own sentence."""
    try:
        return str(json.loads(error.body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.status} {error.reason}"
