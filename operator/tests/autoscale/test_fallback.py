"""Replicas that are asked themselves."""

from penstock.api.load_report import LoadReport
from penstock.operator.autoscale.fallback import ask_replicas
from penstock.operator.autoscale.signals import PoolSignals, ReplicaSignal
from penstock.operator.replicas import ReplicaError

REPORT = LoadReport(epoch=1, seq=7, num_requests_running=3)


class Client:
    """All replicas say the same, but for one that is dead."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def load(self, base: str) -> LoadReport:
        self.asked.append(base)
        if "dead" in base:
            raise ReplicaError("nobody there")
        return REPORT


async def test_without_gateways_every_replica_is_asked_and_what_they_hold_stays_unknown() -> None:
    endpoints = {"a": "http://alive:8000", "d": "http://dead:8000"}
    signals = await ask_replicas(Client(), endpoints, None, 15.0)
    assert signals is not None and not signals.complete
    assert [(r.uid, r.report) for r in signals.replicas] == [("a", REPORT), ("d", None)]
    assert await ask_replicas(Client(), {"d": "http://dead:8000"}, None, 15.0) is None


async def test_only_those_are_asked_that_the_gateways_do_not_know() -> None:
    known = [ReplicaSignal("fresh", True, False, 2, REPORT, 1.0), ReplicaSignal("old", True, True, 4, REPORT, 99.0)]
    endpoints = {uid: f"http://{uid}:8000" for uid in ("fresh", "old", "new")}
    client = Client()
    signals = await ask_replicas(client, endpoints, PoolSignals(5, tuple(known)), 15.0)
    assert sorted(client.asked) == ["http://new:8000", "http://old:8000"]
    assert signals is not None and signals.complete and signals.held == 5
    assert [(r.uid, r.report_age_s, r.in_flight, r.cordoned) for r in signals.replicas] == [
        ("fresh", 1.0, 2, False),
        ("old", 0.0, 4, True),
        ("new", 0.0, 0, False),
    ]
