"""Fake runners for processes of their own: each with something that goes wrong. No torch."""

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from fake_runner import FakeRunner

from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.core.executor import StepFailed
from penstock.engine.core.plan import SampledTokens, SampleInputs, StepPlan, StepResult
from penstock.engine.parallel import fingerprint
from penstock.engine.parallel.group import Group

LOST_TOKEN, STUCK_TOKEN, OTHER_TOKEN, DYING_TOKEN, LONE_LOSS_TOKEN = 101, 102, 103, 104, 105
"""In a prompt: what happens to its step; on the last rank alone, but for the first of them."""


class RankRunner(FakeRunner):
    """A rank that others wait for: it has counted a step when it begins it, as collectives would."""

    def __init__(self, config: EngineConfig, group: Group | None = None) -> None:
        super().__init__(config)
        self._last = group is None or group.rank == group.world - 1
        self._alone = group is None

    def kernels(self) -> str:
        return f"fake in process {os.getpid()}"

    def check_weights(self, path: str | None) -> str | None:
        return "/lone has other shapes" if path == "/lone" and self._last else super().check_weights(path)

    def reload_weights(self, path: str | None) -> None:
        if path == "/lone" and self._last:
            raise ConfigError("/lone has other shapes")
        super().reload_weights(None if path == "/lone" else path)

    def execute(self, plan: StepPlan) -> None:
        super().execute(plan)
        if (begun := os.environ.get("PENSTOCK_TEST_BEGUN")) is not None:
            Path(begun).touch()
        found = {int(token) for admission in plan.admissions for token in admission.token_ids}
        self._found = found
        if LOST_TOKEN in found or (LONE_LOSS_TOKEN in found and self._last):
            raise StepFailed(f"step {plan.step_id} failed: there is no room")
        if STUCK_TOKEN in found and self._last:
            time.sleep(3600)
        if DYING_TOKEN in found and self._last:
            os._exit(7)

    def sample(self, inputs: SampleInputs) -> StepResult:
        result = super().sample(inputs)
        if OTHER_TOKEN in self._found and self._last and not self._alone:
            return msgspec.structs.replace(result, token_ids=result.token_ids + 1)
        return result


class SeeingRunner(RankRunner):
    """Ranks of two pipeline stages that encode: those of the first one for 1 second a step, those of the last one for 100."""

    def __init__(self, config: EngineConfig, group: Group) -> None:
        super().__init__(config, group)
        self._seconds = 100.0 if group.stage.last else 1.0

    def sample(self, inputs: SampleInputs) -> StepResult:
        return msgspec.structs.replace(super().sample(inputs), encoder_s=self._seconds)

    def follow(self, sampled: SampledTokens) -> None:
        """It has found the same tokens by itself."""


class FallingRunner(RankRunner):
    """The last rank is killed while it starts, where `PENSTOCK_TEST_FALLS` says."""

    def _reached(self, phase: str) -> None:
        if self._last and os.environ["PENSTOCK_TEST_FALLS"] == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    def load(self) -> None:
        self._reached("load")
        super().load()

    def profile_memory(self) -> int:
        self._reached("profile_memory")
        return super().profile_memory()

    def warm_up(self) -> None:
        self._reached("warm_up")
        super().warm_up()


class OtherTorch(RankRunner):
    """The last rank has another version of torch."""

    def __init__(self, config: EngineConfig, group: Group | None = None) -> None:
        super().__init__(config, group)
        if self._last:
            told = fingerprint.version
            fingerprint.version = lambda name: "0.1" if name == "torch" else told(name)


class Unbuilt(RankRunner):
    """The last rank cannot even be built."""

    def __init__(self, config: EngineConfig, group: Group | None = None) -> None:
        super().__init__(config, group)
        if self._last:
            raise RuntimeError("there is no such device")
