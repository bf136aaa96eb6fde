"""The frontend process: starts everything, waits for the end, and ends it in order."""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, Literal

import msgspec
from aiohttp import web

from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.core.ipc.client import CoreClient
from penstock.engine.frontend import banner
from penstock.engine.frontend.async_llm import AsyncLLM, State
from penstock.engine.frontend.core_link import Core
from penstock.engine.frontend.cores import core_clients
from penstock.engine.frontend.data_parallel import check_ports, port_of
from penstock.engine.frontend.http.server import ApiServer
from penstock.engine.frontend.http.settings import ApiSettings
from penstock.engine.frontend.observe.log_stats import log_stats
from penstock.engine.frontend.observe.shared_counts import SharedCounts
from penstock.engine.frontend.observe.traces import Traces
from penstock.engine.frontend.openai.kv_transfer import KVTransfer
from penstock.engine.frontend.python.prompts import load_processor
from penstock.engine.kv_events_config import KVEventsConfig
from penstock.engine.stats import CoreStats

log = logging.getLogger(__name__)

# How long handlers get to tell their clients that the core is gone.
_LAST_WORDS_S = 2.0
_LOOK_S = 0.05
"""Between two looks at what cores tell."""
ADMIN: Final = "--admin-port"
EVENTS_PORT: Final = 5557
REPLAY_PORT: Final = 5558


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the frontend needs beside the engine's configuration."""

    engine: EngineConfig
    host: str
    port: int
    events_port: int | None = None
    """None: `EVENTS_PORT`, or a free one where that is taken."""
    replay_port: int | None = None
    """None: `REPLAY_PORT`, or a free one where that is taken."""
    kv_events: KVEventsConfig | None = None
    """Where KV events are published in vLLM's form too; None: nowhere."""
    admin_port: int | None = None
    """Port on which alone adapters are loaded and the engine is controlled; None: on `port`."""
    shutdown_timeout: float
    """Seconds that running requests get after SIGTERM."""
    metrics_compat: Literal["vllm"] | None = None
    """Additional names of the metrics."""
    log_stats: bool = True
    """Whether the log says every ten seconds what the engine did."""
    enable_control_endpoints: bool = False
    stream_interval: int = 1
    """Tokens that an event of a stream has at least, but for the first and the last one."""
    api_server_count: int = 1
    """Frontend processes."""
    api: ApiSettings = ApiSettings()

    @property
    def url(self) -> str:
        """URL of the API for a client on this machine."""
        scheme = "http" if self.api.tls is None else "https"
        host = "localhost" if self.host in ("0.0.0.0", "::", "") else f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"


async def serve(config: ServeConfig) -> int:
    """Serves until a signal or the core's end; returns the exit status.

    0 after SIGTERM or SIGINT, 1 when the core died or requests had to be cut off. Raises `ConfigError` for a port that is taken
    and for tokenizer files that cannot be used, `CoreError` where the core cannot start.
    """
    ending = Ending()
    ending.on_signals()
    cores = clients(config)
    try:
        return await serve_http(cores, config, ending)
    finally:
        await asyncio.gather(*(core.close() for core in cores))


def clients(config: ServeConfig, shared: bool = False) -> list[CoreClient]:
    """The cores of a replica by rank, to be started; `shared` where several frontends will join them."""
    host, size = _zmq_host(config.host), config.engine.parallel.data_parallel_size
    check_ports(config.events_port or EVENTS_PORT, config.replay_port or REPLAY_PORT, size)

    def events(rank: int) -> list[str]:
        return _addresses(host, config.events_port, EVENTS_PORT, rank)

    def replay(rank: int) -> list[str]:
        return _addresses(host, config.replay_port, REPLAY_PORT, rank)

    return core_clients(config.engine, events, replay, kv_events=config.kv_events, shared=shared)


def _addresses(host: str, port: int | None, default: int, rank: int) -> list[str]:
    """Return the addresses to try, in this order. A port that was requested is tried alone, since clients will look for it
    there."""
    ports = (port_of(default, rank), "*") if port is None else (port_of(port, rank),)
    return [f"tcp://{host}:{at}" for at in ports]


