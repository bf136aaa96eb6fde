"""What kopf does here: it watches the users' resources, and says that something happened. No handler keeps state on an object.

kopf runs in a thread with an event loop of its own: at its end it cancels every task of its loop, whoever made it.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import kopf
from kubernetes.aio.client import ApiClient

from penstock.operator.api import ADAPTERS, MODELS
from penstock.operator.store import Key, Object, Resources, key_of


class ResourceWatch:
    """Keeps `resources` current, and tells `changed` which keys to look at."""

    def __init__(self, api: ApiClient, resources: Resources, changed: Callable[[Key], None]) -> None:
        """
        Args:
            api: Its credentials are kopf's too.
            changed: Called on the event loop that runs `run`.
        """
        self._api = api
        self._resources = resources
        self._changed = changed

    def seen(self, kind: str | None, resource: Object) -> None:
        """Takes one event of the watch in; `kind` is None for what the first list holds."""
        key = key_of(resource)
        affected = {key, *self._resources.rivals(key)}
        if kind == "DELETED":
            self._resources.drop(key)
        else:
            self._resources.put(resource)
        # A name that was given up is free for those who wanted it too.
        for one in affected | set(self._resources.rivals(key)):
            self._changed(one)

    async def run(self, namespace: str | None) -> None:
        """Watches one namespace, or (None) all, until cancelled."""
        stop = threading.Event()
        loop = asyncio.get_running_loop()
        operator = kopf.operator(
            registry=self._registry(loop),
            settings=settings(),
            standalone=True,
            stop_flag=stop,
            clusterwide=namespace is None,
            namespaces=[] if namespace is None else [namespace],
        )
        thread = asyncio.create_task(asyncio.to_thread(asyncio.run, operator))
        try:
            await asyncio.shield(thread)
        finally:
            stop.set()
            await asyncio.wait([thread])

    def _registry(self, loop: asyncio.AbstractEventLoop) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        async def login(**_: Any) -> kopf.ConnectionInfo:
            return await connection(self._api)

        async def seen(event: kopf.RawEvent, **_: Any) -> None:
            loop.call_soon_threadsafe(self.seen, event["type"], dict(event["object"]))

        kopf.on.login(registry=registry)(login)
        for resource in (MODELS, ADAPTERS):
            kopf.on.event(resource.group, resource.version, resource.plural, registry=registry)(seen)
        return registry


async def connection(api: ApiClient) -> kopf.ConnectionInfo:
    """The same server and credentials as `api` has. Called again when the server refuses them: tokens of pods are renewed."""
    configuration = api.configuration
    authorization = await configuration.get_api_key_with_prefix("BearerToken")
    scheme, _, token = (authorization or "").partition(" ")
    return kopf.ConnectionInfo(
        server=str(configuration.host),
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        scheme=scheme if token else None,
        token=token or scheme or None,
    )


def settings() -> kopf.OperatorSettings:
    """kopf as a mere watcher: it posts no Events, and needs no right to list namespaces and CRDs."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.scanning.disabled = True
    made.watching.server_timeout = 300
    made.watching.client_timeout = 330
    made.watching.connect_timeout = 30
    return made
