"""A canary on its way: from step to step, back to nothing, over restarts of gateways and of the operator."""

import pytest

from penstock.api.fleet import ModelOutcomes, PoolsView
from penstock.api.resources import Canary, Judge
from penstock.operator.canary.course import Course, Standing, course_of
from penstock.operator.canary.judges import Judges

CANARY, MAIN = "team/next", "team/main"
SPEC = Canary(of="main", weight=50, judge=Judge(window="60s", min_requests=20, steps=[5, 25]))


class Gateway:
    """One gateway process, which counts."""

    def __init__(self, name: str) -> None:
        self.name, self.epoch = name, f"{name}-1"
        self.counts = {CANARY: [0, 0], MAIN: [0, 0]}

    def restart(self) -> None:
        self.epoch += "'"
        self.counts = {CANARY: [0, 0], MAIN: [0, 0]}

    def answer(self, model: str, requests: int, failures: int = 0) -> None:
        self.counts[model][0] += requests
        self.counts[model][1] += failures

    def view(self) -> PoolsView:
        models = [
            ModelOutcomes(model=model, canary_of=MAIN if model == CANARY else None, requests=requests, failures=failures)
            for model, (requests, failures) in self.counts.items()
            if requests
        ]
        return PoolsView(gateway=self.name, version=1, pools=[], epoch=self.epoch, models=models)


class Rig:
    """Judges with a clock of their own, and gateways to look at."""

    def __init__(self, *gateways: Gateway) -> None:
        self.now, self.gateways = 0.0, gateways or (Gateway("a"),)
        self.changed: list[str] = []
        self.judges = Judges(self.changed.append, lambda: self.now)
        self.course: Course | None = course_of(SPEC, "uid 1")
        self.last: Standing | None = None

    @property
    def standing(self) -> Standing:
        found = self.judges.follow(CANARY, self.course, self.last)
        assert found is not None
        return found

    def look(self, seconds: float = 5.0) -> tuple[int, str]:
        _ = self.standing
        self.now += seconds
        self.judges.told([it.view() for it in self.gateways], len(self.gateways))
        return self.standing.weight, self.standing.verdict

    def window(self, failures: int = 0) -> tuple[int, str]:
        """30 requests to each, and more than a window."""
        self.gateways[0].answer(CANARY, 30, failures)
        self.gateways[0].answer(MAIN, 30)
        return self.look(61)


@pytest.fixture
def rig() -> Rig:
    made = Rig()
    made.look()
    return made


def test_a_good_canary_climbs_its_steps_and_has_passed_at_the_last(rig: Rig) -> None:
    assert rig.look() == (5, "Judging")
    assert [rig.window() for _ in range(4)] == [(25, "Judging"), (50, "Judging"), (50, "Passed"), (50, "Passed")]
    assert len(rig.changed) == 3  # nothing is written while it only goes on doing well
    assert "as good as 'main' at 50 %" in rig.standing.reason


def test_a_step_needs_its_whole_window(rig: Rig) -> None:
    rig.gateways[0].answer(CANARY, 100)
    rig.gateways[0].answer(MAIN, 100)
    assert rig.look(50) == (5, "Judging")
    assert rig.look(10) == (25, "Judging")


def test_a_bad_canary_gets_nothing_at_once_and_for_good(rig: Rig) -> None:
    rig.window()
    rig.gateways[0].answer(MAIN, 40)
    rig.gateways[0].answer(CANARY, 19, 19)
    assert rig.look() == (25, "Judging")  # one fewer than is asked for
    rig.gateways[0].answer(CANARY, 1, 1)
    assert rig.look() == (0, "Failed")
    assert "worse than 'main' at 25 %: 100.0% of its 20 requests failed, 0.0% of 40 there" in rig.standing.reason
    assert [rig.window() for _ in range(3)] == [(0, "Failed")] * 3  # it does not come back by itself
    rig.course = course_of(SPEC, "uid 2")  # another revision deserves another chance
    assert rig.look() == (5, "Judging")


def test_one_that_has_passed_is_judged_on(rig: Rig) -> None:
    assert [rig.window() for _ in range(3)][-1] == (50, "Passed")
    assert rig.window(failures=30) == (0, "Failed")


def test_silence_is_no_verdict_but_is_told(rig: Rig) -> None:
    rig.gateways[0].answer(CANARY, 3)
    assert [rig.look(61) for _ in range(3)] == [(5, "Judging")] * 3
    assert "not enough is known: 0.0% of its 3 requests failed" in rig.standing.reason
    rig.judges.told([], 1)
    assert rig.standing.verdict == "Judging"


def test_what_was_counted_before_the_first_look_is_not_of_this_window() -> None:
    rig = Rig()
    rig.gateways[0].answer(CANARY, 500, 500)
    rig.gateways[0].answer(MAIN, 500)
    assert [rig.look(61) for _ in range(3)] == [(5, "Judging")] * 3


def test_a_gateway_that_restarts_takes_nothing_back_and_counts_on() -> None:
    rig = Rig(Gateway("a"), Gateway("b"))
    rig.look()
    for gateway in rig.gateways:
        gateway.answer(MAIN, 20)
        gateway.answer(CANARY, 9, 9)
    assert rig.look() == (5, "Judging")
    rig.gateways[0].restart()
    rig.look()
    rig.gateways[0].answer(CANARY, 2, 2)
    assert rig.look() == (0, "Failed")
    assert "100.0% of its 20 requests failed, 0.0% of 40 there" in rig.standing.reason


def test_another_operator_goes_on_where_the_last_one_stopped(rig: Rig) -> None:
    rig.window()
    successor = Rig(*rig.gateways)
    successor.last = rig.standing
    assert successor.look() == (25, "Judging")
    rig.window(failures=30)
    successor = Rig(*rig.gateways)
    successor.last = rig.standing
    assert [successor.window() for _ in range(2)] == [(0, "Failed")] * 2
    successor = Rig(*rig.gateways)
    successor.last, successor.course = rig.standing, course_of(SPEC, "uid 7")
    assert successor.look() == (5, "Judging")


def test_at_the_whole_traffic_nobody_is_left_to_compare_with(rig: Rig) -> None:
    whole = Canary(of="main", weight=100, judge=Judge(window="60s", min_requests=20, steps=[50]))
    rig.course = course_of(whole, "uid 1")
    rig.look()
    assert rig.window() == (100, "Passed")
