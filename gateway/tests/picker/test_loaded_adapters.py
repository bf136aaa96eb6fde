"""Requests for an adapter go to replicas that have it, and wait as long as none has."""

import asyncio
from typing import Any

import msgspec
import pytest

from penstock.api import headers, load_report
from penstock.api.fleet import Adapter, Engine, Fleet, Model, Pool, Replica, Role
from penstock.api.load_report import LoadReport
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.choice import Choice, choose
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.picker.state import FleetState
from penstock.gateway.picker.subset import only

MODEL = Model(id="ns/m", served_names=["m"])
SQL = Adapter(id="ns/sql", model="ns/tiny", served_names=["sql", "text-to-sql"])


def replica(at: int, pool: str = "b", **changes: Any) -> Replica:
    known: dict[str, Any] = {
        "uid": f"u{at}", "name": f"r{at}", "pool": f"ns/m/{pool}", "host": f"10.0.0.{at}", "port": 80,
        "events_port": 1, "replay_port": 2, "ready": True, "kv_layout": "same",
    }  # fmt: skip
    return Replica(**{**known, **changes})


def fleet(*replicas: Replica) -> Fleet:
    roles: dict[str, Role] = {"b": "Both", "p": "Prefill", "d": "Decode"}
    pools = [Pool(id=f"ns/m/{name}", model=MODEL.id, role=role) for name, role in roles.items()]
    return Fleet(models=[MODEL], pools=pools, replicas=list(replicas))


def state_of(*replicas: Replica) -> FleetState:
    state = FleetState()
    state.update(fleet(*replicas))
    return state


def key(at: int) -> ReplicaKey:
    return key_of(replica(at))


def report(*adapters: str, seq: int = 1, epoch: int = 1, **figures: Any) -> LoadReport:
    figures = {"max_num_seqs": 64, "kv_blocks_total": 10_000, "kv_blocks_reclaimable": 10_000, **figures}
    return LoadReport(epoch=epoch, seq=seq, prefill_tokens_per_s=10_000.0, decode_step_s=0.02, adapters=adapters, **figures)


def unsaid(seq: int = 1, epoch: int = 1) -> LoadReport:
    return msgspec.structs.replace(report(seq=seq, epoch=epoch), adapters=None)


def asked(adapter: str | None = "sql", ident: str = "r", tokens: int = 10) -> RequestView:
    return RequestView(id=ident, path="", model="m", adapter=adapter, prompts=(Prompt(tokens),))


def able(state: FleetState, adapter: str | None = "sql", **given: Any) -> set[str]:
    slate = state.slates.of(MODEL, asked(adapter), 0.0, **given)
    return {it.name for it, is_open in zip(slate.replicas, slate.open, strict=True) if it is not None and is_open}


def test_only_replicas_that_have_the_adapter_are_picked_and_decisions_say_why() -> None:
    state = state_of(*(replica(at) for at in range(4)))
    for at, adapters in enumerate([(), ("sql", "chat"), ("chat",), ("sql",)]):
        state.reported(key(at), report(*adapters), 0.0)

    def pick(ident: str) -> Choice:
        return choose(state.slates.of(MODEL, asked(ident=ident), 0.0), "Random")

    choices = [pick(str(n)) for n in range(50)]
    assert {choice.replica.name for choice in choices} == {"r1", "r3"}
    assert {endpoint for choice in choices for endpoint in choice.endpoints} == {"10.0.0.1:80", "10.0.0.3:80"}
    why = {it.name: it.why for it in choices[0].rejected}
    assert why == dict.fromkeys(("r0", "r2"), "not known to have adapter 'sql'")
    assert able(state, None) == {"r0", "r1", "r2", "r3"}
    assert able(state, subset=only([replica(1), replica(2)], None)) == {"r1"}
    assert not state.slates.lacks(MODEL, "chat") and state.slates.lacks(MODEL, "other") and not state.slates.lacks(MODEL, None)


