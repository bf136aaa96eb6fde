"""The console in a real headless Chromium, over a running gateway."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from penstock.api import headers
from penstock.api.fleet import Adapter, Fleet, Model, Pool
from penstock.gateway.picker.compiled import Compiled, installed

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
pytestmark = [pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Chromium: apt-get install chromium"), pytest.mark.slow]

EVIL = "<img src=x onerror=\"document.title='taken'\">"


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()


@pytest.fixture
def compiled() -> Compiled | None:
    """What is installed: the console shows the same over both forms, and a browser costs seconds."""
    return installed()


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with chromium() as browser:
        page = await browser.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda it: faults.append(it.text) if "Content Security Policy" in it.text else None)
        yield page
        assert not faults


def url(world: Any) -> str:
    return f"http://127.0.0.1:{world.gateway.http_port}/"


async def serving(world: Any, **fields: Any) -> None:
    """Two replicas, of which one has an adapter, and what the autoscaler says."""
    world.engines[0].report = msgspec.structs.replace(
        world.engines[0].report, seq=2, num_requests_running=8, kv_cache_usage_perc=0.25, adapters=("poems",)
    )
    await world.ready()
    fleet = Fleet(
        models=[Model(id="ns/tiny", served_names=["tiny", "alias"])],
        pools=[Pool(id="ns/tiny/p", model="ns/tiny")],
        replicas=world.replicas,
        adapters=[Adapter(id="ns/poems", model="ns/tiny", served_names=["poems"])],
        scaling={"ns/tiny/p": "Demand: 8 requests need 2 replicas"},
        **fields,
    )
    world.discovery.queue.put_nowait(fleet)


async def test_it_shows_the_fleet_and_what_the_autoscaler_says(world: Any, page: Page) -> None:
    await serving(world)
    await page.goto(url(world))
    row = page.get_by_role("table", name="Replicas of ns/tiny/p").get_by_role("row", name="r0")
    await expect(row).to_contain_text("ready")
    await expect(row).to_contain_text("8 of 32")
    await expect(row).to_contain_text("25 %")
    await expect(row).to_contain_text("s ago")
    await expect(page.get_by_text("Autoscaler: Demand: 8 requests need 2 replicas")).to_be_visible()
    await expect(page.get_by_role("table", name="Adapters").get_by_role("row", name="poems")).to_contain_text("r0")
    await expect(page.get_by_role("table", name="Model names").get_by_role("row", name="alias")).to_contain_text("ns/tiny")
    await expect(page.get_by_role("status")).to_have_text("live")
    world.discovery.queue.put_nowait(msgspec.structs.replace(world.state.directory.fleet, replicas=world.replicas[:1]))
    await expect(page.get_by_role("row", name="r1")).to_have_count(0)


async def test_decisions_are_sentences_and_stay_open_and_focused_while_others_come(world: Any, page: Page) -> None:
    await serving(world)
    await world.stream().ask(world.completion(), **{headers.REQUEST_ID: "first"})
    await page.goto(url(world))
    entry = page.locator("#decisions details").first
    await expect(entry.locator("summary")).to_contain_text("tiny went to r")
    await expect(entry.locator("summary")).to_contain_text("64 prompt tokens")
    await entry.locator("summary").focus()
    await page.keyboard.press("Enter")
    await expect(entry).to_contain_text("request first")
    await expect(entry.get_by_role("table", name="Candidates in order of preference")).to_contain_text("prefill_s")
    await world.stream().ask(world.completion(), **{headers.REQUEST_ID: "second"})
    await expect(page.locator("#decisions details")).to_have_count(2)
    assert await page.evaluate("document.activeElement.closest('details').open")
    assert "request first" in await page.evaluate("document.activeElement.closest('details').textContent")


async def test_what_clients_send_stays_text(world: Any, page: Page) -> None:
    await serving(world)
    await world.stream().ask({"model": EVIL, "prompt": "w1"})
    await page.goto(url(world))
    await expect(page.locator("#failures li").first).to_contain_text("onerror")
    await expect(page.locator("#failures li").first).to_contain_text("404")
    assert await page.locator("#failures img").count() == 0
    assert await page.title() == "Penstock"


async def test_it_works_by_keyboard_and_has_names_for_everything(world: Any, page: Page) -> None:
    await serving(world)
    await page.goto(url(world))
    await expect(page.get_by_role("table", name="Replicas of ns/tiny/p")).to_be_visible()
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.textContent") == "Skip to the fleet"
    await page.keyboard.press("Tab")
    await page.keyboard.press("Space")
    await expect(page.get_by_role("button", name="Pause updates")).to_have_attribute("aria-pressed", "true")
    await expect(page.get_by_role("status")).to_have_text("paused")
    await page.keyboard.press("/")
    await page.keyboard.type("r1")
    fleet = page.get_by_role("table", name="Replicas of ns/tiny/p")
    await expect(fleet.get_by_role("row", name="r0")).to_have_count(0)
    await expect(fleet.get_by_role("row", name="r1")).to_have_count(1)
    for section in ("Fleet", "Latest decisions", "Last errors", "Tenants", "Adapters", "Model names", "Envoy"):
        await expect(page.get_by_role("region", name=section, exact=True)).to_be_visible()
    unnamed = "[...document.querySelectorAll('th')].filter((it) => !it.scope).length"
    assert await page.evaluate(unnamed) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_is_readable_in_both_schemes(world: Any, page: Page, scheme: Any) -> None:
    """WCAG 2.2 asks for a contrast of 4.5 between text and its ground."""
    await serving(world)
    await world.stream().ask({"model": "nobody", "prompt": "w1"})
    await page.emulate_media(color_scheme=scheme)
    await page.goto(url(world))
    await expect(page.locator("#failures .warn")).to_be_visible()
    poor = await page.evaluate(_POOR_CONTRAST)
    assert poor == []


_POOR_CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => c.slice(0, 3).map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (it) => { for (; it; it = it.parentElement) { const c = rgb(getComputedStyle(it).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c; } return [255, 255, 255]; };
  const poor = [];
  for (const it of document.querySelectorAll('main *, header *')) {
    const own = [...it.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !it.checkVisibility()) continue;
    const [a, b] = [light(rgb(getComputedStyle(it).color)), light(ground(it))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(it.textContent.slice(0, 40) + ' ' + (a + 0.05) / (b + 0.05));
  }
  return poor;
}"""


@pytest.fixture
def debug_token(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Of the tests that ask for one."""
    if "token" not in request.node.name:
        return None
    (tmp_path / "token").write_text("secret")
    return tmp_path / "token"


async def test_it_asks_for_the_token(world: Any, page: Page) -> None:
    await serving(world)
    await page.goto(url(world))
    field = page.get_by_label("Debug token", exact=True)
    await expect(field).to_be_focused()
    await page.keyboard.type("wrong")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_have_text("This is not the token.")
    await page.keyboard.type("secret")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("table", name="Replicas of ns/tiny/p")).to_be_visible()
    await page.reload()
    await expect(page.get_by_role("table", name="Replicas of ns/tiny/p")).to_be_visible()
