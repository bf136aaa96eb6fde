"""A connection to the API server, and the raw requests that the cache needs: list and watch as plain dicts, for any resource."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException, Configuration
from kubernetes.aio.config import (
    KUBE_CONFIG_DEFAULT_LOCATION,
    ConfigException,
    list_kube_config_contexts,
    load_incluster_config,
    load_kube_config,
)
from yaml import YAMLError

from penstock.kube.errors import NoApiServer

Object = dict[str, Any]
"""A Kubernetes object as JSON."""

PAGE = 500
"""Objects a list request asks for; kubectl's and client-go's figure."""
PAGE_PAUSE_S = 0.5
"""Before a page is asked for again."""
LONGEST_PAUSE_S = 10.0
"""However long a server asks to be left alone."""


@dataclass(frozen=True)
class Resource:
    """What a path of the API server names."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str

    def path(self, namespace: str | None) -> str:
        """The collection's path, in one namespace or (None) in all."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/{self.plural}" if namespace is None else f"{root}/namespaces/{namespace}/{self.plural}"


PODS = Resource("", "v1", "pods")
POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


async def connect(kubeconfig: str | None = None, context: str | None = None) -> ApiClient:
    """A client with the pod's service account where there is one, else with `kubeconfig` or kubectl's usual file.

    Args:
        context: A context of the file, which is used then even in a pod; None: its current one.

    Raises:
        NoApiServer: none of them can be used.
    """
    configuration = Configuration()
    tried: list[str] = []
    if kubeconfig is None and context is None:
        try:
            load_incluster_config(client_configuration=configuration)
            return ApiClient(configuration)
        except ConfigException as error:
            tried.append(f"a pod's ServiceAccount ({str(error).rstrip('.')})")
    place = kubeconfig or KUBE_CONFIG_DEFAULT_LOCATION
    if not _exists(place):
        tried.append(f"the file {place} (not there)")
        raise NoApiServer(_none_of(tried))
    try:
        await load_kube_config(config_file=place, context=context, client_configuration=configuration)
    except (ConfigException, OSError, YAMLError, TypeError, AttributeError) as error:  # the last two: a file of something else
        tried.append(f"the file {place} ({error!r})")
        raise NoApiServer(_none_of(tried)) from error
    return ApiClient(configuration)


def usual_namespace(kubeconfig: str | None = None, context: str | None = None) -> str:
    """Return the default namespace, as kubectl does: the context's, or the pod's where `connect` uses its ServiceAccount."""
    if kubeconfig is None and context is None and POD_NAMESPACE.is_file() and "KUBERNETES_SERVICE_HOST" in os.environ:
        return POD_NAMESPACE.read_text().strip()
    place = kubeconfig or KUBE_CONFIG_DEFAULT_LOCATION
    if not _exists(place):
        return "default"
    try:
        listed: Any = list_kube_config_contexts(config_file=place)
    except (ConfigException, OSError, YAMLError, TypeError, AttributeError):
        return "default"  # `connect` says what is wrong with the file
    contexts, current = listed
    chosen = next((it for it in contexts if it["name"] == context), current)
    return str(chosen["context"].get("namespace") or "default")


def _exists(kubeconfig: str) -> bool:
    """Whether there is any file of a list as $KUBECONFIG holds it."""
    return any(Path(path).expanduser().is_file() for path in kubeconfig.split(os.pathsep))


def _none_of(tried: list[str]) -> str:
    return f"looked for {' and '.join(tried)}"


async def get(api: ApiClient, path: str, query: dict[str, str], limits: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
    """GETs `path` and returns the open response; the caller releases it.

    Raises:
        ApiException: the server answered with an error.
        aiohttp.ClientError, TimeoutError: no answer.
    """
    request = await api.param_serialize(
        "GET", path, query_params=list(query.items()), header_params={"Accept": "application/json"}, auth_settings=["BearerToken"]
    )
    response = (await api.call_api(*request, _request_timeout=limits)).response
    if response.status != 200:
        body = await response.text()
        error = ApiException(status=response.status, reason=response.reason, body=body)
        error.headers = response.headers
        raise error
    return response


def asked_to_wait(error: ApiException) -> float | None:
    """Return the seconds after which an overloaded server asks to be called again, or None if it does not say."""
    after = (error.headers or {}).get("Retry-After", "")
    return min(float(after), LONGEST_PAUSE_S) if error.status in (429, 503) and after.isdecimal() else None


async def list_all(
    api: ApiClient, path: str, query: dict[str, str], keep: Callable[[Object], Object] = lambda item: item
) -> tuple[list[Object], str]:
    """Every object of a collection, page by page, and the resource version to watch from. Errors are those of `get`.

    Args:
        keep: What is kept of each object, so that only a page is ever there as a whole.
    """
    items: list[Object] = []
    token = ""
    while True:
        answer = await _page(api, path, {**query, "limit": str(PAGE), **({"continue": token} if token else {})})
        # Items of a list carry neither kind nor apiVersion.
        common = {"apiVersion": answer.get("apiVersion"), "kind": str(answer.get("kind", "")).removesuffix("List")}
        items.extend(keep({**common, **item}) for item in answer.get("items") or [])
        token = answer["metadata"].get("continue") or ""
        if not token:
            return items, answer["metadata"]["resourceVersion"]


async def latest_version(api: ApiClient, path: str, query: dict[str, str]) -> str:
    """The resource version that a list of a collection would have now. Errors are those of `get`."""
    return (await _read(api, path, {**query, "limit": "1"}))["metadata"]["resourceVersion"]


async def _page(api: ApiClient, path: str, query: dict[str, str]) -> Object:
    """One page of a list. It is asked for once more where the server cannot answer and pages before it would be lost."""
    pause_s = PAGE_PAUSE_S
    try:
        return await _read(api, path, query)
    except ApiException as error:
        if "continue" not in query or (error.status != 429 and (error.status or 0) < 500):
            raise
        pause_s = asked_to_wait(error) or pause_s
    except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError):
        if "continue" not in query:
            raise
    await asyncio.sleep(pause_s)
    return await _read(api, path, query)


async def _read(api: ApiClient, path: str, query: dict[str, str]) -> Object:
    async with await get(api, path, query, aiohttp.ClientTimeout(total=60)) as response:
        return json.loads(await response.read())


async def watch(api: ApiClient, path: str, query: dict[str, str], silence_s: float) -> AsyncIterator[tuple[str, Object]]:
    """Events (`ADDED`, `MODIFIED`, `DELETED`, `BOOKMARK`) with their objects until the server ends the watch.

    Args:
        query: Selectors, `resourceVersion`, `timeoutSeconds`.
        silence_s: A connection that is silent for so long is taken for dead.

    Raises:
        ApiException: the server refused, or ended the watch with an error; status 410 asks for a new list.
        aiohttp.ClientError, TimeoutError, ValueError: the connection broke, was silent for too long, or spoke nonsense.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=silence_s)
    query = {**query, "watch": "true", "allowWatchBookmarks": "true"}
    async with await get(api, path, query, timeout) as response:
        async for line in response.content:
            event = json.loads(line)
            if event["type"] == "ERROR":
                status = event["object"]
                raise ApiException(status=status.get("code"), reason=status.get("reason"), body=status.get("message"))
            yield event["type"], event["object"]
