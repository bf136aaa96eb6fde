"""Who waits at the gate is not overtaken in the moment in which it may go on."""

import asyncio
import time

from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.flow.control import FlowLimits
from penstock.gateway.flow.gate import FlowGate
from penstock.gateway.flow.ticket import Ticket
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.picker.candidates import key_of
from penstock.gateway.picker.state import FleetState

MODEL = Model(id="ns/m", served_names=["m"])
REPLICA = Replica(
    uid="u", name="r", pool="ns/m/p", host="127.0.0.1", port=1, events_port=2, replay_port=3, ready=True,
)  # fmt: skip


class Scene:
    """A gate before one replica, which is full at first."""

    def __init__(self) -> None:
        self.state = FleetState()
        self.state.update(Fleet(models=[MODEL], pools=[Pool(id="ns/m/p", model=MODEL.id)], replicas=[REPLICA]))
        self.gate = FlowGate(FleetFollower(self.state), FlowLimits())
        self.went_on: list[int] = []
        self.report(1, running=9)

    def report(self, seq: int, running: int) -> None:
        report = LoadReport(epoch=1, seq=seq, max_num_seqs=8, num_requests_running=running)
        self.state.reported(key_of(REPLICA), report, time.monotonic())

    async def ask(self, number: int) -> None:
        """As the stages do."""
        if not self.gate.enter(MODEL, 1, time.monotonic()):
            ticket = Ticket(model=MODEL.id, until=time.monotonic() + 60, ordinal=number)
            await self.gate.wait(ticket, MODEL)
        self.went_on.append(number)


async def test_a_request_that_comes_when_others_were_just_let_go_is_behind_them() -> None:
    scene = Scene()
    first = [asyncio.create_task(scene.ask(number)) for number in range(3)]
    await asyncio.sleep(0.01)
    assert not scene.went_on
    scene.report(2, running=0)
    scene.gate._pump()  # as a report's event has it called: there is room for all that wait, and for more
    assert not scene.gate.control.requests
    last = asyncio.ensure_future(scene.ask(3))
    entering = scene.gate.enter(MODEL, 1, time.monotonic())  # in this very turn of the loop
    assert not entering
    async with asyncio.timeout(5):
        await asyncio.gather(*first, last)
    assert scene.went_on == [0, 1, 2, 3]
    assert scene.gate.enter(MODEL, 1, time.monotonic())


async def test_who_gives_up_when_it_may_go_on_holds_nobody_up() -> None:
    scene = Scene()
    waits = asyncio.create_task(scene.ask(0))
    await asyncio.sleep(0.01)
    scene.report(2, running=0)
    scene.gate._pump()
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    assert waits.cancelled()
    assert scene.gate.enter(MODEL, 1, time.monotonic())
