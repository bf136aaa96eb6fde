"""A thousand images and URLs that nobody means well with: each is refused by its part or read right, and none leaves a trace."""

import asyncio
import gc
import ssl
import tempfile
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from hostile_images import HOST, Case, draw
from PIL import Image

from penstock.engine.multimodal.addresses import is_public
from penstock.engine.multimodal.clip import MEAN, STD
from penstock.engine.multimodal.fetch import MAX_FETCHES, Fetcher
from penstock.engine.multimodal.reader import ImageReader
from penstock.engine.multimodal.resize import resized
from penstock.engine.multimodal.settings import ClipSettings, ImageSettings, Normalization
from penstock.prompt.errors import PromptError
from penstock.prompt.images import ImagePart

pytestmark = pytest.mark.slow

NUMBER, AT_ONCE = 1000, 8
SQUARE = ClipSettings(size=28, shortest_edge=28, resample=3)
SETTINGS = ImageSettings(token_id=0, tokens=4, normalization=Normalization(1 / 255, MEAN, STD), resize=SQUARE)


class World:
    """The one site that may be asked, and what its name resolves to: as the case at hand has them."""

    def __init__(self, certificates) -> None:
        self._certificates = certificates
        self.case: Case | None = None
        self.asked = self.lookups = 0

    async def __aenter__(self) -> "World":
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        server.load_cert_chain(self._certificates / "tls.crt", self._certificates / "tls.key")
        self._runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=server)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_) -> None:
        await self._runner.cleanup()

    async def _handle(self, _request: web.BaseRequest) -> web.Response:
        self.asked += 1
        assert self.case is not None
        headers = {name: value.replace("PORT", str(self.port)) for name, value in self.case.headers}
        return web.Response(body=self.case.body, status=self.case.status, headers=headers)

    async def resolve(self, host: str, _port: int) -> list[str]:
        assert host == HOST, "another name is looked up"
        assert self.case is not None
        self.lookups += 1
        return list(self.case.addresses[min(self.lookups, len(self.case.addresses)) - 1])

    def reader(self) -> ImageReader:
        tls = ssl.create_default_context(cafile=self._certificates / "ca.crt")
        domains = [HOST, "127.0.0.1", "::1", "::ffff:127.0.0.1", "169.254.169.254"]
        permits = lambda address: address == "127.0.0.1" or is_public(address)  # noqa: E731 - the site is on this machine
        return ImageReader(
            SETTINGS, Fetcher(domains, resolve=self.resolve, permits=permits, tls=tls, port=self.port, timeout_s=30.0)
        )


async def outcome(reader: ImageReader, url: str) -> np.ndarray | PromptError:
    try:
        [image] = await reader.read([ImagePart(url, "messages[3].content[1].image_url.url")])
        return image.pixels.array()
    except PromptError as error:
        return error


def judge(number: int, case: Case, found: np.ndarray | PromptError) -> None:
    told = f"case {number}: {case.kind} {case.url[:60]!r}: {found if isinstance(found, PromptError) else 'read'}"
    if isinstance(found, PromptError):
        assert case.verdict != "read", told
        assert found.param == "messages[3].content[1].image_url.url", told
        assert str(found).startswith(found.param), told
        return
    assert case.verdict != "refused", told
    assert found.shape == (28, 28, 3), told
    if case.upright is not None:
        right = resized(Image.fromarray(case.upright), SQUARE).array()
        if case.lossy:
            assert np.abs(found.astype(int) - right).mean() < 12, told
        else:
            assert np.array_equal(found, right), told


def left_behind() -> tuple:
    gc.collect()
    images = sum(issubclass(type(thing), Image.Image) for thing in gc.get_objects())
    return images, len(list(Path("/proc/self/fd").iterdir())), sorted(thread.name for thread in threading.enumerate())


@pytest.fixture(scope="module")
def certificates(make_authority, tmp_path_factory):
    return make_authority().mount(tmp_path_factory.mktemp("tls"), name=HOST)


async def _try(world: World, reader: ImageReader, cases: list[Case]) -> None:
    """Those that go to the site one after the other, since it has one answer at a time; then all others, some at once."""
    alone = [(number, case) for number, case in enumerate(cases) if case.url.startswith("https:") and HOST in case.url]
    for number, case in alone:
        world.case, world.asked, world.lookups = case, 0, 0
        judge(number, case, await outcome(reader, case.url.replace("PORT", str(world.port))))
        assert world.lookups <= 1, f"case {number} is looked up twice"
        assert world.asked <= 1, f"case {number}: a redirect is followed"
        assert world.asked == 0 or case.kind not in ("private", "other host"), f"case {number} leads somewhere"
    world.case = None
    others = [(number, case) for number, case in enumerate(cases) if (number, case) not in alone]
    for first in range(0, len(others), AT_ONCE):
        group = others[first : first + AT_ONCE]
        found = await asyncio.gather(*[outcome(reader, case.url.replace("PORT", str(world.port))) for _, case in group])
        for (number, case), one in zip(group, found, strict=True):
            judge(number, case, one)


async def test_a_thousand_hostile_images_are_refused_by_their_part_or_read_right(certificates, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cases = [draw(number) for number in range(NUMBER)]
    assert len(Counter(case.kind for case in cases)) == 17
    async with World(certificates) as world:
        warm = world.reader()
        await outcome(warm, next(case.url for case in cases if case.kind == "sound"))
        warm.close()
        await asyncio.sleep(0.1)
        before, tasks = left_behind(), len(asyncio.all_tasks())
        reader = world.reader()
        await _try(world, reader, cases)
        assert reader._fetcher._free._value == MAX_FETCHES
        assert reader._pool._work_queue.qsize() == 0
        reader.close()
        for _ in range(50):
            if (after := left_behind()) == before and len(asyncio.all_tasks()) == tasks:
                break
            await asyncio.sleep(0.1)
        assert (after, len(asyncio.all_tasks())) == (before, tasks)
    assert not list(tmp_path.iterdir())
