"""What runs together ends together."""

import asyncio

import pytest

from penstock.tasks import run_until


class Job:
    """Waits to be told how to end."""

    def __init__(self) -> None:
        self.begun, self.told = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None
        self.ended = False

    async def run(self) -> None:
        try:
            self.begun.set()
            await self.told.wait()
            if self.error is not None:
                raise self.error
        finally:
            await asyncio.sleep(0)  # an end takes its time
            self.ended = True


@pytest.mark.parametrize("how", ["stop", "over", "failed", "cancelled"])
async def test_all_end_with_the_first(how: str) -> None:
    stop, first, second = asyncio.Event(), Job(), Job()
    whole = asyncio.create_task(run_until(stop, first.run(), second.run()))
    await asyncio.gather(first.begun.wait(), second.begun.wait())
    if how == "failed":
        first.error = OSError("no")
    if how == "cancelled":
        whole.cancel()
    else:
        (stop if how == "stop" else first.told).set()
    expected = {"failed": OSError, "cancelled": asyncio.CancelledError}.get(how)
    if expected is None:
        await whole
    else:
        with pytest.raises(expected):
            await whole
    assert first.ended and second.ended
