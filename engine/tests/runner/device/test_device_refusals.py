"""What plans may ask in general and these runners cannot do yet."""

import msgspec
import numpy as np
import pytest

from penstock.engine.core.plan import SampleInputs


@pytest.mark.parametrize("fixture", ["build_runner", "build_device_runner"])
def test_drafts_and_masks_are_refused_by_name(fixture, request, checkpoint, driver):
    runner = request.getfixturevalue(fixture)(checkpoint("llama"))
    play = driver(runner)
    sequence = play.admit([5, 6, 7])
    plan = play.plan([(sequence, 3)])
    with pytest.raises(NotImplementedError, match=f"step {plan.step_id} has drafts"):
        runner.execute(msgspec.structs.replace(plan, num_drafts=np.array([1], np.int32)))
    runner.execute(plan)
    with pytest.raises(NotImplementedError, match=f"step {plan.step_id} has masks"):
        runner.sample(SampleInputs(plan.step_id, np.array([0], np.int32), np.full((1, 9), -1, np.int32)))
