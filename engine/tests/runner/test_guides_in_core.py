"""The real scheduler and a runner with guides: what a guide forces comes several tokens a step, and is what it would be one by
one."""

import msgspec
import numpy as np
import pytest
from test_core_with_runner import OUTPUTS, SCHEDULER, VOCAB, Engine, requests

from penstock.engine.core.scheduling.guides import MAX_FORCED_TOKENS

WORDS = -(-VOCAB // 32)
FORCED = MAX_FORCED_TOKENS + 4


class Pattern:
    """Tokens that follow from their places, then odd ones. `unknown` comes first among what it forces: no such token is there."""

    num_words, ended, is_open, error = WORDS, False, False, None

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


@pytest.fixture(scope="module")
def runner(build_runner, checkpoint):
    # Room for what is forced beside the others' prompts.
    return build_runner(checkpoint("llama"), scheduler=msgspec.structs.replace(SCHEDULER, max_num_batched_tokens=256))


@pytest.fixture(scope="module")
def one_by_one(runner):
    engine = Guided(runner, {index: Pattern(forces=False) for index in (0, 1, 2, 3, 4)})
    return engine.run(requests(adjusted=False)), engine.core.num_steps


def test_masks_reach_the_runner_and_touch_nobody_else(runner, one_by_one):
    free, (tokens, _) = Engine(runner, 1, 400).run(requests(adjusted=False)), one_by_one
    for index, stream in tokens.items():
        if index > 4:
            assert stream == free[index]
            continue
        assert stream[:FORCED] == [(place * 7 + 3) % VOCAB for place in range(FORCED)]
        assert len(stream) == OUTPUTS and all(token % 2 for token in stream[FORCED:])


def test_forced_tokens_come_several_a_step(runner, one_by_one):
    engine = Guided(runner, {index: Pattern(forces=True) for index in (0, 1, 2, 3, 4)})
    tokens = engine.run(requests(adjusted=False))
    assert tokens == one_by_one[0]
    assert engine.core.num_steps < one_by_one[1], "and in fewer steps"


def test_a_forced_token_that_the_model_does_not_know_is_not_accepted(runner, one_by_one):
    engine = Guided(runner, {index: Pattern(forces=True, unknown=True) for index in (0, 1, 2, 3, 4)})
    assert engine.run(requests(adjusted=False)) == one_by_one[0]
