"""The cluster as a person at a terminal has it: with their own rights, in the namespace of their kubeconfig."""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient, ApiException

from penstock.api import labels
from penstock.api.fleet import PoolsView
from penstock.kube.client import PODS, Resource, connect, get, list_all, usual_namespace
from penstock.operator.api import ServerApi
from penstock.operator.objects import Object, Pod, as_pods
from penstock.operator.pods import is_live

GATEWAYS: Final = "app.kubernetes.io/name=penstock-gateway"
MANAGER: Final = "kubectl-penstock"
"""Field manager of what a person sets with these commands."""

FORBIDDEN: Final = 403
NOT_FOUND: Final = 404


@dataclass(frozen=True)
class Gateways:
    """What the gateways say."""

    asked: int
    views: list[PoolsView]
    """Views of the gateways that answered."""


@dataclass(frozen=True)
class Cluster:
    """One API server, and where to look."""

    client: ApiClient
    namespace: str | None
    """None: all."""

    @property
    def api(self) -> ServerApi:
        """Single objects."""
        return ServerApi(self.client)

    async def listed(self, resource: Resource, selector: str = "", *, optional: bool = False) -> list[Object]:
        """The objects with these labels in the namespace.

        Args:
            optional: A kind of a CRD of others, which the server may not know, or this person not see: then there is none.
        """
        return await self.listed_in(self.namespace, resource, {"labelSelector": selector} if selector else {}, optional=optional)

    async def listed_in(
        self, namespace: str | None, resource: Resource, query: dict[str, str], *, optional: bool = False
    ) -> list[Object]:
        """The same anywhere, by any selector."""
        try:
            return (await list_all(self.client, resource.path(namespace), query))[0]
        except ApiException as error:
            if optional and error.status in (FORBIDDEN, NOT_FOUND):
                return []
            raise

    async def gateways(self, options: argparse.Namespace) -> Gateways:
        """Asks every gateway for `/pools`, by way of the API server: that needs the right to `get` `pods/proxy` there."""
        query = {"labelSelector": GATEWAYS}
        pods = [it for it in as_pods(await self.listed_in(options.system_namespace, PODS, query)) if is_live(it)]
        views = await asyncio.gather(*(self._view(pod, options.gateway_http_port) for pod in pods))
        return Gateways(len(pods), [view for view in views if view is not None])

    async def _view(self, pod: Pod, port: int) -> PoolsView | None:
        """None: it does not answer."""
        meta = pod["metadata"]
        place = f"{PODS.path(meta['namespace'])}/{meta['name']}:{port}/proxy/pools"
        try:
            async with await get(self.client, place, {}, aiohttp.ClientTimeout(total=5)) as response:
                return msgspec.json.decode(await response.read(), type=PoolsView)
        except ApiException as error:
            if error.status == FORBIDDEN:
                raise
            return None
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):
            return None


@contextlib.asynccontextmanager
async def connected(options: argparse.Namespace) -> AsyncIterator[Cluster]:
    """The cluster that the flags name.

    Raises:
        NoApiServer: no way to reach an API server is configured.
    """
    client = await connect(options.kubeconfig, options.context)
    everywhere = getattr(options, "all_namespaces", False)
    namespace = None if everywhere else options.namespace or usual_namespace(options.kubeconfig, options.context)
    try:
        yield Cluster(client, namespace)
    finally:
        await client.close()


def selector_of(model: str | None) -> str:
    """Labels of everything that was made for a model, or for any."""
    return f"{labels.MODEL}={model}" if model else labels.MODEL
