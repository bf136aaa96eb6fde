"""How long replicas took for their weights: one replica of each pool is asked, once for each revision."""

import logging
from typing import Final, Protocol

from penstock.operator.desired.arguments import HTTP
from penstock.operator.objects import Pod
from penstock.operator.observed import LoadTimes
from penstock.operator.pods import argument, base_url, is_ready, revision
from penstock.operator.replicas import ReplicaError
from penstock.operator.store import Children, Key

log = logging.getLogger(__name__)


KIND: Final = "LoadTimes"
"""Kind of the queue key under which a model's replicas are asked for their load times. That can take seconds, and a reconcile
must
not wait for it."""


class LoadClient(Protocol):
    """What is used of `Replicas`."""

    @property
    def scheme(self) -> str: ...
    async def load_times(self, base: str) -> LoadTimes: ...


def load_times_key(model: Key) -> Key:
    """What to queue so that a model's replicas are asked."""
    return Key(KIND, model.namespace, model.name)


class LoadedModels:
    """What replicas have said, by model and revision."""

    def __init__(self, children: Children, replicas: LoadClient) -> None:
        self._children, self._replicas = children, replicas
        self._known: dict[tuple[str, str], dict[str, LoadTimes]] = {}

    def of(self, model: Key, its_revision: str) -> LoadTimes | None:
        """What a replica of a revision has said; None: none was asked yet."""
        return self._known.get((model.namespace, model.name), {}).get(its_revision)

    def asks(self, model: Key) -> bool:
        """Whether a replica is ready of whose revision nothing is known."""
        known = self._known.get((model.namespace, model.name), {})
        return any(is_ready(pod) and revision(pod) not in known for pod in self._children.pods(model))

    def forget(self, model: Key) -> None:
        """A model is gone."""
        self._known.pop((model.namespace, model.name), None)

    async def ask(self, key: Key) -> bool:
        """Asks one ready replica of each revision that is not known; whether anything was learned. Revisions without pods go."""
        model = Key("InferenceModel", key.namespace, key.name)
        pods = self._children.pods(model)
        running = {revision(pod) for pod in pods}
        before = self._known.get((key.namespace, key.name), {})
        known = {its: times for its, times in before.items() if its in running}
        for pod in pods:
            if is_ready(pod) and revision(pod) not in known:
                known[revision(pod)] = await self._asked(pod)
        self._known[key.namespace, key.name] = known
        return known != before

    async def _asked(self, pod: Pod) -> LoadTimes:
        """A replica that does not answer is not asked again: its successor will be."""
        scheme = self._replicas.scheme
        base = base_url(pod, HTTP, scheme)
        if base is None or (scheme == "http" and argument(pod, "--ssl-certfile") is not None):
            return LoadTimes()
        try:
            return await self._replicas.load_times(base)
        except ReplicaError as error:
            log.info(
                "pod %s/%s does not say how long it loaded: %s", pod["metadata"]["namespace"], pod["metadata"]["name"], error
            )
            return LoadTimes()
