"""`penstock bench serve`: puts dataset, arrivals, sender and report together."""

import argparse
import asyncio
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.client.bench.arrivals import arrival_times, drive
from penstock.client.bench.datasets import (
    DatasetError,
    Lengths,
    Request,
    conversation_requests,
    prefix_requests,
    random_requests,
    read_conversations,
    read_trace,
    trace_requests,
)
from penstock.client.bench.images import NO_IMAGES, RandomImages
from penstock.client.bench.outcome import Outcome
from penstock.client.bench.prompts import Prompts, load_tokenizer
from penstock.client.bench.records import Record
from penstock.client.bench.report import Cost, summarize
from penstock.client.bench.saturation import Watcher, read
from penstock.client.bench.sender import CHAT, Sender
from penstock.client.bench.show import Progress, result_path, save, show
from penstock.client.server import Server, ServerError

DEFAULT_PROMPTS = 1000
_RETRY_S = 1.0
# Streams of random numbers for one seed, so that arrivals do not depend on how prompts are drawn.
_PROMPTS, _ARRIVALS, _WARM_UP = range(3)


class Interrupted(Exception):
    """Ctrl-C, after the report of what was done by then."""


@dataclass(frozen=True)
class Load:
    """What to send and when."""

    count: int
    timed: Iterable[tuple[float, Request]]
    """Seconds after the start."""


async def run(args: argparse.Namespace) -> int:
    """Runs a benchmark as the flags say. Raises `DatasetError`, `ServerError` and, after the report, `Interrupted`."""
    async with Server(args.base_url, dict(args.header)) as server:
        model = args.model or await server.first_model()
        tokenizer = await load_tokenizer(args.tokenizer, server)
        prompts = Prompts(tokenizer, as_text=args.endpoint.endswith(CHAT))
        load = make_load(args, prompts)
        fields = {"temperature": args.temperature, **({"ignore_eos": True} if args.ignore_eos else {}), **args.extra_body}
        sender = Sender(server, args.endpoint, model, fields)
        load = await _warm_up(args, sender, prompts, load)
        path = result_path(args, model) if args.save_result or args.save_detailed else None
        watcher = Watcher(server, args.metrics_url or [server.url("/metrics")])
        if not await watcher.look():
            if args.metrics_url:
                raise ServerError("metrics", f"no gauges of an engine at {' or '.join(args.metrics_url)}")
            watcher = None
        outcome = await measure(args, sender, load, model, watcher)
    show(args, outcome)
    if path is not None:
        save(path, args, outcome)
    if outcome.interrupted:
        raise Interrupted
    return 1 if outcome.report.errors else 0


def make_load(args: argparse.Namespace, prompts: Prompts) -> Load:
    """The requests and their times; raises `DatasetError`."""
    rng = np.random.default_rng([args.seed, _PROMPTS])
    times: Iterator[float] | None = None
    requests: Iterable[Request]
    if args.dataset_name == "trace":
        rows = read_trace(_path(args))
        count = _count(args, len(rows))
        requests = trace_requests(rows[:count], prompts, args.seed, args.trace_block_size, args.trace_length_scale)
        if args.request_rate is None:
            times = (row.at / args.trace_speedup for row in rows)
    elif args.dataset_name == "sharegpt":
        turns = read_conversations(_path(args))
        requests = conversation_requests(turns, prompts.tokenizer, rng, args.sharegpt_output_len)
        count = _count(args, len(requests))
    else:
        count = args.num_prompts or DEFAULT_PROMPTS
        requests = list(itertools.islice(_endless(args, prompts, rng), count))
    if times is None:
        rate = math.inf if args.request_rate is None else args.request_rate
        times = arrival_times(rate, args.burstiness, np.random.default_rng([args.seed, _ARRIVALS]))
    return Load(count, itertools.islice(zip(times, requests, strict=False), count))


