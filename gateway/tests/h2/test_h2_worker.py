"""A worker does what a task does, where whoever feeds it stands."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from penstock.gateway.h2.server import Server, ServerProtocol
from penstock.gateway.h2.worker import PAUSE, Worker


class Desk:
    """Steps workers when it is told to, and notes their ends."""

    def __init__(self) -> None:
        self.due: list[Worker] = []
        self.ends = 0
        self.said: list[object] = []

    def worker(self, work: Callable[["Desk"], Coroutine[Any, Any, None]]) -> Worker:
        return Worker(work(self), self.due.append, self._over)

    def _over(self) -> None:
        self.ends += 1

    def steps(self) -> None:
        """From outside of any task, as a transport's callbacks are."""
        done = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lambda: (self._steps(), done.set_result(None)))
        self.done = done

    def _steps(self) -> None:
        while self.due:
            self.due.pop(0).step()


async def stepped(desk: Desk) -> None:
    desk.steps()
    await desk.done


async def test_it_goes_on_only_when_it_is_resumed_and_without_a_turn_of_the_loop() -> None:
    async def work(desk: Desk) -> None:
        desk.said.append(1)
        await PAUSE
        desk.said.append(2)

    desk = Desk()
    worker = desk.worker(work)
    await stepped(desk)
    assert desk.said == [1]
    await asyncio.sleep(0.01)
    await stepped(desk)
    assert desk.said == [1]
    worker.resume()
    worker.resume()
    assert desk.due == [worker]
    await stepped(desk)
    assert (desk.said, desk.ends, worker.done()) == ([1, 2], 1, True)
    worker.resume()
    assert not desk.due
    assert not worker.cancel()


async def test_it_waits_for_futures_tasks_and_turns_of_the_loop() -> None:
    async def work(desk: Desk) -> None:
        await asyncio.sleep(0)
        desk.said.append(await asyncio.create_task(asyncio.sleep(0.001, "task")))
        desk.said.append(await asyncio.get_running_loop().run_in_executor(None, lambda: "thread"))
        future = asyncio.get_running_loop().create_future()
        future.set_exception(ValueError("as said"))
        try:
            await future
        except ValueError as error:
            desk.said.append(str(error))
        assert asyncio.current_task() is not None

    desk = Desk()
    worker = desk.worker(work)
    await stepped(desk)
    worker.resume()  # it is not in a pause: what it waits for ends that
    async with asyncio.timeout(60):
        while not worker.finished:
            await asyncio.sleep(0.001)
    assert desk.said == ["task", "thread", "as said"]


async def test_timeouts_work_inside_and_end_nothing_else() -> None:
    async def work(desk: Desk) -> None:
        try:
            async with asyncio.timeout(0.005):
                await asyncio.Event().wait()
        except TimeoutError:
            desk.said.append("too late")
        try:
            async with asyncio.timeout(0.005):
                await PAUSE
        except TimeoutError:
            desk.said.append("again")
        await asyncio.sleep(0.001)
        desk.said.append("and on")

    desk = Desk()
    worker = desk.worker(work)
    async with asyncio.timeout(60):
        while not worker.finished:
            await stepped(desk)
            await asyncio.sleep(0.001)
    assert desk.said == ["too late", "again", "and on"]
    assert worker.cancelling() == 0


@pytest.mark.parametrize("where", ["before", "pause", "future", "itself", "itself with a future"])
async def test_it_can_be_cancelled_wherever_it_is(where: str) -> None:
    async def work(desk: Desk) -> None:
        desk.said.append("began")
        try:
            if where.startswith("itself"):
                worker.cancel()
            await (asyncio.Event().wait() if "future" in where else PAUSE)
        except asyncio.CancelledError:
            desk.said.append("cancelled")
            raise

    desk = Desk()
    worker = desk.worker(work)
    if where != "before":
        await stepped(desk)
        assert desk.ends == 0 or where.startswith("itself")
    if not where.startswith("itself"):
        assert worker.cancel()
    for _ in range(3):
        await stepped(desk)
    assert desk.said == ([] if where == "before" else ["began", "cancelled"])
    assert (worker.finished, desk.ends) == (True, 1)


async def test_one_that_has_ended_keeps_nobody_who_keeps_it() -> None:
    async def work(desk: Desk) -> None:
        desk.said.append("done")

    desk = Desk()
    desk.said.append(desk.worker(work))
    await stepped(desk)
    assert desk.ends == 1
    gone = weakref.ref(desk)
    gc.disable()
    try:
        del desk
        assert gone() is None
    finally:
        gc.enable()


async def test_one_read_is_answered_by_one_write_in_the_same_turn(lean_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[tuple[str, int]] = []
    received = ServerProtocol.data_received

    def noted(self: ServerProtocol, data: bytes) -> None:
        turns.append(("read", 0))
        received(self, data)
        turns.append(("back", 0))

    def written(data: bytes) -> None:
        turns.append(("write", len(data)))
        write(data)

    async with lean_server() as it:
        call = it.channel.stream_stream("/test.Echo/Both")()
        await call.write(b"first")
        assert await call.read() == b"first"
        (peer,) = it.server.peers
        write = peer._transport.write
        monkeypatch.setattr(ServerProtocol, "data_received", noted)
        monkeypatch.setattr(peer._transport, "write", written)
        await call.write(b"second")
        assert await call.read() == b"second"
        monkeypatch.undo()
        assert isinstance(it.server, Server)
    kinds = [kind for kind, _ in turns]
    assert "write" in kinds
    assert all(kinds[at - 1] == "read" for at, kind in enumerate(kinds) if kind == "write")
