"""Discovery from a file: complete fleets only, replaced atomically, and nothing forgotten for want of a good file."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.gateway.discovery.file import FileDiscovery
from penstock.gateway.discovery.source import discovery_from


def replica(host: str) -> Replica:
    return Replica(uid=host, name=host, pool="d/m/p", host=host, port=8000, events_port=1, replay_port=2, ready=True)


def fleet(*hosts: str) -> Fleet:
    models, pools = [Model(id="d/m", served_names=["m"])], [Pool(id="d/m/p", model="d/m")]
    return Fleet(models=models, pools=pools, replicas=[replica(host) for host in hosts])


def put(path: Path, content: bytes) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_bytes(content)
    scratch.replace(path)


async def following(fleets: AsyncIterator[Fleet]) -> Fleet:
    return await asyncio.wait_for(anext(fleets), 60)


async def silent(fleets: AsyncIterator[Fleet], caplog: pytest.LogCaptureFixture, reason: str) -> asyncio.Task[Fleet]:
    """A pending read of the next fleet, after the file's fault was logged."""
    task = asyncio.ensure_future(anext(fleets))
    async with asyncio.timeout(60):
        while reason not in caplog.text:
            await asyncio.sleep(0.02)
    assert not task.done()
    return task


async def test_follows_the_file_and_survives_a_bad_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "fleet.json"
    fleets = FileDiscovery(path).watch()
    waiting = await silent(fleets, caplog, "FileNotFoundError")
    put(path, msgspec.json.encode(fleet("127.0.0.1")))
    assert await asyncio.wait_for(waiting, 60) == fleet("127.0.0.1")

    put(path, b'{"replicas": [{"uid": 3}]}')
    waiting = await silent(fleets, caplog, "$.replicas[0].uid")
    put(path, msgspec.json.encode(fleet("127.0.0.1", "127.0.0.2")))
    assert len((await asyncio.wait_for(waiting, 60)).replicas) == 2
    await fleets.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("bad", "names"),
    [
        (Fleet(replicas=fleet("127.0.0.1").replicas), "replicas: '127.0.0.1' is in pool 'd/m/p'"),
        (Fleet(pools=fleet().pools), "pools: 'd/m/p' is of model 'd/m'"),
        (fleet("127.0.0.1", "127.0.0.1"), "replicas: '127.0.0.1:8000' occurs 2 times"),
        (fleet("localhost"), "'localhost' has host 'localhost', which is not an IP address"),
    ],
)
async def test_says_what_is_wrong(tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: Fleet, names: str) -> None:
    path = tmp_path / "fleet.json"
    put(path, msgspec.json.encode(bad))
    task = await silent(FileDiscovery(path).watch(), caplog, names)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_refuses_unknown_sources() -> None:
    with pytest.raises(ValueError, match="neither 'kubernetes' nor 'file:PATH'"):
        discovery_from("consul", [])