def _endless(args: argparse.Namespace, prompts: Prompts, rng: np.random.Generator) -> Iterator[Request]:
    if args.dataset_name == "prefix_repetition":
        return prefix_requests(
            prompts,
            rng,
            num_prefixes=args.prefix_repetition_num_prefixes,
            prefix_len=args.prefix_repetition_prefix_len,
            suffix_len=args.prefix_repetition_suffix_len,
            output_len=args.prefix_repetition_output_len,
        )
    inputs = Lengths(args.random_input_len, args.random_range_ratio)
    outputs = Lengths(args.random_output_len, args.random_range_ratio)
    return random_requests(prompts, rng, inputs, outputs, args.random_prefix_len, _images(args))


def _images(args: argparse.Namespace) -> RandomImages:
    if not args.random_mm_base_items_per_request or args.dataset_name != "random":
        return NO_IMAGES
    if not args.endpoint.endswith(CHAT):
        raise DatasetError(f"--random-mm-base-items-per-request needs --endpoint /v1{CHAT}: {args.endpoint} takes no images")
    return RandomImages(args.random_mm_base_items_per_request, *args.random_mm_image_size)


def _path(args: argparse.Namespace) -> Path:
    if args.dataset_path is None:
        raise DatasetError(f"--dataset-name {args.dataset_name} needs --dataset-path")
    return args.dataset_path


def _count(args: argparse.Namespace, available: int) -> int:
    """Return the number of requests. A dataset's requests are not repeated, since the prefix cache would answer them."""
    if not available:
        raise DatasetError(f"{args.dataset_path} holds no request that can be used")
    if (args.num_prompts or 0) > available:
        raise DatasetError(f"--num-prompts {args.num_prompts} is more than the {available} that {args.dataset_path} holds")
    return args.num_prompts or available


async def _warm_up(args: argparse.Namespace, sender: Sender, prompts: Prompts, load: Load) -> Load:
    """Sends requests of the first one's size and other tokens, so that it does not find itself in the cache."""
    timed = iter(load.timed)
    first = next(timed)
    prompt = first[1].prompt
    size = len(prompt) if isinstance(prompt, list) else len(prompts.tokenizer.encode(prompt, add_special_tokens=False).ids)
    rng = np.random.default_rng([args.seed, _WARM_UP])
    deadline = time.perf_counter() + args.ready_check_timeout_sec
    images, done = _images(args), 0
    while done < args.num_warmups:
        warm = Request(prompts.prompt(prompts.tokens(rng, size), rng), first[1].output_len, images.draw(rng))
        record = await sender.send(time.perf_counter(), warm)
        if record.error is None:
            done += 1
        elif record.error in ("connection", "HTTP 503") and time.perf_counter() < deadline:
            await asyncio.sleep(_RETRY_S)
        else:
            raise ServerError(record.error, f"the warm-up request failed: {record.message}")
    return Load(load.count, itertools.chain([first], timed))


async def measure(args: argparse.Namespace, sender: Sender, load: Load, model: str, watcher: Watcher | None) -> Outcome:
    """The run itself. A cancellation from outside ends it early, with the report of what is there."""
    records: list[Record] = []
    interrupted = False
    with Progress(load.count) as progress:

        async def one(due: float, request: Request) -> None:
            sent = time.perf_counter()
            try:
                record = await sender.send(due, request)
            except asyncio.CancelledError:
                records.append(Record(sent, due, error="interrupted"))
                raise
            records.append(record)
            progress.add(record)

        watching = asyncio.create_task(watcher.run()) if watcher else None
        start, cpu = time.perf_counter(), time.process_time()
        try:
            await drive(load.timed, one, args.max_concurrency)
        except asyncio.CancelledError:
            interrupted = True
        duration, cpu = time.perf_counter() - start, time.process_time() - cpu
        if watching:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
    cost = Cost(args.num_devices, args.cost_per_hour)
    report = summarize(records, duration, args.metric_percentiles, dict(args.goodput), cost)
    return Outcome(
        model=model,
        start=start,
        records=records,
        report=report,
        saturation=read(watcher.samples) if watcher else None,
        missed_looks=watcher.missed if watcher else 0,
        cpu_share=cpu / duration,
        cpu_us_per_token=cpu / report.output_tokens * 1e6 if report.output_tokens else None,
        interrupted=interrupted,
    )
