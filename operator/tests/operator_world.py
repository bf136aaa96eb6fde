"""An operator's parts around an API server in memory."""

from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from penstock.kube.cache import Change
from penstock.operator.adapters.plan import Action, Origin
from penstock.operator.canary.judges import Judges
from penstock.operator.cluster import Cluster
from penstock.operator.handlers import ResourceWatch
from penstock.operator.observe import Reports
from penstock.operator.observed import LoadTimes, ScalingStatus
from penstock.operator.other_scalers import OtherScalers
from penstock.operator.reconciler import Reconciler
from penstock.operator.replicas import ReplicaError, StillLoading
from penstock.operator.routes import Routing
from penstock.operator.store import Children, Key, Resources


def there(resource: dict[str, Any]) -> Change:
    """A watch tells of an object."""
    return Change((resource["metadata"]["namespace"], resource["metadata"]["name"]), None, resource)


def gone(resource: dict[str, Any]) -> Change:
    """A watch tells of an object's end."""
    return Change((resource["metadata"]["namespace"], resource["metadata"]["name"]), resource, None)


class FakeReplicas:
    """Replicas that keep what they are told; `refuse` by adapter, `down` and `slow` by address."""

    def __init__(self) -> None:
        self.scheme = "http"
        self.there: dict[str, dict[str, Origin]] = {}
        self.refuse: dict[str, str] = {}
        self.down: set[str] = set()
        self.slow: set[str] = set()
        self.loads: dict[str, LoadTimes] = {}
        self.asked: list[str] = []
        """Addresses that were asked how long they loaded."""
        self.told: list[tuple[str, str, str]] = []
        """(verb, adapter, address)."""

    async def adapters(self, base: str) -> dict[str, Origin]:
        if base in self.down:
            raise ReplicaError("no answer in 5 s")
        return dict(self.there.setdefault(base, {}))

    async def load_times(self, base: str) -> LoadTimes:
        self.asked.append(base)
        if base in self.down:
            raise ReplicaError("no answer in 5 s")
        return self.loads.get(base, LoadTimes())

    async def carry_out(self, base: str, action: Action) -> None:
        self.told.append((action.verb, action.name, base))
        if base in self.slow:
            raise StillLoading
        if action.origin is None:
            del self.there[base][action.name]
        elif action.name in self.refuse:
            raise ReplicaError(self.refuse[action.name])
        else:
            self.there[base][action.name] = action.origin


class World:
    """An operator's parts around an API server in memory."""

    def __init__(self, api: Any, make: Any) -> None:
        self.api, self.make = api, make
        self.resources = Resources()
        self.queued: list[Key] = []
        self.looks: list[tuple[Key, float]] = []
        self.absent: set[str] = set()
        self.going: frozenset[str] | None = None
        self.routing = Routing(asked=2, answered=2)
        self.children = Children(self.queued.append)
        api.children = self.children
        self.reports: dict[str, ScalingStatus] = {}
        self.others = OtherScalers(lambda namespace: None)
        self.replicas = FakeReplicas()
        self.now = 0.0
        self.judges = Judges(lambda model: self.queued.append(Key("InferenceModel", *model.split("/"))), lambda: self.now)
        self.reconciler = self.new_reconciler()
        self.watch = ResourceWatch(self.resources, self.queued.append)

    def new_reconciler(self, **rendering: Any) -> Reconciler:
        """A reconciler with other flags of the operator, and metrics of its own."""
        self.registry = CollectorRegistry()
        return Reconciler(
            cluster=Cluster(
                self.api, self.resources, self.children, going=lambda: self.going, absent=lambda kind: kind in self.absent
            ),
            rendering=replace(self.make.rendering, **rendering),
            reports=Reports(
                self.reports.get, lambda key, pools: self.routing, self.judges.follow, self.others.of, url="http://gw/v1"
            ),
            replicas=self.replicas,
            later=lambda key, delay: self.looks.append((key, delay)),
            registry=self.registry,
        )

    async def apply(self, resource: dict[str, Any]) -> None:
        """A user applies a resource."""
        key = (resource["kind"], resource["metadata"]["namespace"], resource["metadata"]["name"])
        old = self.api.objects.get(key, {})
        status = {"status": old["status"]} if "status" in old else {}
        self.api.put({**resource, **status})
        self.watch.heard("MODIFIED", self.api.objects[key])

    async def settle(self, key: Key) -> None:
        """Reconciles until nothing more is done."""
        for _ in range(6):
            before = len(self.api.calls)
            await self.reconciler.reconcile(key)
            if len(self.api.calls) == before:
                return
        raise AssertionError(f"does not come to rest: {self.api.calls[-6:]}")

    def live(self, kind: str, name: str = "") -> dict[str, Any]:
        """An object as the server has it, if not named, the model tiny's."""
        return self.api.objects[kind, "default", name or ("tiny" if kind == "InferenceModel" else "tiny-main")]

    def condition(self, kind: str, name: str = "tiny") -> tuple[str, str, str]:
        """(status, reason, message) of a model's condition."""
        conditions = self.live("InferenceModel", name)["status"]["conditions"]
        found = next(it for it in conditions if it["type"] == kind)
        return found["status"], found["reason"], found["message"]
