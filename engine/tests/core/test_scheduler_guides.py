"""Rows under a guide: nothing is sampled without its mask, masks are filled while the forward pass runs, and what is forced is
verified in one step."""

import numpy as np
import pytest
from fake_runner import VOCAB, next_token
from harness import make_request
from test_scheduler_hand_cranked import Bench

from penstock.engine.core.plan import Int32
from penstock.engine.messages import FinishReason


def allowed(number: int) -> set[int]:
    """Tokens that may be output `number`: three in seven leave no choice, the others must be odd or even."""
    return {number * 3 % VOCAB} if number % 7 in (3, 4, 5) else set(range(number % 2, VOCAB, 2))


class Numbered:
    """A guide that says what `allowed` says."""

    num_words, batcher = 2, None
    ended = is_open = False
    error = None

    def __init__(self) -> None:
        self.count = 0

    def forced(self) -> list[int]:
        tokens = []
        while len(only := allowed(self.count + len(tokens))) == 1:
            tokens += only
        return tokens

    def accept(self, token_ids) -> None:
        for token in token_ids:
            assert token in allowed(self.count), "the guide is told of a token that its mask excludes"
            self.count += 1

    def take(self, token_id: int) -> bool:
        self.accept([token_id])
        return False

    def fill(self, masks: Int32, drafts) -> None:
        assert (masks == -1).all() and len(masks) == len(drafts) + 1
        for number in range(len(masks)):
            bits = np.zeros(64, np.uint8)
            bits[list(allowed(self.count + number))] = 1
            masks[number] = np.packbits(bits, bitorder="little").view(np.int32)


class Together:
    """A batcher and all its batches, which ask one guide after the other, and count what they are asked."""

    def __init__(self) -> None:
        self.asked = dict.fromkeys(("fill", "take", "forced"), 0)

    def batch(self, guides):
        return Batch(self.asked, guides)


class Batch:
    def __init__(self, asked: dict[str, int], guides) -> None:
        self._asked, self._guides = asked, list(guides)

    def fill(self, masks: Int32) -> None:
        self._asked["fill"] += len(masks)
        masks.fill(-1)
        for at, guide in enumerate(self._guides):
            guide.fill(masks[at : at + 1], [])
            guide.num_together += 1

    def take(self, token_ids) -> list[int]:
        self._asked["take"] += len(token_ids)
        return [at for at, (guide, token) in enumerate(zip(self._guides, token_ids, strict=True)) if guide.take(token)]

    def forced(self):
        self._asked["forced"] += len(self._guides)
        return [guide.forced() for guide in self._guides]


class Joining(Numbered):
    """One that can be asked with others after so many tokens."""

    def __init__(self, together: Together, since: int) -> None:
        super().__init__()
        self._together, self._since = together, since
        self.num_together = 0
        """How often it was asked for a mask with others."""

    @property
    def batcher(self) -> Together | None:
        return self._together if self.count >= self._since else None