async def serve_http(
    cores: Sequence[Core], config: ServeConfig, ending: "Ending", counts: Sequence[SharedCounts] | None = None
) -> int:
    """One frontend, from before the model is loaded until there is nothing left to answer; see `serve`.

    Args:
        cores: The clients of its cores, not yet started.
        config: How to serve.
        ending: Says when to end.
        counts: By core, where several frontends count, which then share the port too; None: this is the only one.
    """
    engine = config.engine
    processor, seed = load_processor(engine), engine.seed + cores[0].first_number
    scheduler, watchdog = engine.scheduler, engine.watchdog_timeout
    limits = scheduler.policy, watchdog, scheduler.max_num_waiting, engine.parallel.is_in_step
    llm = AsyncLLM(cores, engine.model, processor, seed, *limits)
    llm.stream_interval = config.stream_interval
    for rank, own in zip(llm.ranks, counts or (), strict=counts is not None):
        own.join(rank.metrics.table)
    endpoint = config.api.otlp_traces_endpoint
    traces = None if endpoint is None else Traces(endpoint, engine.model.served_names[0], f"{config.host}:{config.port}")
    vllm_names = config.metrics_compat == "vllm"
    control, apart = config.enable_control_endpoints, config.admin_port is not None
    drafts = None if engine.speculative is None else engine.speculative.method
    transfer = None if engine.transfer is None else KVTransfer(engine.transfer, engine.parallel, drafts)
    server = ApiServer(llm, config.api, vllm_names, control=control, traces=traces, admin_apart=apart, transfer=transfer)
    reporters: list[asyncio.Task[None]] = []
    if config.log_stats and cores[0].first_number == 0:  # one of several frontends speaks for all
        names = [f"rank {rank.rank}: " if len(llm.ranks) > 1 else "" for rank in llm.ranks]
        reporters += [asyncio.create_task(log_stats(rank.metrics, name)) for rank, name in zip(llm.ranks, names, strict=True)]
    if traces is not None:
        reporters.append(asyncio.create_task(traces.run()))
    try:
        # Before the model is loaded: probes get answers from the start, and a port that is taken is found at once.
        async with _listening(server, config, shared=counts is not None):
            return await _run(llm, server, ending, config)
    finally:
        for reporter in reporters:
            reporter.cancel()
        await asyncio.gather(*reporters, return_exceptions=True)
        await llm.close()


@asynccontextmanager
async def _listening(server: ApiServer, config: ServeConfig, *, shared: bool) -> AsyncIterator[None]:
    """On all ports, `shared` with other frontends or not; handlers that run at its end get `_LAST_WORDS_S`."""
    tls = None if config.api.tls is None else config.api.tls.context()
    async with AsyncExitStack() as stack:
        for flag, port in http_ports(config).items():
            runner = server.runner(_LAST_WORDS_S, admin=flag == ADMIN)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            try:
                await web.TCPSite(runner, config.host, port, ssl_context=tls, reuse_port=shared).start()
            except OSError as error:
                raise port_error(config.host, flag, port, error) from error
        yield


def http_ports(config: ServeConfig) -> dict[str, int]:
    """Return the ports by the flags that name them."""
    return {"--port": config.port} | ({} if config.admin_port is None else {ADMIN: config.admin_port})


def port_error(host: str, flag: str, port: int, error: OSError) -> ConfigError:
    """Return the error for an address that cannot be listened on."""
    return ConfigError(f"--host {host} {flag} {port}: {error.strerror}")


async def _run(llm: AsyncLLM, server: ApiServer, ending: "Ending", config: ServeConfig) -> int:
    starting = asyncio.create_task(llm.start())
    stopping = asyncio.create_task(ending.stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        return 0
    await starting
    # What exists now stays: no collection, which would hold up every stream, need look at it again.
    gc.collect()
    gc.freeze()
    log.info("serving %s on %s", config.engine.model.served_names[0], config.url)
    if config.api_server_count == 1:  # else the supervisor shows it, once for all
        assert llm.ready is not None
        banner.show(config, llm.ready.kernels, llm.ready.num_blocks)
    await any_of(ending.stop.wait(), llm.failed.wait())
    if llm.failed.is_set() and llm.is_alive:
        log.info("a data-parallel rank has failed: the requests of the others have %.0f s", config.shutdown_timeout)
        await any_of(server.active.drained(), ending.now.wait(), seconds=config.shutdown_timeout)
        llm.cut_off()
    if not llm.failed.is_set():
        llm.state = State.DRAINING
        log.info("draining: running requests have %.0f s", config.shutdown_timeout)
        over = _drained(llm, server, lends=config.engine.transfer is not None and config.engine.transfer.lends)
        await any_of(over, llm.failed.wait(), ending.now.wait(), seconds=config.shutdown_timeout)
    if server.active.idle and not llm.failed.is_set():
        return 0
    if not llm.failed.is_set():
        log.warning("cutting off the requests that still run")
        llm.cut_off()
    await any_of(server.active.drained(), seconds=_LAST_WORDS_S)
    return 1


async def _drained(llm: AsyncLLM, server: ApiServer, *, lends: bool) -> None:
    """Waits until no request runs, and no other replica needs pages of a prompt that was computed here."""
    await server.active.drained()
    ranks = [(rank, rank.stats) for rank in llm.ranks]  # a lease may be newer than these
    while lends and any(rank.stats is before or _num_leases(rank.stats) for rank, before in ranks):  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(_LOOK_S)


def _num_leases(stats: CoreStats | None) -> int:
    transfer = None if stats is None or stats.offload is None else stats.offload.transfer
    return 0 if transfer is None else transfer.leases


async def any_of(*waits: Coroutine[Any, Any, Any], seconds: float | None = None) -> None:
    """Waits until one of several is over, or the time."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


class Ending:
    """Signals the end to a frontend: `stop`, which drains, and `now`, which does not."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.now = asyncio.Event()

    def on_signals(self) -> None:
        """SIGTERM or SIGINT: `stop`. SIGINT after that: `now`."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)

    def _interrupt(self) -> None:
        (self.now if self.stop.is_set() else self.stop).set()


def _zmq_host(host: str) -> str:
    """ZMQ binds to addresses, not to names."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    return f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])
