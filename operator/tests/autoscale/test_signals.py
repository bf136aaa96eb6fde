"""Views of several gateways, pooled, and the choice of victims."""

from penstock.api.fleet import PoolLoad, PoolsView, ReplicaLoad
from penstock.api.load_report import LoadReport
from penstock.operator.autoscale.signals import choose_victims, pool_signals


def replica(
    uid: str, *, epoch: int = 1, seq: int | None = 1, in_flight: int = 0, ready: bool = True, kv: float = 0.0
) -> ReplicaLoad:
    report = None if seq is None else LoadReport(epoch=epoch, seq=seq, kv_cache_usage_perc=kv)
    return ReplicaLoad(
        uid=uid,
        name=uid,
        port=8000,
        ready=ready,
        cordoned=False,
        report=report,
        report_age_s=None if seq is None else float(seq),
        pending=0,
        in_flight=in_flight,
    )


def view(held: int, *replicas: ReplicaLoad) -> PoolsView:
    return PoolsView(gateway="g", version=1, pools=[PoolLoad(id="d/m/p", model="d/m", held=held, replicas=list(replicas))])


def test_held_and_in_flight_add_up_and_the_newest_report_counts() -> None:
    first = view(1, replica("a", seq=5, in_flight=1), replica("b", epoch=1, seq=99))
    second = view(2, replica("a", seq=7, in_flight=2), replica("b", epoch=2, seq=1))
    pooled = pool_signals([first, second], "d/m/p")
    assert pooled is not None
    assert pooled.held == 3
    a, b = pooled.replicas
    assert (a.in_flight, a.report and a.report.seq) == (3, 7)
    assert b.report is not None and (b.report.epoch, b.report.seq) == (2, 1)


def test_an_unknown_pool_is_not_an_empty_one() -> None:
    assert pool_signals([view(0)], "other") is None
    assert pool_signals([], "d/m/p") is None
    known = pool_signals([view(0)], "d/m/p")
    assert known is not None and known.replicas == ()


def test_victims_are_those_whose_loss_costs_least() -> None:
    pooled = pool_signals(
        [
            view(
                0,
                replica("busy", in_flight=3),
                replica("idle-warm", kv=0.5),
                replica("idle-cold", kv=0.1),
                replica("late", ready=False, seq=None),
                replica("draining", ready=False, seq=None),
            )
        ],
        "d/m/p",
    )
    assert pooled is not None
    there = {"busy", "idle-warm", "idle-cold", "late"}
    assert choose_victims(pooled, there, 1) == ["late", "idle-cold", "idle-warm"]
    assert choose_victims(pooled, there, 4) == []


def test_what_goes_anyhow_spares_no_victim_and_is_none() -> None:
    """One drains, another starts: of the two that serve, one goes where one is to be left, and none where two are."""
    serving = [replica("busy", in_flight=3), replica("idle")]
    pooled = pool_signals([view(0, *serving, replica("draining", ready=False), replica("starting", ready=False))], "d/m/p")
    assert pooled is not None
    assert choose_victims(pooled, {"busy", "idle"}, 1) == ["idle"]
    assert choose_victims(pooled, {"busy", "idle"}, 2) == []