def guided_reference(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for number in range(max_tokens):
        token = next_token(tokens)
        while token not in allowed(number):
            token = (token + 1) % VOCAB
        tokens.append(token)
    return tokens[len(prompt) :]


def bench(depth: int, drafts: int, guided, **config) -> Bench:
    made = Bench(depth, drafts=drafts, **config)
    for index in range(4):
        made.core.handle(make_request(index, [index] * 9, 20))
        if index in guided:
            made.core.scheduler.guide(index, Numbered())
    return made


@pytest.mark.parametrize("drafts", [0, 1, 4])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_stream_is_what_its_guide_makes_of_it_alone(depth, drafts):
    for config in ({}, {"num_blocks": 17, "budget": 64}, {"budget": 5}):
        made = bench(depth, drafts, (0, 2), **config)
        forced = []
        while made.core.has_work:
            made.crank()
            forced += [len(plan.draft_ids) for plan in made.device.plans]
            given = {row for plan in made.device.plans for row in plan.rows[plan.draft_rows].tolist()}
            if not config:  # nobody is preempted, and no row has a second tenant
                assert all(sum(row in plan.rows for plan in made.device.plans) == 1 for row in given), "in one plan at a time"
        for index in range(4):
            expected = guided_reference([index] * 9, 20) if index in (0, 2) else None
            assert expected is None or made.streams[index] == expected
        assert any(forced) or depth == 1
        free = Bench(1)
        for index in (1, 3):
            free.core.handle(make_request(index, [index] * 9, 20))
        assert free.run().streams == {index: made.streams[index] for index in (1, 3)}


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("depth", [1, 2])
def test_guides_that_are_asked_together_change_no_stream(depth, drafts):
    """Of two libraries, beside one that is asked alone and one that can only be asked with others after a while."""
    one, other = Together(), Together()
    guides = [Joining(one, 0), Joining(other, 0), Numbered(), Joining(one, 6), Joining(one, 0)]
    made = Bench(depth, drafts=drafts)
    for index, guide in enumerate(guides):
        made.core.handle(make_request(index, [index] * 9, 20 + index))
        made.core.scheduler.guide(index, guide)
    made.core.handle(make_request(5, [5] * 9, 20))
    made.run()
    for index in range(5):
        assert made.streams[index] == guided_reference([index] * 9, 20 + index)
    assert min(one.asked.values()) > min(other.asked.values()) > 0
    assert guides[3].num_together > guides[4].num_together / 2, "the late one is asked with others as soon as it can be"


class Ending(Numbered):
    """One whose answer is complete after so many tokens, or refuses the last of them."""

    def __init__(self, length: int, refuses: bool = False) -> None:
        super().__init__()
        self._length, self._refuses = length, refuses

    def take(self, token_id: int) -> bool:
        assert self.count < self._length, "the guide is told of a token after its last"
        super().take(token_id)
        if self.count == self._length and self._refuses:
            self.error = "not that one"
        return self.count == self._length


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("length", range(1, 15))
def test_an_answer_may_end_among_its_forced_tokens(length, drafts):
    made = Bench(1, drafts=drafts)
    for index, guide in enumerate((Ending(length), Numbered(), Ending(length, refuses=True))):
        made.core.handle(make_request(index, [index] * 9, 20))
        made.core.scheduler.guide(index, guide)
    made.run()
    for index, of in enumerate((length, 20, length)):
        assert made.streams[index] == guided_reference([index] * 9, of)
    assert [(made.finished[index].reason, made.finished[index].error) for index in range(3)] == [
        (FinishReason.STOP, None),
        (FinishReason.LENGTH, None),
        (FinishReason.ERROR, "not that one"),
    ]


@pytest.mark.req("SCH-32")
@pytest.mark.parametrize("depth", [2, 3])
def test_masks_are_filled_between_the_submission_of_their_step_and_its_collection(depth):
    made = bench(depth, 2, (0,))
    made.run()
    log = made.device.log
    steps = {step for what, step in log if what == "submit"}
    assert len(steps) > 8
    for step in sorted(steps):
        submitted, sampled, collected = (log.index((what, step)) for what in ("submit", "sample", "collect"))
        assert submitted < sampled < collected
        assert not [what for what, _ in log[submitted + 1 : sampled] if what == "submit"], "no later plan before it is sampled"
    waited = [step for step in steps if ("collect", step - 1) in log[log.index(("submit", step)) : log.index(("sample", step))]]
    assert len(waited) > 5, "the step before is taken in while this one's forward pass runs"


def test_a_plan_without_masks_is_sampled_at_once():
    made = bench(2, 2, ())
    made.run()
    log = made.device.log
    for at, (what, step) in enumerate(log):
        assert what != "submit" or log[at + 1] == ("sample", step)


def test_what_is_forced_takes_one_step():
    lengths = {}
    for guided in ((), (0,)):
        made = Bench(1)
        made.core.handle(make_request(0, [1], 21))
        if guided:
            made.core.scheduler.guide(0, Numbered())
        made.device.runner._random.choice = lambda options: max(options)  # accepts all that is right
        made.run()
        lengths[guided] = len({step for _, step in made.device.log})
    assert lengths[()] == 21
    # Of each seven outputs three are forced: they come with the one after them.
    assert lengths[(0,)] == 21 - 3 * 3


def test_a_guide_comes_before_the_first_token():
    made = Bench(1)
    made.core.handle(make_request(0, [1], 9))
    made.crank()
    with pytest.raises(KeyError, match="request 0 has begun"):
        made.core.scheduler.guide(0, Numbered())
    with pytest.raises(KeyError):
        made.core.scheduler.guide(7, Numbered())


@pytest.mark.req("RL-19")
def test_a_step_is_planned_submitted_masked_awaited_and_taken_in_and_there_is_none_without_requests(monkeypatch):
    idle = Bench(1)
    assert idle.core.step() is None and not idle.device.log, "a step of no request"
    made = bench(1, 0, (0, 1, 2, 3))
    device, scheduler = made.device, made.core.scheduler
    calls: list[str] = []

    def logged(name, of, verb) -> None:
        call = getattr(of, verb)
        monkeypatch.setattr(of, verb, lambda *given: (calls.append(name), call(*given))[1])

    monkeypatch.setattr(Numbered, "forced", lambda guide: [])
    for name, of, verb in (
        *(("plan", scheduler, "schedule"), ("submit", device, "submit"), ("fill", scheduler._tenancy.guides, "inputs")),
        *(("sample", device, "sample"), ("wait", device, "collect"), ("take in", scheduler._retirement, "take")),
    ):
        logged(name, of, verb)
    while made.core.has_work:
        del calls[:]
        made.crank()
        assert calls == ["plan", "submit", "fill", "sample", "wait", "take in"]
    del calls[:]
    assert made.core.step() is None and set(calls) <= {"plan"}
