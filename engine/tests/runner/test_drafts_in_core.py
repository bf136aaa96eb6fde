"""The real scheduler, cache and runner with drafts from any proposer: every request gets the tokens, and their logprobs, that it
gets alone and without drafts."""

import msgspec
import numpy as np
import pytest
from grids import mostly_slow
from test_core_with_runner import OUTPUTS, SCHEDULER, VOCAB, Engine, requests

from penstock.engine.config import SpeculativeConfig
from penstock.engine.core.plan import StepResult
from penstock.engine.runner import model_runner, own_drafts
from penstock.engine.spec.costs import Timing
from penstock.engine.spec.proposer import Proposer

K = 4
DIES = -2
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=K, prompt_lookup_min=1)
SUFFIX = SpeculativeConfig(method="suffix", num_speculative_tokens=K)


class Guesses(Proposer):
    """Drafts from the tokens that requests are known to get: each right with a probability, else another token."""

    def __init__(self, outputs: dict[int, list[int]], right: float, wrong: int | None = None) -> None:
        prompts = {request.index: list(request.prompt_token_ids) for request in requests(False)}
        self.known = [prompts[index] + tokens for index, tokens in outputs.items()]
        self.right, self.wrong, self.rng = right, wrong, np.random.default_rng(0)

    def propose(self, table, rows, known, most):
        if self.wrong == DIES:
            raise RuntimeError("the drafter is gone")
        drafts = np.full((len(rows), K), -1, np.int32)
        for at, (row, length) in enumerate(zip(rows.tolist(), known.tolist(), strict=True)):
            there = table.token_ids[row, :length].tolist()
            (due,) = {tuple(it) for it in self.known if it[:length] == there} or {()}
            for place, token in enumerate(due[length : length + K]):
                drafts[at, place] = token if self.rng.random() < self.right else self.other(token)
        return drafts

    def other(self, token: int) -> int:
        return (token + 1) % VOCAB if self.wrong is None else self.wrong

    def ended(self, output) -> None:
        assert len(output) <= OUTPUTS + K


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "adjusted"])
def adjusted(request) -> bool:
    return request.param


@pytest.fixture(scope="module")
def asked(adjusted):
    """The requests, some of which ask for logprobs."""
    return [
        msgspec.structs.replace(it, sampling=msgspec.structs.replace(it.sampling, logprobs=2 if it.index % 3 == 0 else None))
        for it in requests(adjusted)
    ]


class Watched(Engine):
    """Counts what a runner's steps accept, and keeps the logprobs of tokens."""

    def __init__(self, runner, depth: int, num_blocks: int) -> None:
        super().__init__(runner, depth, num_blocks)
        self.accepted = self.drafted = 0
        sample = runner.sample

        def watched(inputs) -> StepResult:
            plan = runner._launched.plan
            result = sample(inputs)
            self.accepted += int((result.counts - 1).clip(0).sum())
            self.drafted += int(plan.num_drafts.sum())
            return result

        runner.sample = watched


@pytest.fixture(scope="module")
def alone(checkpoint, build_runner, asked):
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    runner = build_runner(checkpoint("llama"), scheduler=SCHEDULER)
    for request in asked:
        engine = Engine(runner, depth=1, num_blocks=100)
        tokens |= engine.run([request])
        logprobs |= engine.logprobs
    assert {len(found) for found in logprobs.values()} == {OUTPUTS}
    return tokens, logprobs


def drafting(checkpoint, build_runner, depth, num_blocks, config, proposer=None):
    scheduler = msgspec.structs.replace(SCHEDULER, num_speculative_tokens=K)
    runner = build_runner(checkpoint("llama"), scheduler=scheduler, speculative=config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_drafts, "measure_steps", lambda *_: [Timing(1, 0, 1e9), Timing(1, K, 1e9)])  # drafts always pay
        if proposer is not None:
            patch.setattr(model_runner, "lookup_proposer", lambda *_: proposer)
        return Watched(runner, depth, num_blocks)


@pytest.mark.parametrize(("depth", "num_blocks"), [(1, 22), (2, 100)], ids=["preempted", "roomy"])
@pytest.mark.parametrize(
    "proposer", mostly_slow(["ngram", "suffix", "right", "wrong", "mixed", "outside", "dies"], ("ngram", "mixed", "dies"))
)
@pytest.mark.req("SD-01", "SD-03", "SD-04", "SD-11", "SD-20", "SD-21", "SD-22", "SD-23", "SPV-03", "SPV-12")
def test_drafts_change_no_token(checkpoint, build_runner, asked, alone, depth, num_blocks, proposer):
    tokens, logprobs = alone
    own = {
        "right": Guesses(tokens, 1.0),
        "wrong": Guesses(tokens, 0.0),
        "mixed": Guesses(tokens, 0.7),
        "outside": Guesses(tokens, 0.7, wrong=VOCAB + 5),
        "dies": Guesses(tokens, 0.7, wrong=DIES),
    }.get(proposer)
    config = SUFFIX if proposer == "suffix" else NGRAM
    engine = drafting(checkpoint, build_runner, depth, num_blocks, config, own)
    try:
        assert engine.run(asked) == tokens
        assert engine.logprobs == logprobs
        assert (engine.core.stats().preemptions > 0) == (num_blocks == 22)
        assert (engine.drafted > 0) == (proposer != "dies" or depth == 2)
        if proposer == "wrong":
            assert engine.accepted == 0
        if proposer == "right":
            assert engine.accepted > 100
    finally:
        engine.executor.close()


@pytest.mark.req("SD-26", "SD-27", "SPV-08")
def test_steps_give_as_many_tokens_as_the_shares_of_the_positions_say(checkpoint, build_runner, asked, alone):
    """Drafts that are right with probability a, each by itself: (1 - a^(k + 1)) / (1 - a) tokens a step."""
    tokens, _ = alone
    right, rows = 0.7, 0
    drafted, accepted = np.zeros(K, np.int64), np.zeros(K, np.int64)
    for seed in range(6):
        proposer = Guesses(tokens, right)
        proposer.rng = np.random.default_rng(seed)
        engine = drafting(checkpoint, build_runner, 1, 100, NGRAM, proposer)
        assert engine.run(asked) == tokens
        drafts = engine.core.stats().step.drafts
        rows += drafts.rows
        drafted += drafts.drafted
        accepted += drafts.accepted
    assert (np.diff(drafted) <= 0).all() and (np.diff(accepted) < 0).all()
    due = right ** np.arange(1, K + 1)
    shares = accepted / drafted
    assert (np.abs(shares - due) < 4 * np.sqrt(due * (1 - due) / drafted)).all()
    mean = 1 + accepted.sum() / rows
    formula = (1 - right ** (K + 1)) / (1 - right)
    # Towards their ends requests have fewer drafts than K.
    assert 0.8 * formula < mean < formula + 4 / np.sqrt(rows)
    assert mean == pytest.approx(1 + (shares * drafted).sum() / rows)


def test_a_request_may_do_without(checkpoint, build_runner, asked, alone):
    tokens, _ = alone
    engine = drafting(checkpoint, build_runner, 1, 100, NGRAM, Guesses(tokens, 1.0))
    without = [
        msgspec.structs.replace(it, sampling=msgspec.structs.replace(it.sampling, speculative_decoding=False)) for it in asked
    ]
    assert engine.run(without) == tokens and engine.drafted == 0
