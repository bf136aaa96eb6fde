"""Times of more load that users know beforehand. Pure: the time is an argument."""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from penstock.operator.autoscale.limits import Hint


class ScheduleError(ValueError):
    """A hint that cannot be read; the message says which part."""


def check(hint: Hint) -> None:
    """Raise `ScheduleError` if the hint names no time zone, or no time that ever comes."""
    _next(hint.start, _zone(hint.time_zone), datetime(2000, 1, 1, tzinfo=UTC))


def floor(hints: Sequence[Hint], wall: float, lead_s: float) -> int:
    """The number of replicas that the hints ask for at a moment.

    Args:
        wall: Unix time in seconds.
        lead_s: Each hint begins this many seconds early, so that its replicas are ready in time.

    Raises:
        ScheduleError: see `check`.
    """
    return max((hint.least for hint in hints if _active(hint, wall, lead_s)), default=0)


def _active(hint: Hint, wall: float, lead_s: float) -> bool:
    """Whether the hint starts within the last `duration_s` or the next `lead_s` seconds."""
    earliest = datetime.fromtimestamp(wall - hint.duration_s, UTC).replace(second=0, microsecond=0)  # starts are whole minutes
    start = _next(hint.start, _zone(hint.time_zone), earliest)
    return start <= datetime.fromtimestamp(wall + lead_s, UTC)


@lru_cache(maxsize=4096)
def _next(cron: str, zone: ZoneInfo, after: datetime) -> datetime:
    """The first start after a moment (UTC), with Debian cron's rules on days and on changes to and from summer time."""
    try:
        starts = (start.astimezone(UTC) for start in CronSim(cron, after.astimezone(zone)))
        # An hour that comes twice: the library may answer with its first pass where `after` lies in the second.
        return next(start for start in starts if start > after)
    except (CronSimError, StopIteration) as error:
        raise ScheduleError(f"schedule: {cron!r}: {str(error).lower() or 'this time never comes'}") from None


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ScheduleError(f"schedule: there is no time zone {name!r}") from None
