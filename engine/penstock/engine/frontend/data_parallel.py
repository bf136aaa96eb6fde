"""Which of a replica's data-parallel ranks takes a request, and what they are together. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.api.events import MEDIA
from penstock.api.headers import DATA_PARALLEL_RANK
from penstock.api.load_report import LoadReport, WaitingReason
from penstock.engine.commands import Command, PinPrefix, UnpinPrefix
from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.core.ipc.calls import CommandRefused
from penstock.engine.frontend.errors import ApiError

_WAITING_WEIGHT = 4
"""A waiting sequence says more of a rank than a running one: no room is left."""
_SUMS = (
    *("num_requests_running", "max_num_seqs", "kv_blocks_total", "kv_blocks_reclaimable", "prefill_backlog_tokens"),
    *("prefill_tokens_per_s", "prompt_tokens_per_s", "generation_tokens_per_s", "lora_slots", "lora_slots_free"),
    *(f"{medium}_tier_tokens_per_s" for medium in MEDIA),
)


def busyness(report: LoadReport | None, live: int) -> int:
    """How much a rank has to do.

    Args:
        report: Its newest; None: it has made none so far.
        live: Sequences that this frontend has sent and that have not ended. The report may be older; other frontends send too.
    """
    if report is None:
        return live
    known = report.num_requests_running + report.waiting
    return max(known, live) + (_WAITING_WEIGHT - 1) * report.waiting


def pick(busy: Sequence[int], turn: int) -> int:
    """The rank with the least to do; of equal ones the first from `turn` on, so that an idle replica uses all of them."""
    count = len(busy)
    return min(((turn + step) % count for step in range(count)), key=lambda rank: busy[rank])


def header_rank(value: str | None, size: int) -> int | None:
    """The rank that a request asks for; None: any. `ApiError` 400, with the range, where there is no such rank."""
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and int(value) < size):
        message = f"{DATA_PARALLEL_RANK} must be a whole number from 0 to {size - 1}, not {value[:20]!r}"
        raise ApiError(400, message, param=DATA_PARALLEL_RANK)
    return int(value)


def merged(reports: Sequence[LoadReport]) -> LoadReport:
    """The load of all ranks as that of one replica. Its epoch is the first rank's, and its `seq` above every rank's own: so it
    replaces what the first rank's event stream says of that rank alone."""
    first = reports[0]
    if len(reports) == 1:
        return first
    total = sum(report.kv_blocks_total for report in reports)
    held = sum(report.kv_cache_usage_perc * report.kv_blocks_total for report in reports)
    adapters = [set(report.adapters) for report in reports if report.adapters is not None]
    waiting: dict[WaitingReason, int] = {}
    for report in reports:
        for reason, count in report.num_requests_waiting.items():
            waiting[reason] = waiting.get(reason, 0) + count
    return msgspec.structs.replace(
        first,
        seq=sum(report.seq for report in reports),
        num_requests_waiting=waiting,
        kv_cache_usage_perc=held / total if total else 0.0,
        decode_step_s=max(report.decode_step_s for report in reports),
        lora_running=_added([report.lora_running for report in reports]),
        lora_waiting=_added([report.lora_waiting for report in reports]),
        adapters=tuple(name for name in first.adapters or () if all(name in own for own in adapters)) if adapters else None,
        **{name: sum(getattr(report, name) for report in reports) for name in _SUMS},
    )


def _added(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(own.get(name, 0) for own in counts) for name in dict.fromkeys(name for own in counts for name in own)}


def rank_config(config: EngineConfig, rank: int) -> EngineConfig:
    """What one rank's core is started with: its files lie in a folder of its own."""
    if config.parallel.data_parallel_size == 1:
        return config
    cache, folder = config.cache, config.cache.disk_folder
    if folder is not None:
        cache = msgspec.structs.replace(cache, disk_folder=folder / f"rank-{rank}")
    return msgspec.structs.replace(config, cache=cache)


def port_of(base: int, rank: int) -> int:
    """The port of a rank's event stream, or of its replay: every second one, as the two lie side by side by default."""
    return base + 2 * rank


def check_ports(events: int, replay: int, size: int) -> None:
    """`ConfigError` where the ports of several ranks' event streams and replays meet, or go beyond the last port."""
    streams = {port_of(events, rank) for rank in range(size)}
    replays = {port_of(replay, rank) for rank in range(size)}
    if both := streams & replays:
        raise ConfigError(
            f"--events-port {events} and --replay-port {replay}: with --data-parallel-size {size} each rank has the second port "
            f"after the one before, and both would use {min(both)}"
        )
    if (last := max(streams | replays)) > 65_535:
        raise ConfigError(f"--data-parallel-size {size}: the last rank's event port would be {last}")


def combined(command: Command, results: Sequence[Any]) -> Any:
    """The result of a command that every rank was told: the first rank's with those of all as `data_parallel_ranks`, or None
    where there is nothing to tell.

    Args:
        command: What they were told.
        results: By rank; an exception in place of what a rank has raised.

    Raises:
        CommandRefused: A rank has refused it; of a pinned prefix, which is where the requests have been, every rank.
        Exception: Any other that a rank has raised.
    """
    for error in results:
        if isinstance(error, BaseException) and not isinstance(error, CommandRefused):
            raise error
    refused = {rank: error for rank, error in enumerate(results) if isinstance(error, CommandRefused)}
    if len(refused) == len(results) or (refused and not isinstance(command, PinPrefix | UnpinPrefix)):
        rank, error = next(iter(refused.items()))
        raise CommandRefused(str(error) if len(refused) == len(results) else f"data-parallel rank {rank}: {error}")
    told = [None if isinstance(result, CommandRefused) else result for result in results]
    first = next((result for result in told if result is not None), None)
    return None if first is None else {**first, "data_parallel_ranks": told}
