"""The server fetches images for strangers: from allowed names at public addresses alone, and nothing makes it go elsewhere."""

import asyncio
import base64
import io
import os
import ssl
import sys
import threading
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from PIL import Image

from penstock.engine.frontend.http.exchange import Asked
from penstock.engine.frontend.http.prefill import _messages
from penstock.engine.frontend.images import with_files
from penstock.engine.multimodal.addresses import is_public
from penstock.engine.multimodal.clip import MEAN, STD
from penstock.engine.multimodal.decode import decode_image
from penstock.engine.multimodal.fetch import Fetcher
from penstock.engine.multimodal.reader import WORKERS, ImageReader
from penstock.engine.multimodal.settings import ClipSettings, ImageSettings, Normalization
from penstock.prompt.data_url import MAX_IMAGE_BYTES
from penstock.prompt.errors import PromptError
from penstock.prompt.images import ImagePart, read_image_part
from penstock.prompt.processor import CHAT_PATH, RESPONSES_PATH

HOST, PARAM = "images.example", "messages[0].content[0].image_url.url"
CLIP = ClipSettings(size=28, shortest_edge=28, resample=3)
SETTINGS = ImageSettings(token_id=0, tokens=4, normalization=Normalization(1 / 255, MEAN, STD), resize=CLIP, limit=3)


def picture() -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (40, 50), (200, 30, 60)).save(data, "PNG")
    return data.getvalue()


@pytest.fixture(scope="module")
def certificates(make_authority, tmp_path_factory):
    return make_authority().mount(tmp_path_factory.mktemp("tls"), name=HOST)


class Site:
    """An HTTPS server on this machine, which answers to HOST."""

    def __init__(self) -> None:
        self.asked: list[web.Request] = []
        self.answer = web.Response(body=picture(), content_type="image/png")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        if request.path == "/slow":
            await asyncio.sleep(30)
        if request.path == "/endless":
            response = web.StreamResponse()
            await response.prepare(request)
            try:
                while True:
                    await response.write(b"x" * 2**20)
            except ConnectionError:
                return response
        return self.answer


@asynccontextmanager
async def serving(certificates):
    site, server = Site(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificates / "tls.crt", certificates / "tls.key")
    runner = web.ServerRunner(web.Server(site.handle), shutdown_timeout=0.1)
    await runner.setup()
    tcp = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server)
    await tcp.start()
    yield site, tcp._server.sockets[0].getsockname()[1]
    await runner.cleanup()


def fetcher_for(certificates, port, resolved=("127.0.0.1",), permits=lambda address: True, **options):
    async def resolve(_host: str, _port: int) -> list[str]:
        lookups.append(_host)
        return list(resolved)

    lookups: list[str] = []
    tls = ssl.create_default_context(cafile=certificates / "ca.crt")
    fetcher = Fetcher([HOST], resolve=resolve, permits=permits, tls=tls, port=port, **options)
    return fetcher, lookups


