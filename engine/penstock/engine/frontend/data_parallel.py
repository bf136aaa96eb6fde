"""Which of a replica's data-parallel ranks takes a request, and what they answer together. Pure."""

from collections.abc import Sequence
from typing import Any

from penstock.api.headers import DATA_PARALLEL_RANK
from penstock.api.load_report import LoadReport
from penstock.engine.commands import Command, PinPrefix, UnpinPrefix
from penstock.engine.config import ConfigError
from penstock.engine.core.ipc.calls import CommandRefused
from penstock.engine.frontend.errors import ApiError

_WAITING_WEIGHT = 4
"""A waiting sequence says more of a rank than a running one: no room is left."""


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
