"""A model that takes a share of another's traffic, and how it is judged against it."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.api.resources.base import Duration, Part, Rule, ServedName, lasting

Percent = Annotated[int, Field(ge=1, le=100)]


class Judge(Part):
    """How the canary is compared with the model whose traffic it shares."""

    RULES = (
        lasting("judge", "window", "5s", "24h"),
        Rule(
            "!has(self.steps) || self.steps.isSorted()",
            "judge: steps must rise",
            lambda judge: judge.steps == sorted(judge.steps),
        ),
    )

    window: Duration = "5m"
    """For how long it must do well at each weight. A window without enough requests goes on until they have come."""
    min_requests: int = Field(default=100, ge=1, le=1_000_000)
    """Requests of a window that each of the two must have had before anything is said of them."""
    max_error_points: int = Field(default=5, ge=0, le=100)
    """Percentage points by which the share of its requests that fail may be above the other model's."""
    max_ttft_percent: int | None = Field(default=None, ge=100, le=10_000)
    """Its time to the first token, in percent of the other model's. Only streamed answers show it. Absent: not judged."""
    ttft_percentile: int = Field(default=95, ge=50, le=99)
    """Which percentile of these times."""
    steps: list[Percent] = Field(default=[], max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    """Weights that it is given first, one after another, each for a good window; then comes `weight`."""


class Canary(Part):
    """A share of another model's traffic."""

    RULES = (
        Rule(
            "!has(self.judge) || !has(self.judge.steps) || self.judge.steps.all(step, step < self.weight)",
            "canary: every one of judge.steps must be below weight",
            lambda canary: canary.judge is None or all(step < canary.weight for step in canary.judge.steps),
        ),
    )

    of: ServedName
    """Served name of the model whose traffic is shared; same namespace."""
    weight: int = Field(ge=0, le=100)
    """Percent of its conversations that come here."""
    judge: Judge | None = None
    """Compare the two: a canary that does worse gets nothing until its spec is changed. Absent: `weight` holds in any case."""

    @property
    def first_weight(self) -> int:
        """What it begins with."""
        return self.judge.steps[0] if self.judge is not None and self.judge.steps else self.weight


class CanaryStatus(Part):
    """What was judged of the canary."""

    weight: int = Field(ge=0, le=100)
    """Percent that it gets now."""
    verdict: Literal["Judging", "Passed", "Failed"]
    """`Passed`: it did well at `spec.canary.weight`, and is judged on. `Failed`: it gets nothing until its spec is changed."""
    since: str = Field(max_length=32, json_schema_extra={"format": "date-time"})
    """Since when it has this weight and this verdict."""
    reason: str = Field(max_length=1024)
    """Why, with the figures of both."""
    judged: str = Field(max_length=64)
    """Fingerprint of what is judged. With another fingerprint the judgement starts over."""