def test_nobody_pays_for_adapters_that_are_everywhere() -> None:
    state = state_of(replica(1), replica(2))
    for at in (1, 2):
        state.reported(key(at), report("sql"), 0.0)
    columns = state._places.answering[MODEL.id]
    assert state.slates.of(MODEL, asked(), 0.0).open is columns.open
    looked_at = columns.able("sql")
    state.reported(key(1), report("sql", seq=2), 0.0)
    assert columns._able["sql"] is looked_at, "the same said again is no reason to look again"


def test_a_header_wipes_nothing_and_carriers_may_overtake_one_another() -> None:
    state = state_of(replica(1))
    state.reported(key(1), report("sql", seq=5), 0.0)
    header = load_report.decode(load_report.encode(report(seq=9), "TEXT"))
    state.reported(key(1), header, 0.1, in_header=True)
    assert able(state) == {"r1"} and state.reports.get(key(1)).report.seq == 9
    state.reported(key(1), report("chat", seq=7), 0.2)  # older than the header's, newer than what was said
    assert (able(state), able(state, "chat")) == (set(), {"r1"})
    state.reported(key(1), report("sql", seq=6), 0.3)
    assert able(state, "chat") == {"r1"}


def test_a_replica_of_ours_has_no_adapter_until_it_says_so_and_others_are_taken_as_they_are() -> None:
    kinds: dict[int, Engine] = {1: "penstock", 2: "vllm", 3: "auto"}
    state = state_of(*(replica(at, engine=engine) for at, engine in kinds.items()), replica(4), replica(5, events_port=0))
    assert able(state) == {"r2", "r3", "r5"}
    state.reported(key(1), unsaid(), 0.0, in_header=True)
    assert able(state) == {"r2", "r3", "r5"}, "a header never says it"
    state.reported(key(1), unsaid(), 0.0)
    assert able(state) == {"r1", "r2", "r3", "r5"}, "an older engine of ours, which never says it either"
    state.mute(key(4))
    assert able(state) == {"r1", "r2", "r3", "r4", "r5"}
    state.reported(key(4), report(), 0.0)
    state.mute(key(4))
    assert "r4" not in able(state), "it has spoken since"


@pytest.mark.parametrize("how", ["report", "header", "stream", "readiness"])
def test_a_new_process_under_the_same_key_begins_without_adapters(how: str) -> None:
    state = state_of(replica(1))
    state.reported(key(1), report("sql"), 0.0)
    assert able(state) == {"r1"}
    match how:
        case "report":
            state.reported(key(1), report(epoch=2), 1.0)
        case "header":
            state.reported(key(1), unsaid(epoch=2), 1.0, in_header=True)
        case "stream":
            state.restarted(key(1))
        case _:  # the kubelet's word may come before the process's own
            state.update(fleet(replica(1, ready=False)))
            state.update(fleet(replica(1)))
    assert able(state) == set() and able(state, None) == {"r1"}
    state.reported(key(1), report("sql", epoch=2, seq=2), 1.1)
    assert able(state) == {"r1"}
    state.reported(key(1), report(seq=99), 1.2)  # the old process's last words
    assert able(state) == {"r1"}


def test_a_replica_that_moves_to_another_row_or_goes_takes_what_it_said_along() -> None:
    state = state_of(replica(1), replica(2))
    state.reported(key(1), report(), 0.0)
    state.reported(key(2), report("sql"), 0.0)
    state.update(fleet(replica(2), replica(3)))
    assert able(state) == {"r2"}
    state.update(fleet(replica(1)))
    state.mute(key(1))
    assert able(state) == {"r1"}, "gone and come again it is a stranger"


def test_both_halves_of_a_pair_have_the_adapter() -> None:
    state = state_of(replica(1, "p"), replica(2, "p"), replica(3, "d"), replica(4, "d"))
    for at in (1, 2, 3, 4):
        state.reported(key(at), report(*(["sql"] if at in (2, 3) else []), num_requests_running=30), 0.0)

    def pick(adapter: str | None) -> Choice:
        request = asked(adapter, tokens=4_000)
        return choose(state.slates.of(MODEL, request, 0.0), "Cost", prefill=state.slates.of_prefill(MODEL, request, 0.0))

    pair = pick("sql")
    assert pair.hop is not None
    assert (pair.hop.replica.name, pair.replica.name) == ("r2", "r3")
    state.reported(key(2), report(seq=2), 0.0)
    alone = pick("sql")
    assert (alone.hop, alone.replica.name) == (None, "r3")
    assert pick(None).hop is not None


