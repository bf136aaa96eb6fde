"""`execute` and `sample` take turns, on every device; and what goes wrong in them is one step's failure."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import torch

from penstock.engine.core.executor import StepFailed
from penstock.engine.core.plan import SampleInputs, StepPlan
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.runner.device.runtime import StepRuntime

Runtime = TypeVar("Runtime", bound=StepRuntime)
"""The device."""


class _OfPlan(Protocol):
    @property
    def plan(self) -> StepPlan:
        """The step's."""
        ...


Launched = TypeVar("Launched", bound=_OfPlan)
"""What `execute` leaves for `sample`."""
Sampled = TypeVar("Sampled", covariant=True)
"""What `sample` returns."""


def _nothing() -> None:
    """Undoes nothing."""


class Turns(ABC, Generic[Runtime, Launched, Sampled]):
    """The order of a runner's steps.

    Args:
        runtime: The device.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._launched: Launched | None = None

    @abstractmethod
    def _execute(self, plan: StepPlan) -> Launched:
        """Applies a plan and runs, or launches, the forward pass."""

    @abstractmethod
    def _sample(self, launched: Launched, inputs: SampleInputs) -> Sampled:
        """Samples, or launches the sampling of, the step that `_execute` has left."""

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Applies a plan and begins the forward pass; `sample` must follow before the next.

        Raises:
            RuntimeError: The last step has not been sampled: its tokens are not there for this one.
            StepFailed: The forward pass did not get through, or could not be launched.
            DeviceFailed: The device is lost.
        """
        if self._launched is not None:
            raise RuntimeError(f"step {plan.step_id}: step {self._launched.plan.step_id} has not been sampled yet")
        with self.runtime.main_stream():
            self._launched = self._execute(plan)

    @torch.inference_mode()
    def sample(self, inputs: SampleInputs) -> Sampled:
        """Samples the step that `execute` has begun, and writes the tokens into their rows.

        Raises:
            RuntimeError: No step waits for it, or another one does.
            StepFailed: The sampling did not get through, or could not be launched.
            DeviceFailed: The device is lost.
        """
        launched = self._launched
        if launched is None or launched.plan.step_id != inputs.step_id:
            waiting = "none" if launched is None else f"step {launched.plan.step_id}"
            raise RuntimeError(f"sampling step {inputs.step_id}: {waiting} waits for it")
        self._launched = None
        with self.runtime.main_stream():
            return self._sample(launched, inputs)

    @contextmanager
    def _failing(self, plan: StepPlan, undo: Callable[[], None] = _nothing) -> Iterator[None]:
        """What goes wrong in here is the step's failure alone: the plan has been applied, and `undo` and the release of its rows
        undo the rest. Where the device or another rank is gone, there is no next step."""
        try:
            yield
        except GroupFailed:
            raise
        except Exception as error:
            if (failure := self.runtime.failure(error)) is not None:
                raise failure from error
            undo()
            raise StepFailed(f"step {plan.step_id} failed: {type(error).__name__}: {error}") from error
