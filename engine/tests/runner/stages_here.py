"""The stages of a pipeline in this process, where tests can reach them."""

from collections import deque
from typing import Any

from penstock.engine.config import EngineConfig
from penstock.engine.core.plan import SampledTokens, SampleInputs, StepPlan, StepResult
from penstock.engine.models.layers.shard import Stage
from penstock.engine.parallel.group import Group
from penstock.engine.parallel.links import Link
from penstock.engine.parallel.shared_memory import SharedMemory
from penstock.engine.runner.model_runner import ModelRunner

NUM_BLOCKS = 100


class Stages:
    """Runs each step of all stages at once, as `ProcessExecutor` has them do."""

    def __init__(self, config: EngineConfig) -> None:
        stages, self.runners = config.parallel.pipeline_parallel_size, list[ModelRunner]()
        links = [Link() for _ in range(stages - 1)]
        self._ends = links  # closed with this
        for number in range(stages):
            before = links[number - 1].receiver if number else None
            after = links[number].sender if number + 1 < stages else None
            group = Group(0, 1, SharedMemory.create(1), "", 5.0, None, Stage(number, stages), before, after)
            self.runners.append(ModelRunner(config, group))
        self.config = config
        self._results, self._sampled = deque[StepResult](), list[SampledTokens]()
        self.call("load")
        self.call("initialize_kv_cache", NUM_BLOCKS)

    def submit(self, plan: StepPlan, masked: bool) -> None:
        sampled, self._sampled = self._sampled, []
        for runner in self.runners:
            for step in sampled if runner is not self.runners[-1] else ():
                runner.follow(step)
            runner.execute(plan)
        if not masked:
            self.sample(SampleInputs(plan.step_id))

    def sample(self, inputs: SampleInputs) -> None:
        self._results.append([runner.sample(inputs) for runner in self.runners][-1])

    def collect(self) -> StepResult:
        result = self._results.popleft()
        self._sampled.append(SampledTokens(result.step_id, result.token_ids, result.counts, result.drafts))
        return result

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(runner, method)(*args) for runner in self.runners]

    call_beside = call

    def check(self) -> None:
        """Nothing can be gone."""

    def close(self) -> None:
        """Nothing runs."""
