"""Times of more load that users know beforehand. Pure: the time is an argument."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from penstock.operator.autoscale.limits import Hint

_FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day of the month", 1, 31), ("month", 1, 12), ("day of the week", 0, 7))


class ScheduleError(ValueError):
    """A hint that cannot be read; the message says which part."""


def check(hint: Hint) -> None:
    """Raises `ScheduleError` where the hint is none."""
    _cron(hint.start)
    _zone(hint.time_zone)


def floor(hints: Sequence[Hint], wall: float, lead_s: float) -> int:
    """Replicas that the hints ask for at a moment.

    Args:
        wall: Unix time in seconds.
        lead_s: So much earlier a hint begins, so that its replicas are ready in time.

    Raises:
        ScheduleError: see `check`.
    """
    return max((hint.least for hint in hints if _active(hint, wall, lead_s)), default=0)


def _active(hint: Hint, wall: float, lead_s: float) -> bool:
    """Whether a start lies within the last `duration` or the next `lead` seconds."""
    zone = _zone(hint.time_zone)
    latest = datetime.fromtimestamp(wall + lead_s, UTC).replace(second=0, microsecond=0)
    earliest = datetime.fromtimestamp(wall - hint.duration_s, UTC)
    minutes, hours, days, months, weekdays, either = _cron(hint.start)
    day = latest.astimezone(zone).date()
    while datetime(day.year, day.month, day.day, tzinfo=zone) + timedelta(days=1, hours=2) > earliest:
        on_day, on_weekday = day.day in days, day.isoweekday() % 7 in weekdays
        if day.month in months and ((on_day or on_weekday) if either else (on_day and on_weekday)):
            starts = (datetime(day.year, day.month, day.day, hour, minute, tzinfo=zone) for hour in hours for minute in minutes)
            if any(earliest < start.astimezone(UTC) <= latest for start in starts):
                return True
        day -= timedelta(days=1)
    return False


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ScheduleError(f"schedule: there is no time zone {name!r}") from None


@lru_cache(maxsize=1024)
def _cron(text: str) -> tuple[frozenset[int], frozenset[int], frozenset[int], frozenset[int], frozenset[int], bool]:
    """The values of each field, and whether either day will do: as in cron, where both days are restricted."""
    parts = text.split()
    if len(parts) != len(_FIELDS):
        raise ScheduleError(f"schedule: {text!r} has {len(parts)} fields, not five: minute, hour, day, month, day of the week")
    minutes, hours, days, months, weekdays = (_values(part, *field) for part, field in zip(parts, _FIELDS, strict=True))
    either = not parts[2].startswith("*") and not parts[4].startswith("*")
    return minutes, hours, days, months, frozenset(day % 7 for day in weekdays), either


def _values(text: str, name: str, low: int, high: int) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        try:
            begin, end = (low, high) if span == "*" else (int(first), int(last or (high if step else first)))
            chosen = range(begin, end + 1, int(step or 1))
        except ValueError:
            raise ScheduleError(f"schedule: {part!r} is no {name}") from None
        if not chosen or not low <= begin <= end <= high:
            raise ScheduleError(f"schedule: {part!r} is no {name} of {low} to {high}")
        found.update(chosen)
    return frozenset(found)
