"""An error inside the model is that step's failure."""

import pytest

from penstock.engine.core.executor import StepFailed
from penstock.engine.core.plan import SampleInputs


@pytest.mark.req("IPC-11")
def test_after_a_failed_forward_pass_or_sampling_the_runner_goes_on(loaded, driver, monkeypatch):
    runner = loaded("llama")
    alone = driver(runner)
    expected = list(alone.generate(alone.admit([3, 1, 4, 1, 5] * 7), 9))
    play = driver(runner)
    lost, kept = play.admit([9, 2, 6] * 9), play.admit([3, 1, 4, 1, 5] * 7)
    play.step([(kept, 20)])

    def break_down(*_):
        raise RuntimeError("an operator is missing")

    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "forward", break_down)
        with pytest.raises(StepFailed, match="RuntimeError: an operator is missing"):
            runner.execute(play.plan([(lost, 10)]))
    play.release(lost)
    other = play.admit([2, 7, 1, 8] * 5)
    with monkeypatch.context() as patch:
        patch.setattr(runner._requests.chooser, "choose", break_down)
        plan = play.plan([(other, 20)])
        runner.execute(plan)
        with pytest.raises(StepFailed, match="an operator is missing"):
            runner.sample(SampleInputs(plan.step_id))
    play.release(other)
    assert play.generate(kept, 9, chunk=15) == expected
