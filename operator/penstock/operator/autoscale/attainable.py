"""Which promised times between tokens a replica can keep. Pure."""

from dataclasses import replace

from penstock.operator.autoscale.capacity import StepLine
from penstock.operator.autoscale.limits import Goals

AGAIN = 0.9
"""A goal that was out of reach counts again once a step over one row takes at most this share of it: at the boundary, noise would
turn between one row a replica and as many as fit."""


def itl_out_of_reach(line: StepLine, goals: Goals | None, before: bool) -> bool:
    """Whether a step over a single row takes longer than the promised time between tokens, so that no number of replicas keeps
    it; `before`: whether that was so at the last look."""
    if goals is None or goals.itl_s is None or not line.weight:
        return False
    return line.step_s(1) > goals.itl_s * (AGAIN if before else 1.0)


def reachable(goals: Goals | None, *, itl_out_of_reach: bool) -> Goals | None:
    """The goals that size a pool: without the time between tokens where it is out of reach; None where nothing is left."""
    if goals is None or not itl_out_of_reach:
        return goals
    return None if goals.ttft_s is None else replace(goals, itl_s=None)


def describe(goals: Goals | None, line: StepLine, *, itl_out_of_reach: bool, ttft_out_of_reach: bool) -> str:
    """The goals that are ignored and why, as a person reads it; empty where there are none."""
    said: list[str] = []
    if goals is not None and goals.itl_s is not None and itl_out_of_reach:
        step = f"a step over one request takes {line.step_s(1) * 1e3:.1f} ms"
        said.append(f"the ITL goal of {goals.itl_s * 1e3:.0f} ms is ignored: {step}, whatever the number of replicas")
    if goals is not None and goals.ttft_s is not None and ttft_out_of_reach:
        said.append(f"the TTFT goal of {goals.ttft_s:g} s is ignored for an hour: twice the replicas did not bring it closer")
    return "; ".join(said)