# --- in the gateway ---


def serve(world: Any, hold_timeout_s: float, *adapters: Adapter) -> None:
    model = Model(id="ns/tiny", served_names=["tiny"], hold_timeout_s=hold_timeout_s)
    pools = [Pool(id="ns/tiny/p", model=model.id)]
    world.discovery.queue.put_nowait(Fleet(models=[model], pools=pools, replicas=world.replicas, adapters=list(adapters)))


async def with_adapters(world: Any, *loaded: tuple[str, ...], hold_timeout_s: float = 60.0) -> None:
    for engine, names in zip(world.engines, loaded, strict=True):
        engine.report = msgspec.structs.replace(engine.report, adapters=names)
    serve(world, hold_timeout_s, SQL)
    await world.until(lambda: all(world.state.reports.get(key_of(it)) for it in world.replicas))


def ask(world: Any, model: str = "text-to-sql", **more: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(world.stream().ask(world.completion(model=model), **more))


async def test_a_request_for_an_adapter_that_no_replica_has_waits_until_one_says_that_it_has_it(world: Any) -> None:
    await with_adapters(world, (), ())
    gate, waiting = world.gateway._gate, ask(world)
    await world.until(lambda: gate.control.requests)
    view = await world.get("/pools")
    assert view["pools"][0]["held"] == 1, "the autoscaler must not send the replicas to sleep meanwhile"
    async with world.http.get("/metrics") as response:
        assert 'penstock_flow_queued_requests{model="ns/tiny",priority="0"} 1.0' in await response.text()
    assert world.destinations(await ask(world, "tiny")), "others pass"
    engine = world.engines[1]
    engine.report = msgspec.structs.replace(engine.report, seq=2, adapters=("sql",))
    world.gateway._follower.event(key_of(world.replicas[1]), engine.report)
    assert world.destinations(await asyncio.wait_for(waiting, 60)) == [world.replicas[1].endpoint]
    (decision, _) = await world.get("/debug/decisions?n=2")
    assert decision["rejected"] == [{"name": "r0", "why": "not known to have adapter 'sql'"}]
    assert gate.control.requests == 0 and not world.state.held
    async with world.http.get("/metrics") as response:
        text = await response.text()
    assert 'penstock_flow_wait_seconds_count{model="ns/tiny",outcome="asked_again"} 1.0' in text


@pytest.mark.parametrize("patience", ["", "1"])
async def test_after_the_hold_it_is_a_503_that_says_when_to_try_again(world: Any, patience: str) -> None:
    await with_adapters(world, ("chat",), (), hold_timeout_s=60.0 if patience else 0.0)
    more = {headers.TIMEOUT: patience} if patience else {}
    status, reason, content, sets = world.error(await asyncio.wait_for(ask(world, "sql", **more), 60))
    assert (status, reason) == (503, "deadline_exceeded" if patience else "adapter_not_loaded")
    assert "no ready replica of model 'tiny' has adapter 'sql' yet" in content["message"]
    assert int(sets["retry-after"]) >= 1
    async with world.http.get("/metrics") as response:
        assert f'reason="{reason}"}} 1.0' in await response.text()


async def test_what_a_foreign_gateway_allows_is_not_waited_for(world: Any) -> None:
    await with_adapters(world, ("sql",), ())
    status, _, content, sets = world.error(await ask(world, "sql", subset=[world.replicas[1].endpoint]))
    assert status == 503 and "with adapter 'sql'" in content["message"] and sets["retry-after"]
    answer = await ask(world, "sql", subset=[it.endpoint for it in world.replicas])
    assert world.destinations(answer) == [world.replicas[0].endpoint]


async def test_an_adapter_that_goes_while_requests_wait_for_it_is_a_404(world: Any) -> None:
    await with_adapters(world, (), ())
    waiting = ask(world, "sql")
    await world.until(lambda: world.gateway._gate.control.requests)
    serve(world, 60.0)
    assert world.error(await asyncio.wait_for(waiting, 60))[:2] == (404, "model_not_found")
