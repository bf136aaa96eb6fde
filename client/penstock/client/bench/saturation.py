"""Was the server full? Its own gauges, read while the load runs: an engine has room while nothing waits and KV memory is left,
and is past the knee of its latency curve when requests pile up."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from penstock.api import metrics
from penstock.client.server import Server, ServerError, check, unreachable

INTERVAL_S: Final = 0.5
_RUNNING: Final = (metrics.NUM_REQUESTS_RUNNING, "vllm:num_requests_running")
_WAITING: Final = (metrics.NUM_REQUESTS_WAITING, "vllm:num_requests_waiting")
_KV: Final = (metrics.KV_CACHE_USAGE, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")

_OFTEN, _SELDOM = 0.5, 0.1  # shares of the samples in which something waits
_KV_FULL: Final = 0.9
_LEAST: Final = 4
"""Samples of a reading: engines refresh their gauges about once a second."""


@dataclass(frozen=True)
class Sample:
    """The gauges of all replicas at one moment."""

    running: float
    waiting: float
    kv_usage: float
    """KV cache usage of the fullest replica, 0 to 1."""


@dataclass(frozen=True)
class Saturation:
    """What the samples of a run say."""

    reading: str
    """`headroom`, `near the knee` or `past the knee`."""
    because: str
    mean_running: float
    mean_waiting: float
    peak_waiting: float
    waiting_share: float
    """Share of the samples in which something waited behind what ran."""
    peak_kv_usage: float


def parse(text: str) -> Sample | None:
    """The gauges in a Prometheus text, Penstock's or vLLM's; None where they are not there. All labels count together."""
    found: dict[str, list[float]] = {name: [] for name in (*_RUNNING, *_WAITING, *_KV)}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in found:
                found[sample.name].append(sample.value)
    running, waiting, kv = ([value for name in names for value in found[name]] for names in (_RUNNING, _WAITING, _KV))
    if not running or not kv:
        return None
    return Sample(sum(running), sum(waiting), max(kv))


def combine(samples: Sequence[Sample]) -> Sample:
    """Replicas together."""
    return Sample(
        sum(sample.running for sample in samples),
        sum(sample.waiting for sample in samples),
        max(sample.kv_usage for sample in samples),
    )


def read(samples: Sequence[Sample]) -> Saturation | None:
    """The reading of a run; None where it was too short for one."""
    if len(samples) < _LEAST:
        return None
    # A request that waits alone is only being picked up.
    waiting = [sample.waiting if sample.running else 0 for sample in samples]
    share = sum(count > 0 for count in waiting) / len(waiting)
    peak_kv = max(sample.kv_usage for sample in samples)
    full = peak_kv >= _KV_FULL
    if share >= _OFTEN:
        reading = "past the knee"
        because = "requests wait, KV memory is full" if full else "requests wait although KV memory is left: another limit binds"
    elif share > _SELDOM or full:
        reading = "near the knee"
        because = "requests wait now and then" if share > _SELDOM else "nothing waits, but KV memory is full"
    else:
        reading, because = "headroom", "hardly anything waits, and KV memory is left"
    return Saturation(
        reading=reading,
        because=because,
        mean_running=sum(sample.running for sample in samples) / len(samples),
        mean_waiting=sum(waiting) / len(samples),
        peak_waiting=max(waiting),
        waiting_share=share,
        peak_kv_usage=peak_kv,
    )


class Watcher:
    """Reads the gauges of some replicas every half second.

    Args:
        server: Whose session is used.
        urls: One `/metrics` a replica.
    """

    def __init__(self, server: Server, urls: Sequence[str]) -> None:
        self._server = server
        self._urls = urls
        self.samples: list[Sample] = []
        self.missed = 0
        """Looks that failed: a replica that does not answer costs a sample, not the run."""

    async def look(self) -> bool:
        """Whether every replica shows the gauges."""
        try:
            return await self._sample() is not None
        except ServerError:
            return False

    async def run(self) -> None:
        """Reads until it is cancelled."""
        while True:
            started = time.perf_counter()
            try:
                sample = await self._sample()
            except ServerError:
                sample = None
            if sample is None:
                self.missed += 1
            else:
                self.samples.append(sample)
            await asyncio.sleep(max(0.0, started + INTERVAL_S - time.perf_counter()))

    async def _sample(self) -> Sample | None:
        samples = [parse(text) for text in await asyncio.gather(*map(self._scrape, self._urls))]
        known = [sample for sample in samples if sample is not None]
        return combine(known) if known and len(known) == len(samples) else None

    async def _scrape(self, url: str) -> str:
        try:
            async with self._server.session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as response:
                await check(response)
                return await response.text()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise unreachable(url, error) from None
