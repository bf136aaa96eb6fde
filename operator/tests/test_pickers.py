"""Where the Services of pickers in the users' namespaces lead."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from kubernetes.aio.client import ApiException

from penstock.api.fleet import PoolsView
from penstock.operator.objects import Object, as_pods
from penstock.operator.pickers.plan import Plan, active, planned, ports_of
from penstock.operator.pickers.sync import Pickers


def gateway(number: int, ready: bool = True, address: str = "", **metadata: Any) -> Object:
    conditions = [{"type": "Ready", "status": str(ready)}]
    status = {"phase": "Running", "podIP": address or f"10.0.0.{number}", "conditions": conditions}
    return {"metadata": {"name": f"penstock-gateway-{number}", **metadata}, "status": status}


def service(name: str = "picker", selector: dict[str, str] | None = None, **ports: int) -> Object:
    spec = {"ports": [{"name": it, "port": port} for it, port in (ports or {"grpc": 9002}).items()], "ipFamilies": ["IPv4"]}
    meta = {"name": name, "namespace": "team", "uid": f"uid-{name}"}
    return {"metadata": meta, "spec": spec | ({"selector": selector} if selector else {})}


def pool(name: str, picker: str = "picker", port: int = 9002, created: int = 1, namespace: str = "team") -> Object:
    meta = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "creationTimestamp": f"2026-01-01T00:00:0{created}Z"}
    return {"metadata": meta, "spec": {"endpointPickerRef": {"name": picker, "port": {"number": port}}}}


def leads_to(plan: Plan) -> list[tuple[str, list[str], dict[str, int]]]:
    """Each slice's name, addresses, and ports by the names that they have at the Service."""
    return [
        (it["metadata"]["name"], [at for point in it["endpoints"] for at in point["addresses"]], ports)
        for it in plan.slices
        for ports in [{port["name"]: port["port"] for port in it["ports"]}]
    ]


ZERO = as_pods([gateway(0)])[0]


def test_a_service_leads_to_the_active_gateway_on_the_ports_of_its_pools() -> None:
    ports = {"team/a": 9101, "team/b": 9102, "other/a": 9103}
    pools = [pool("a"), pool("b", port=9003), pool("a", namespace="other"), pool("c", picker="somebody")]
    plan = planned([service(one=9002, two=9003)], pools, ZERO, ports)
    assert leads_to(plan) == [("picker-penstock-ipv4", ["10.0.0.0"], {"one": 9101, "two": 9102})] and not plan.faults
    (made,) = plan.slices
    assert made["metadata"]["labels"]["kubernetes.io/service-name"] == "picker" and made["addressType"] == "IPv4"
    assert [it["uid"] for it in made["metadata"]["ownerReferences"]] == ["uid-picker"]
    assert leads_to(planned([service()], pools, None, ports)) == [("picker-penstock-ipv4", [], {"grpc": 9101})]
    six = as_pods([gateway(0, address="fd00::7")])[0]
    assert leads_to(planned([service()], pools, six, ports)) == [("picker-penstock-ipv6", ["fd00::7"], {"grpc": 9101})]
    assert leads_to(planned([service()], [], ZERO, ports)) == []  # the pool has gone, and the slice goes
    assert leads_to(planned([service()], [pool("new")], ZERO, ports)) == []  # no gateway has seen it


def test_the_active_gateway_is_the_first_that_is_ready_and_tells_the_ports() -> None:
    pods = [gateway(10), gateway(2), gateway(1, ready=False), gateway(0, deletionTimestamp="2026-01-01T00:00:00Z")]
    found = active(as_pods(pods))
    assert found is not None and found["metadata"]["name"] == "penstock-gateway-2"
    assert active(as_pods([gateway(0, ready=False)])) is None
    told = {"penstock-gateway-1": {"team/a": 1}, "penstock-gateway-2": {"team/a": 2}}
    assert ports_of(as_pods(pods), told) == {"team/a": 2}
    assert ports_of(as_pods([gateway(0), gateway(1, ready=False)]), told) == {"team/a": 1}
    assert ports_of(as_pods([gateway(0)]), told) is None


def test_what_cannot_be_meant_is_said_of_the_object_that_is_wrong() -> None:
    ports = {"team/a": 9101, "team/b": 9102}
    pools = [pool("b", created=2), pool("a", created=1), pool("c", port=80)]
    plan = planned([service()], pools, ZERO, ports)
    assert leads_to(plan) == [("picker-penstock-ipv4", ["10.0.0.0"], {"grpc": 9101})]
    said = {item["metadata"]["name"]: (reason, words) for item, reason, words in plan.faults}
    assert said["b"][0] == "PickerPortTaken" and "port 9002 of Service picker is the picker of a, which is older" in said["b"][1]
    assert said["c"][0] == "PickerPortMissing" and "has no port 80" in said["c"][1] and "it has 9002" in said["c"][1]
    plan = planned([service(selector={"app": "mine"})], pools, ZERO, ports)
    assert not plan.slices and [reason for _, reason, _ in plan.faults] == ["PickerHasSelector"]


class Cached:
    """A cache that holds what it is given."""

    def __init__(self, *items: Object) -> None:
        self.objects = {it["metadata"]["name"]: it for it in items}

    def values(self) -> list[Object]:
        return list(self.objects.values())

    def subscribe(self, callback: Any) -> None:
        """Nothing changes by itself."""


@dataclass
class Known:
    """Stands in for `Watched`."""

    services: Cached
    pools: Cached
    slices: Cached = field(default_factory=Cached)
    gateways: Cached = field(default_factory=lambda: Cached(gateway(0)))


def test_slices_are_written_once_and_deleted_and_those_of_others_left_alone(api: Any) -> None:
    known: Any = Known(Cached(service(), service("other")), Cached(pool("a"), pool("b", picker="other"), pool("c", port=80)))
    others = {"kind": "EndpointSlice", "metadata": {"name": "other-penstock-ipv4", "namespace": "team"}}
    api.put(others)
    pickers = Pickers(api, known)

    async def course() -> None:
        assert await pickers.sync() and not api.calls  # no gateway has told its ports: nothing is judged
        pickers.told(
            [PoolsView(gateway="penstock-gateway-0", version=1, pools=[], inference_pools={"team/a": 1, "team/b": 2})], 1
        )
        api.refuse["EndpointSlice"] = ApiException(status=500, reason="away")
        assert not await pickers.sync()  # to be tried again
        api.refuse.clear()
        for _ in range(2):
            assert await pickers.sync()
            made = api.objects["EndpointSlice", "team", "picker-penstock-ipv4"]
            known.slices = Cached(made)
        assert [it["involvedObject"]["name"] for it in api.posted] == ["c"]
        known.pools = Cached()
        assert await pickers.sync()

    asyncio.run(course())
    assert api.calls == [(verb, "EndpointSlice", "picker-penstock-ipv4") for verb in ("apply", "delete")]
    assert api.objects["EndpointSlice", "team", "other-penstock-ipv4"]["metadata"].keys() >= others["metadata"].keys()
