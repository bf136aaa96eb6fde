"""Spans on their way to a collector, which may not take them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from penstock.api.tracing import Span, TraceContext
from penstock.http import span_exporter
from penstock.http.span_exporter import SpanExporter

SPAN = Span(name="s", context=TraceContext.root(), parent=None, start_s=1.5, end_s=2.0)


class Collector:
    """Counts what it is sent, or refuses it."""

    def __init__(self) -> None:
        self.takes = True
        self.sizes: list[int] = []
        self.heard = asyncio.Event()

    async def post(self, request: web.Request) -> web.Response:
        if not self.takes:
            return web.Response(status=503)
        assert request.content_type == "application/json"
        self.sizes.append(len(json.loads(await request.read())["resourceSpans"][0]["scopeSpans"][0]["spans"]))
        self.heard.set()
        return web.Response()


@contextlib.asynccontextmanager
async def exporting() -> AsyncIterator[tuple[Collector, SpanExporter]]:
    collector, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", collector.post)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield collector, SpanExporter(f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces", {})
    finally:
        await runner.cleanup()


async def test_what_waits_is_bounded_and_what_is_not_taken_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(span_exporter, "MAX_WAITING", 10)
    monkeypatch.setattr(span_exporter, "MAX_BATCH", 4)
    async with exporting() as (collector, exporter), aiohttp.ClientSession() as session:
        collector.takes = False
        for _ in range(15):
            exporter.add(SPAN)
        await exporter.flush(session)  # four are lost, besides the five for which there was no room
        await exporter.flush(session)
        assert caplog.text.count("traces are lost") == 1
        collector.takes = True
        await exporter.flush(session)
        assert collector.sizes == [2]
        assert "13 spans are lost" in caplog.text


async def test_spans_go_by_themselves_and_the_last_of_them_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_exporter, "EXPORT_EVERY_S", 0.01)
    async with exporting() as (collector, exporter):
        exporter.add(SPAN)
        running = asyncio.create_task(exporter.run())
        await asyncio.wait_for(collector.heard.wait(), 60)
        monkeypatch.setattr(span_exporter, "EXPORT_EVERY_S", 3600.0)
        exporter.add(SPAN)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert sum(collector.sizes) == 2
