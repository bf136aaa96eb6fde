"""A sample of `make fuzz`: the scheduler decides as the naive one does, step for step."""

import pytest
from grids import mostly_slow
from scheduler_fuzzer import Episode


@pytest.mark.req("SCH-03", "SCH-05", "SCH-06", "SCH-07", "SCH-08", "SCH-10", "SCH-13", "SCH-14", "SCH-15", "SCH-16", "SCH-33")
@pytest.mark.req("PRE-01", "PRE-02", "PRE-03", "PRE-04", "PRE-06", "PRE-07", "PRE-09", "PRE-10", "PRE-15", "RL-05", "RL-16")
@pytest.mark.req("CHK-01", "CHK-02", "CHK-03", "LIM-04", "LIM-06")
@pytest.mark.parametrize("number", mostly_slow(range(16), range(6)))
def test_every_decision_is_the_naive_ones(number):
    Episode(f"test/{number}").run()
