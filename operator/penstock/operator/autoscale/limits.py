"""What users ask of the autoscaler, and how the policy itself is set. Plain figures: seconds, replicas, shares."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.api.fleet import Role
from penstock.operator.autoscale.coldstart import PRIOR_S


@dataclass(frozen=True)
class Goals:
    """What clients are promised."""

    ttft_s: float | None
    itl_s: float | None
    share: float = 0.95
    """Share of requests that must meet the goal."""


@dataclass(frozen=True)
class Hint:
    """A time of more load that is known beforehand; see `schedule`."""

    start: str
    """Five fields, as in cron."""
    time_zone: str
    duration_s: float
    least: int
    """Replicas that are ready then, whatever the load."""


@dataclass(frozen=True)
class Limits:
    """What an InferenceModel asks for one pool."""

    min_replicas: int
    max_replicas: int
    warm: int = 0
    """Ready replicas beyond demand, for bursts shorter than a cold start."""
    scale_to_zero_after_s: float | None = None
    """Idle time after which a pool with `min_replicas` 0 goes to zero."""
    down_window_s: float = 300.0
    role: Role = "Both"
    cost: float = 1.0
    """Cost of a replica, in any unit that the model's pools share."""
    target_utilization: float = 0.75
    """Share of a replica's capacity, and of its batch width, that demand may fill."""
    target_kv_usage: float = 0.80
    max_up_factor: float = 2.0
    max_up_step: int = 4
    """In `up_period_s` a pool grows to `max_up_factor` times its size or by `max_up_step` replicas, whichever is more."""
    up_period_s: float = 15.0
    cold_start_s: float = PRIOR_S
    """Assumed while no start was seen."""
    goals: Goals | None = None
    schedule: tuple[Hint, ...] = ()


@dataclass(frozen=True)
class ModelLimits:
    """What an InferenceModel asks for all pools that the autoscaler sizes."""

    pools: Mapping[str, Limits]
    """Limits by pool name."""
    budget: float | None = None
    """The most that all replicas may cost."""
    room: float | None = None
    """What a budget of the whole namespace leaves to this model."""
    prefill_per_decode: tuple[float, float] | None = None
    """Bounds of the quotient of their numbers."""


@dataclass(frozen=True)
class Settings:
    """How the policy behaves; the same for all models."""

    stable_window_s: float = 60.0
    panic_window_s: float = 6.0
    panic_threshold: float = 2.0
    """Demand over ready capacity at which panic begins."""
    tolerance: float = 0.10
    """A shortage below this share of the present capacity changes nothing."""
    stale_after_s: float = 15.0
    """A report older than this says nothing any more."""
    cold_start_factor: float = 1.5
    """A replica that is not ready counts as supply while younger than this many learned cold starts."""
    drain_backlog_s: float = 10.0
    """What waits is to be computed within this time, or within a cold start where that is longer: no help comes sooner."""
