"""A noisy tenant beside a quiet one, through HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from frontend_process import serving

from penstock.api.headers import TENANT

MODEL = Path(__file__).parents[3] / "examples/models/penstock-tiny"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "Return", "max_tokens": 40, "ignore_eos": True}


async def tell(session: aiohttp.ClientSession, path: str) -> None:
    async with session.post(path) as response:
        assert response.status == 200, await response.text()


async def load(session: aiohttp.ClientSession) -> tuple[int, int]:
    """Requests that run and that wait."""
    async with session.get("/load") as response:
        report = await response.json()
    return report["num_requests_running"], sum(report["num_requests_waiting"].values())


@pytest.mark.req("LIM-04")
async def test_a_noisy_tenant_takes_no_more_than_a_quiet_one_while_both_wait(tmp_path: Path) -> None:
    done: list[str] = []

    async def ask(session: aiohttp.ClientSession, tenant: str) -> None:
        async with session.post("/v1/completions", json=BODY, headers={TENANT: tenant}) as response:
            assert response.status == 200
            await response.read()
            done.append(tenant)

    flags = ("--max-num-seqs", "2", "--max-num-waiting", "100", "--max-model-len", "512", "--enable-control-endpoints")
    with serving(MODEL, tmp_path / "log", *flags) as server:
        async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0)) as session:
            noisy = [asyncio.create_task(ask(session, "noisy")) for _ in range(40)]
            while not done:
                await asyncio.sleep(0.01)
            await tell(session, "/pause?mode=keep")  # or more of the noisy one's end while the others are on their way
            while await load(session) != (0, 40 - len(done)):
                await asyncio.sleep(0.01)
            before = len(done)
            quiet = [asyncio.create_task(ask(session, "quiet")) for _ in range(8)]
            while await load(session) != (0, 48 - len(done)):
                await asyncio.sleep(0.01)
            await tell(session, "/resume")
            await asyncio.gather(*quiet)
            meanwhile = done[before:]
            await asyncio.gather(*noisy)
    shares = [meanwhile.count("noisy"), meanwhile.count("quiet")]
    # Two that ran already are the noisy one's.
    assert shares[1] == 8 and shares[0] <= 8 + 4, meanwhile
    assert sum(shares) ** 2 / (2 * sum(share**2 for share in shares)) > 0.9, "Jain's index"
