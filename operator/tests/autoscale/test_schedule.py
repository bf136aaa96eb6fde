"""Hints: when they begin and end, and which are refused."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from penstock.operator.autoscale.limits import Hint
from penstock.operator.autoscale.schedule import ScheduleError, check, floor

HOUR = 3600.0


def at(text: str, zone: str = "UTC") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC).timestamp()


@pytest.mark.parametrize(
    ("start", "moment", "active"),
    [
        ("0 8 * * 1-5", "2026-11-20 08:00", True),  # a Friday
        ("0 8 * * 1-5", "2026-11-20 07:59", False),
        ("0 8 * * 1-5", "2026-11-20 09:59", True),
        ("0 8 * * 1-5", "2026-11-20 10:00", False),
        ("0 8 * * 1-5", "2026-11-21 08:30", False),
        ("0 8 * * 7", "2026-11-22 08:30", True),  # Sunday is 0 and 7
        ("*/30 9,17 * * *", "2026-11-21 17:45", True),
        ("0 23 31 12 *", "2027-01-01 00:30", True),  # over the end of the day, the month and the year
        ("0 8 1 * 6", "2026-11-21 08:30", True),  # either day, as in cron
        ("0 8 1 * *", "2026-11-21 08:30", False),
    ],
)
def test_a_hint_lasts_two_hours(start: str, moment: str, active: bool) -> None:
    assert floor([Hint(start, "UTC", 2 * HOUR, 5)], at(moment), 0.0) == (5 if active else 0)


def test_it_begins_early_by_the_lead_and_the_largest_counts() -> None:
    hints = [Hint("0 8 * * *", "UTC", HOUR, 5), Hint("0 7 * * *", "UTC", 3 * HOUR, 2)]
    assert floor(hints, at("2026-11-20 07:58"), 90.0) == 2
    assert floor(hints, at("2026-11-20 07:58:45"), 90.0) == 5


def test_the_clock_on_the_wall_counts_in_summer_and_winter() -> None:
    hint = Hint("0 8 * * *", "Europe/Berlin", HOUR, 3)
    for day in ("2026-07-01", "2026-12-01"):
        assert floor([hint], at(f"{day} 08:30", "Europe/Berlin"), 0.0) == 3
        assert floor([hint], at(f"{day} 07:30", "Europe/Berlin"), 0.0) == 0


@pytest.mark.parametrize(
    ("moment", "active"),
    [
        ("2026-03-29T00:59", False),
        ("2026-03-29T01:05", True),  # 02:30 does not exist on this day: cron starts when the clock has jumped to 03:00
        ("2026-10-25T00:35", True),  # 02:30 in summer time
        ("2026-10-25T01:35", False),  # 02:30 comes a second time, and starts nothing
    ],
)
def test_a_start_in_the_hour_that_is_skipped_or_comes_twice(moment: str, active: bool) -> None:
    assert floor([Hint("30 2 * * *", "Europe/Berlin", 600.0, 3)], at(moment), 0.0) == (3 if active else 0)


def test_a_moment_in_the_second_pass_of_an_hour_sees_the_next_day() -> None:
    hint = Hint("45 2 * * *", "Europe/Berlin", 600.0, 3)
    assert floor([hint], at("2026-10-25T01:50"), 0.0) == 0
    assert floor([hint], at("2026-10-26T01:50"), 0.0) == 3


@pytest.mark.parametrize(
    ("start", "zone", "message"),
    [
        ("0 8 * *", "UTC", "wrong number of fields"),
        ("0 24 * * *", "UTC", "bad hour"),
        ("0 8 0 * *", "UTC", "bad day-of-month"),
        ("0 9-8 * * *", "UTC", "bad hour"),
        ("*/0 8 * * *", "UTC", "bad minute"),
        ("0 8 30 2 *", "UTC", "bad day-of-month"),
        ("0 8 * * *", "Europe/Atlantis", "no time zone 'Europe/Atlantis'"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(start: str, zone: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(Hint(start, zone, HOUR, 1))
