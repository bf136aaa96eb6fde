"""What plans may ask in general and a device's runner cannot do yet."""

import msgspec
import numpy as np
import pytest


def test_drafts_are_refused_by_name(build_device_runner, checkpoint, driver):
    runner = build_device_runner(checkpoint("llama"))
    play = driver(runner)
    sequence = play.admit([5, 6, 7])
    plan = play.plan([(sequence, 3)])
    with pytest.raises(NotImplementedError, match=f"step {plan.step_id} has drafts"):
        runner.execute(msgspec.structs.replace(plan, num_drafts=np.array([1], np.int32)))
