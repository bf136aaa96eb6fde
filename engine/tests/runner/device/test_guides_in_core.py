"""The real scheduler and a runner with guides: what a guide forces comes several tokens a step, and is what it would be one by
one."""

import msgspec
import numpy as np
import pytest
from test_core_with_runner import OUTPUTS, SCHEDULER, VOCAB, Engine, requests

from penstock.engine.config import GraphConfig
from penstock.engine.core.scheduling.guides import MAX_FORCED_TOKENS, most_forced
from penstock.engine.runner.device.device_runner import DeviceRunner

pytestmark = pytest.mark.slow

WORDS = -(-VOCAB // 32)
FORCED = MAX_FORCED_TOKENS + 4


class Pattern:
    """Tokens that follow from their places, then odd ones. `unknown` comes first among what it forces: no such token is there."""

    num_words, batcher, ended, is_open, error = WORDS, None, False, False, None

    def __init__(self, forces: bool, unknown: bool = False) -> None:
        self.forces, self.unknown, self.at = forces, unknown, 0

    def forced(self):
        if not self.forces or self.at >= FORCED:
            return ()
        due = [self.token(place) for place in range(self.at, FORCED)]
        return [VOCAB + 9, *due[1:]] if self.unknown else due

    def token(self, place):
        return (place * 7 + 3) % VOCAB

    def accept(self, token_ids):
        self.at += len(token_ids)

    def take(self, token_id):
        self.accept((token_id,))
        return False

    def fill(self, masks, drafts):
        for place, mask in enumerate(masks, self.at):
            allowed = np.zeros(WORDS * 32, np.uint8)
            allowed[[self.token(place)] if place < FORCED else np.arange(1, VOCAB, 2)] = 1
            mask[:] = np.packbits(allowed, bitorder="little").view(np.int32)


class Guided(Engine):
    """Guides requests when they come."""

    def __init__(self, runner, guides, depth=1, num_blocks=400):
        super().__init__(runner, depth, num_blocks)
        self.guides = guides

    def run(self, batch):
        handle = self.core.handle

        def guided(request):
            handle(request)
            if guide := self.guides.get(request.index):
                self.core.scheduler.guide(request.index, guide)

        self.core.handle = guided
        return super().run(batch)

    def _check_mirror(self) -> None:
        """The tokens that a device has sampled are on the device alone."""
        if not isinstance(self.runner, DeviceRunner):
            super()._check_mirror()
        elif self.runner.config.depth == 1:
            theirs, ours = self.core.scheduler.table, self.runner.state
            for row in np.flatnonzero(theirs.num_tokens).tolist():
                count = theirs.num_tokens[row]
                assert np.array_equal(ours.token_ids[row, :count], theirs.token_ids[row, :count])
                assert int(ours.num_computed[row]) == self.runner._requests.rows.num_computed[row] == theirs.num_computed[row]


# Room for what is forced beside the others' prompts.
ROOMY = msgspec.structs.replace(SCHEDULER, max_num_batched_tokens=256)


@pytest.fixture(scope="module", params=["cpu", "device-1", "device-2", "device-2-graphs"])
def runner(request, build_runner, build_device_runner, checkpoint):
    if request.param == "cpu":
        return build_runner(checkpoint("llama"), scheduler=ROOMY)
    graphs = GraphConfig(mode="FULL_AND_PIECEWISE", capture_sizes=(1, 2, 4, 8, 16, 64)) if "graphs" in request.param else None
    return build_device_runner(checkpoint("llama"), scheduler=ROOMY, depth=int(request.param.split("-")[1]), graphs=graphs)


@pytest.fixture(scope="module")
def one_by_one(runner):
    engine = Guided(runner, {index: Pattern(forces=False) for index in (0, 1, 2, 3, 4)}, runner.config.depth)
    return engine.run(requests(adjusted=False)), engine.core.num_steps


def test_masks_reach_the_runner_and_touch_nobody_else(runner, one_by_one):
    free, (tokens, _) = Guided(runner, {}, runner.config.depth).run(requests(adjusted=False)), one_by_one
    for index, stream in tokens.items():
        if index > 4:
            assert stream == free[index]
            continue
        assert stream[:FORCED] == [(place * 7 + 3) % VOCAB for place in range(FORCED)]
        assert len(stream) == OUTPUTS and all(token % 2 for token in stream[FORCED:])


def test_forced_tokens_come_several_a_step(runner, one_by_one):
    engine = Guided(runner, {index: Pattern(forces=True) for index in (0, 1, 2, 3, 4)}, runner.config.depth)
    tokens = engine.run(requests(adjusted=False))
    assert tokens == one_by_one[0]
    assert engine.core.num_steps < one_by_one[1], "and in fewer steps"


def test_a_forced_token_that_the_model_does_not_know_is_not_accepted(runner, one_by_one):
    engine = Guided(runner, {index: Pattern(forces=True, unknown=True) for index in (0, 1, 2, 3, 4)}, runner.config.depth)
    assert engine.run(requests(adjusted=False)) == one_by_one[0]


def test_a_step_forces_a_limited_number_of_tokens(runner, one_by_one, monkeypatch):
    forced, execute = [], runner.execute

    def counted(plan):
        forced.append(int(plan.num_drafts.sum()))
        execute(plan)

    monkeypatch.setattr(runner, "execute", counted)
    engine = Guided(runner, {index: Pattern(forces=True) for index in (0, 1, 2, 3, 4)}, runner.config.depth)
    assert engine.run(requests(adjusted=False)) == one_by_one[0]
    assert max(forced) == most_forced(runner.config.scheduler.max_num_seqs), "five requests could have five times as many"