async def refused(fetcher: Fetcher, url: str) -> str:
    with pytest.raises(PromptError) as caught:
        await fetcher.fetch(url, PARAM)
    assert caught.value.param == PARAM
    assert str(caught.value).startswith(PARAM)
    return str(caught.value)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::5db8:d822", True),
        *((address, False) for address in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254")),
        *((address, False) for address in ("100.64.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1", "240.0.0.1", "192.0.2.1")),
        *((address, False) for address in ("::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "2001:db8::1", "::7f00:1")),
        *((address, False) for address in ("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::1")),
    ],
)
def test_public_addresses(address, public):
    assert is_public(address) is public


async def test_a_file_comes_from_the_address_that_was_checked_and_nothing_of_ours_goes_there(certificates, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    checked = []
    async with serving(certificates) as (site, port):
        permits = lambda address: checked.append(address) or True  # noqa: E731
        fetcher, lookups = fetcher_for(certificates, port, permits=permits)
        assert await fetcher.fetch(f"https://{HOST}:{port}/a.png?x=1#y", PARAM) == picture()
        assert (lookups, checked) == ([HOST], ["127.0.0.1"])
        [request] = site.asked
        assert request.path_qs == "/a.png?x=1"
        assert not {"authorization", "cookie", "referer"} & {name.lower() for name in request.headers}


async def test_a_name_with_any_private_address_is_refused_and_nothing_is_sent(certificates):
    async with serving(certificates) as (site, port):
        for addresses in (["127.0.0.1"], ["93.184.216.34", "127.0.0.1"], ["::ffff:127.0.0.1"]):
            fetcher, _ = fetcher_for(certificates, port, addresses, permits=is_public)
            assert "outside the public internet" in await refused(fetcher, f"https://{HOST}:{port}/a.png")
        for host in ("127.0.0.1", "[::1]"):
            fetcher = Fetcher([host.strip("[]")], port=port)
            assert "outside the public internet" in await refused(fetcher, f"https://{host}:{port}/a.png")
        assert not site.asked


async def test_urls_that_name_something_else_are_refused(certificates):
    fetcher, lookups = fetcher_for(certificates, 443)
    for url, why in (
        (f"http://{HOST}/a.png", "https"),
        ("file:///etc/passwd", "https"),
        ("ftp://images.example/a", "https"),
        ("nonsense", "https"),
        ("https://", ""),
        ("https://other.example/a.png", "--allowed-media-domains"),
        (f"https://{HOST}.other.example/a.png", "--allowed-media-domains"),
        (f"https://{HOST}@other.example/a.png", ""),
        (f"https://user:secret@{HOST}/a.png", "user name"),
        (f"https://{HOST}:22/a.png", "port 22"),
        (f"https://{HOST}:99999/a.png", ""),
    ):
        assert why in await refused(fetcher, url)
    assert not lookups
    assert "--allowed-media-domains" in await refused(Fetcher([]), f"https://{HOST}/a.png")


async def test_answers_other_than_a_file_are_refused(certificates):
    async with serving(certificates) as (site, port):
        fetcher, lookups = fetcher_for(certificates, port, timeout_s=60.0)
        for answer, why in (
            (web.Response(status=302, headers={"location": f"https://{HOST}:{port}/b.png"}), "redirect"),
            (web.Response(status=404), "404"),
            (web.Response(body=b"x", headers={"content-encoding": "gzip"}), "compressed"),
            (web.Response(body=b"x" * (MAX_IMAGE_BYTES + 1)), "bytes"),
        ):
            site.answer = answer
            assert why in await refused(fetcher, f"https://{HOST}:{port}/a.png")
        assert len(site.asked) == 4  # nobody followed the redirect
        assert "more than" in await refused(fetcher, f"https://{HOST}:{port}/endless")
        assert len(lookups) == 5
        impatient, _ = fetcher_for(certificates, port, timeout_s=0.5)
        assert "within 0.5 s" in await refused(impatient, f"https://{HOST}:{port}/slow")
    assert "could not be fetched" in await refused(fetcher, f"https://{HOST}:{port}/a.png")


async def test_images_are_read_in_order_and_equal_ones_once(certificates):
    data = "data:image/png;base64," + base64.b64encode(picture()).decode()
    async with serving(certificates) as (site, port):
        fetcher, _ = fetcher_for(certificates, port)
        reader = ImageReader(SETTINGS, fetcher)
        url = f"https://{HOST}:{port}/a.png"
        images = await reader.read([ImagePart(url, "a"), ImagePart(data, "b"), ImagePart(url, "c")])
        assert len(site.asked) == 1
        assert len({image.identifier for image in images}) == 1  # by content, wherever it came from
        assert images[0].pixels == images[1].pixels
        assert (images[0].pixels.height, len(images[0].pixels.data)) == (28, 28 * 28 * 3)
        with pytest.raises(PromptError, match="at most 3 images") as caught:
            await reader.read([ImagePart(data, str(at)) for at in range(4)])
        assert caught.value.param == "3"
        with pytest.raises(PromptError, match=r"^b is not an image"):
            await reader.read([ImagePart(data, "a"), ImagePart("data:image/png;base64,AAAA", "b")])
        if sys.platform == "linux":  # those who read images yield to those who run requests
            assert reader._pool.submit(os.getpriority, os.PRIO_PROCESS, 0).result() == os.getpriority(os.PRIO_PROCESS, 0) + 10
        reader.close()


async def test_images_are_decoded_two_at_a_time_beside_the_event_loop(monkeypatch):
    begun, go = [], threading.Event()

    def decode(data, param):
        begun.append(param)
        assert go.wait(10), "the event loop stood still"
        return decode_image(data, param)

    monkeypatch.setattr("penstock.engine.multimodal.reader.decode_image", decode)
    reader = ImageReader(SETTINGS, Fetcher([]))
    url = "data:image/png;base64," + base64.b64encode(picture()).decode()
    reads = [asyncio.create_task(reader.read([ImagePart(url, str(number))])) for number in range(5)]
    while len(begun) < WORKERS:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert len(begun) == WORKERS == 2
    go.set()
    assert len({image.identifier for [image] in await asyncio.gather(*reads)}) == 1
    assert sorted(begun) == ["0", "1", "2", "3", "4"]
    reader.close()


async def test_the_memory_of_large_images_goes_back_to_the_system(monkeypatch):
    """Of damaged ones too. The C library would keep more than a gigabyte where images are as large as they may be."""
    returned: list[int] = []
    monkeypatch.setattr("penstock.engine.multimodal.reader.return_free_memory", lambda: returned.append(1))
    large = io.BytesIO()
    Image.new("L", (2001, 2001)).save(large, "PNG", compress_level=1)
    reader = ImageReader(SETTINGS, Fetcher([]))
    for data, times in ((picture(), 0), (large.getvalue(), 1), (large.getvalue()[:1000], 2)):
        try:
            await reader.read([ImagePart("data:image/png;base64," + base64.b64encode(data).decode(), PARAM)])
        except PromptError:
            assert times == 2
        assert len(returned) == times
    reader.close()


async def test_a_prefill_replica_gets_the_files_that_this_one_has_fetched(certificates):
    """It reads the same images, and asks nobody for them."""
    async with serving(certificates) as (site, port):
        url = f"https://{HOST}:{port}/a.png"
        reader = ImageReader(SETTINGS, fetcher_for(certificates, port)[0])
        [here] = await reader.read([ImagePart(url, PARAM)])
        reader.close()
    part, text = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}, {"type": "text", "text": "see"}
    chat = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": [text, part, part]}]}
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": url}]
    offline = ImageReader(SETTINGS, Fetcher([]))
    for path, body, images in ((CHAT_PATH, chat, 2), (RESPONSES_PATH, {"input": [{"role": "user", "content": parts}]}, 1)):
        sent = _messages(path, Asked(body, [here.fetched]))["messages"]
        found = [read_image_part(one, "part") for one in sent[-1]["content"] if one["type"] == "image_url"]
        there = await offline.read(found)
        assert [one.identifier for one in there] == [here.identifier] * images
        assert sent[-1]["content"][0]["text"] == "see"
    offline.close()
    assert chat["messages"][1]["content"] == [text, part, part], "the request itself has changed"
    assert len(site.asked) == 1
    # What would not fit into a body is fetched there.
    assert with_files(chat["messages"], [here.fetched], len(here.fetched.data)) == chat["messages"]
