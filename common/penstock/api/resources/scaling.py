"""How pools are sized: what a pool asks of the autoscaler, and what its model's pools share."""

from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field

from penstock.api.resources.base import Duration, Part, Rule, lasting


def _field(value: str) -> str:
    """One field of cron: values, ranges and steps of numbers that match `value`."""
    item = rf"([*]|({value})(-({value}))?)(/[1-9][0-9]?)?"
    return f"{item}(,{item})*"


CRON = "^" + " ".join(map(_field, ("[1-5]?[0-9]", "1?[0-9]|2[0-3]", "[1-9]|[12][0-9]|3[01]", "[1-9]|1[0-2]", "[0-7]"))) + "$"
"""Minute, hour, day of the month, month, day of the week."""


def _ordered(cron: str) -> bool:
    spans = [item.partition("/")[0] for field in cron.split(" ") for item in field.split(",")]
    return all(int(span.partition("-")[0]) <= int(span.partition("-")[2]) for span in spans if "-" in span)


class Slo(Part):
    """What clients are to see."""

    RULES = (
        Rule("has(self.ttft) || has(self.itl)", "slo: name a goal: ttft, itl or both", lambda slo: bool(slo.ttft or slo.itl)),
        lasting("slo", "ttft", "1ms", "1h"),
        lasting("slo", "itl", "1ms", "1m"),
    )

    ttft: Duration | None = None
    """Goal for the time to the first token."""
    itl: Duration | None = None
    """Goal for the time between tokens."""
    percentile: int = Field(default=95, ge=50, le=99)
    """Which percentile of requests is to meet the goals."""


def _is_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # names are looked for as files: none there, no such name, a folder
        return False
    return True


class Hint(Part):
    """A time of more load that is known beforehand."""

    RULES = (
        lasting("schedule", "duration", "1m", "168h"),
        Rule(
            "self.start.split(' ').all(field, field.split(',').all(item, !item.contains('-') || "
            "int(item.split('/')[0].split('-')[0]) <= int(item.split('/')[0].split('-')[1])))",
            "schedule: a range in start must not end before it begins",
            lambda hint: _ordered(hint.start),
        ),
        Rule(
            # A zone that the API server does not know is an error of the rule, which refuses just the same.
            "timestamp('2026-01-01T00:00:00Z').getHours(self.timeZone) >= 0",
            "schedule: timeZone must be a name of the tz database, such as Europe/Berlin",
            lambda hint: _is_zone(hint.time_zone),
        ),
    )

    start: str = Field(pattern=CRON, min_length=9, max_length=64)
    """When it begins, as in cron: minute, hour, day of the month, month, day of the week (0 is Sunday)."""
    time_zone: str = Field(default="UTC", pattern=r"^[A-Za-z][A-Za-z0-9_+/-]*$", min_length=1, max_length=64)
    """Of `start`, such as `Europe/Berlin`."""
    duration: Duration
    """How long it lasts."""
    min: int = Field(ge=1, le=1000)
    """Replicas that are ready when it begins, whatever the load; never more than `max`."""


class Targets(Part):
    """How full a replica may be before there are more of them."""

    utilization_percent: int = Field(default=75, ge=1, le=100)
    """Percent of a replica's time and of its batch that demand may fill."""
    kv_usage_percent: int = Field(default=80, ge=1, le=100)
    """Percent of a replica's KV cache that demand may fill."""


class Growth(Part):
    """How fast the pool may grow: in each period by `percent` or by `replicas`, whichever is more."""

    RULES = (lasting("growth", "period", "1s", "1h"),)

    percent: int = Field(default=100, ge=1, le=1000)
    """Percent of its size."""
    replicas: int = Field(default=4, ge=1, le=1000)
    """Replicas."""
    period: Duration = "15s"
    """The time for which this holds."""


class Scaling(Part):
    """How the autoscaler sizes the pool."""

    RULES = (
        Rule("self.min <= self.max", "scaling: min must not be above max", lambda scaling: scaling.min <= scaling.max),
        Rule(
            "!has(self.warm) || self.warm <= self.max",
            "scaling: warm must not be above max",
            lambda scaling: scaling.warm is None or scaling.warm <= scaling.max,
        ),
        Rule(
            "(self.min > 0) == !has(self.scaleToZeroAfter)",
            "scaling: min 0 and scaleToZeroAfter go together; set both or neither",
            lambda scaling: (scaling.min > 0) == (scaling.scale_to_zero_after is None),
        ),
        lasting("scaling", "downWindow", "0s", "24h"),
        lasting("scaling", "scaleToZeroAfter", "1s", "168h"),
        lasting("scaling", "coldStart", "1s", "1h"),
    )

    mode: Literal["Auto", "DryRun"] = "Auto"
    """`Auto` acts; `DryRun` only reports what it would do."""
    min: int = Field(default=1, ge=0, le=1000)
    """Never fewer replicas. 0: none at all after `scaleToZeroAfter` without a request; the next one waits at the gateway."""
    max: int = Field(ge=1, le=1000)
    """Never more replicas."""
    warm: int | None = Field(default=None, ge=0, le=1000)
    """Spare replicas kept ready beyond the demand."""
    down_window: Duration = "5m"
    """A pool shrinks no further than to the most that was recommended in this time."""
    targets: Targets = Targets()
    """How full a replica may be before there are more of them."""
    growth: Growth = Growth()
    """How fast the pool may grow."""
    cold_start: Duration = "30s"
    """From a replica's creation until it is ready, assumed until the autoscaler has seen one start."""
    slo: Slo | None = None
    """Goals that the size is derived from."""
    scale_to_zero_after: Duration | None = None
    """With `min: 0`: stop the last replica after so long without a request."""
    schedule: list[Hint] = Field(default=[], max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    """Times at which more replicas are wanted beforehand; they start a cold start early."""


class PrefillPerDecode(Part):
    """Bounds on the prefill replicas for each hundred decode replicas."""

    RULES = (
        Rule(
            "self.minPercent <= self.maxPercent",
            "prefillPerDecode: minPercent must not be above maxPercent",
            lambda ratio: ratio.min_percent <= ratio.max_percent,
        ),
    )

    min_percent: int = Field(default=1, ge=1, le=10_000)
    """Fewer prefill replicas are made more."""
    max_percent: int = Field(default=10_000, ge=1, le=10_000)
    """Where there are more prefill replicas, decode replicas are added."""


class SharedScaling(Part):
    """What the pools share that the autoscaler sizes."""

    budget: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """The replicas of all pools, each at its pool's `cost`, may cost this much. Absent: no bound but each pool's `max`."""
    prefill_per_decode: PrefillPerDecode | None = None
    """Absent: prefill and decode pools are sized each by itself."""
