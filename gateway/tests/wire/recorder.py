"""Records what a real Envoy says to the picker: every read of its connections, in order.

PYTHONPATH=. python gateway/tests/wire/recorder.py    # writes gateway/tests/picker/recorded.json.gz anew

The test that replays it is `gateway/tests/picker/test_recorded_traffic.py`.
"""

import asyncio
import base64
import contextlib
import gzip
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from conftest import MODEL, POOL, Engine, Processes
from penstock.api.fleet import Adapter, Fleet, Model, Pool
from testing.ports import free_ports

OUT = Path(__file__).parent.parent / "picker" / "recorded.json.gz"
WORDS = ["river", "don't", "2024", "état", "вода", "水车。", "🙂", "</b>", '"quoted"', "\n"]
PATH = "/v1/chat/completions"


class Relay:
    """Stands between Envoy and the picker, and keeps what Envoy says."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.reads: list[tuple[int, str]] = []
        self._connections = 0

    async def start(self) -> int:
        """Returns the port to connect to."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self._connections = self._connections, self._connections + 1
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return writer.close()

        def note(data: bytes) -> None:
            self.reads.append((number, base64.b85encode(data).decode()))

        with contextlib.suppress(asyncio.CancelledError):  # as the loop does at the end, and asyncio would complain of it
            await asyncio.gather(self._pump(reader, back, note), self._pump(there, writer, lambda _: None))
        return None

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: Callable[[bytes], None]) -> None:
        while data := await reader.read(65_536):
            note(data)
            writer.write(data)
        writer.close()


async def engine(name: str) -> Engine:
    """One more engine."""
    its = Engine(name, "127.0.0.1", free_ports(1)[0])
    app = web.Application(client_max_size=2**24)
    app.router.add_post(PATH, its.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, its.host, its.port).start()
    return its


def chat(rng: random.Random, number: int) -> tuple[str, Any]:
    """A path and what is posted there."""
    content = " ".join(rng.choices(WORDS, k=rng.choice((1, 5, 40, 200))))
    body: dict[str, Any] = {"model": rng.choice(("tiny", "tiny", "tiny", "alias", "adapter")), "stream": rng.random() < 0.5}
    body["messages"] = [{"role": role, "content": content} for role in rng.choice((["user"], ["system", "user"], ["user"] * 3))]
    match number % 20:
        case 3:
            body["model"] = "nonesuch"
        case 6:
            return PATH, b'{"model": '
        case 9:
            return "/v1/nowhere", body
        case 12:
            body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
        case 15:
            body["messages"][0]["content"] = "long " * rng.choice((8_000, 30_000))
        case 17:
            body |= {"max_tokens": 9, "n": 2, "temperature": 0.5}
        case 18:
            del body["messages"]
        case _:
            pass
    return PATH, body


async def asked(client: aiohttp.ClientSession, url: str, path: str, body: Any) -> int:
    """The status of an answer that was read to its end."""
    sent = {"data": body} if isinstance(body, bytes) else {"json": body}
    async with client.post(url + path, **sent, headers={"content-type": "application/json"}) as response:
        await response.read()
        return response.status


async def record(folder: Path, processes: Processes, count: int) -> dict[str, Any]:
    """Runs a gateway and an Envoy, and asks so often."""
    rng, engines = random.Random(1), [await engine(name) for name in ("first", "second", "third")]
    models = [Model(id=MODEL, served_names=["tiny", "alias"], hold_timeout_s=1.0)]
    adapters = [Adapter(id=f"{MODEL}/a", model=MODEL, served_names=["adapter"])]
    fleet = Fleet(models=models, adapters=adapters, pools=[Pool(id=POOL, model=MODEL)], replicas=[it.replica() for it in engines])
    (folder / "fleet.json").write_bytes(msgspec.json.encode(fleet))
    port, grpc_port, http_port = free_ports(3)
    where = ("--grpc-port", str(grpc_port), "--http-port", str(http_port), "--listener-host", "127.0.0.1")
    processes.start("gateway", "gateway", "--discovery", f"file:{folder / 'fleet.json'}", *where, "--listener-port", str(port))
    relay = Relay(grpc_port)
    at = f"127.0.0.1:{await relay.start()}"
    processes.start("envoy", "envoy", "--gateway", f"127.0.0.1:{grpc_port}", "--picker", at, "--concurrency", "1")
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as client:
        async with asyncio.timeout(60):
            while await _status(client, url) != 200:
                await asyncio.sleep(0.1)
        statuses = [await asked(client, url, *chat(rng, number)) for number in range(count)]
        for it in engines:
            it.fail = 500
        statuses += [await asked(client, url, PATH, {"model": "tiny", "messages": [{"role": "user", "content": "x"}]})]
    print({status: statuses.count(status) for status in sorted(set(statuses))})
    return {"fleet": msgspec.to_builtins(fleet), "reads": relay.reads}


async def _status(client: aiohttp.ClientSession, url: str) -> int:
    try:
        async with client.get(url + "/v1/models") as response:
            return response.status
    except aiohttp.ClientError:
        return 0


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder))
        try:
            found = asyncio.run(record(Path(folder), processes, 130))
        finally:
            processes.stop()
    OUT.write_bytes(gzip.compress(msgspec.json.encode(found), mtime=0))
    print(f"{len(found['reads']):,} reads, {OUT.stat().st_size:,} bytes in {OUT}")


if __name__ == "__main__":
    main()
