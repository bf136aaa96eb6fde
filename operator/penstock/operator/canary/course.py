"""A canary's course: its next weight, and the consequence of each judgement. Pure."""

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal

from pydantic import ValidationError

from penstock.api.resources import Canary, CanaryStatus, seconds
from penstock.operator.canary.judgement import Judgement, Limits, limits_of
from penstock.operator.objects import Object


@dataclass(frozen=True)
class Course:
    """What the spec asks for."""

    of: str
    """A name of the other model."""
    weights: tuple[int, ...]
    """Percent, one after another; the last one stays."""
    window_s: float
    limits: Limits
    judged: str
    """Fingerprint of all this and of what the canary runs."""


@dataclass(frozen=True)
class Standing:
    """The state of a canary that must survive a restart of the operator."""

    weight: int
    verdict: Literal["Judging", "Passed", "Failed"]
    since: str
    """RFC 3339."""
    reason: str
    judged: str

    def to_status(self) -> Object:
        """Return the state in the form of `status.canary`."""
        return {
            "weight": self.weight,
            "verdict": self.verdict,
            "since": self.since,
            "reason": self.reason[:1024],
            "judged": self.judged,
        }


def course_of(canary: Canary | None, runs: str) -> Course | None:
    """Return the course of a canary; None if it is not judged.

    Args:
        canary: The canary of the spec.
        runs: The model and revision that it runs. Another one is judged from the start.
    """
    if canary is None or canary.judge is None:
        return None
    judge = canary.judge
    # Without defaults: a field that a later version adds must not give a canary another chance.
    asked = canary.model_dump_json(exclude_defaults=True)
    fingerprint = blake2b(f"{asked} {runs}".encode(), digest_size=8).hexdigest()
    return Course(canary.of, (*judge.steps, canary.weight), seconds(judge.window), limits_of(judge), fingerprint)


def begin(course: Course, now: str) -> Standing:
    """Return the first standing of a canary, before any result."""
    return Standing(
        course.weights[0], "Judging", now, f"{_place(course, course.weights[0])}: nothing is known yet", course.judged
    )


def written(status: Object) -> Standing | None:
    """Read a canary's standing from its model's status; None if the status cannot be read."""
    try:
        said = CanaryStatus.model_validate(status["canary"])
    except (KeyError, ValidationError):
        return None
    return Standing(said.weight, said.verdict, said.since, said.reason, said.judged)


def after(standing: Standing, course: Course, judgement: Judgement, windows: int, now: str) -> Standing:
    """Return the standing after one judgement.

    Args:
        judgement: The result since the weight last changed, or since the last good window.
        windows: Whole windows that have passed since.
    """
    if standing.verdict == "Failed":
        return standing
    if judgement.outcome == "Bad":
        words = f"worse than {course.of!r} at {standing.weight} %: {judgement.figures}"
        return Standing(0, "Failed", now, f"{words}; change its spec to try again", standing.judged)
    if not windows:
        return standing
    if judgement.outcome == "Open":
        if standing.verdict == "Passed":
            return standing
        return replace(standing, reason=f"{_place(course, standing.weight)}: not enough is known: {judgement.figures}")
    weight = next((it for it in course.weights if it > standing.weight), standing.weight)
    # At 100 % there is nobody left to compare it with.
    done = standing.weight == course.weights[-1] or weight == 100
    verdict = "Passed" if done else "Judging"
    changed = (weight, verdict) != (standing.weight, standing.verdict)
    reason = f"as good as {course.of!r} at {standing.weight} %: {judgement.figures}"
    if standing.verdict == "Passed" and not changed:
        reason = standing.reason  # one sentence each window would be a write each window
    return Standing(weight, verdict, now if changed else standing.since, reason, standing.judged)


def _place(course: Course, weight: int) -> str:
    last = course.weights[-1]
    return f"judged at {weight} %" if weight >= last else f"judged at {weight} % on the way to {last} %"
