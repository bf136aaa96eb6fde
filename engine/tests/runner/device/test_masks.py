"""Masks of a step: nothing is sampled without its own, on a CPU and on a device."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_graphs import RecordingGraphs
from test_device_choice import REQUEST, ROWS, VOCAB, Requests, logits_of, on_cpu

from penstock.engine.config import GraphConfig
from penstock.engine.core.executor import StepFailed
from penstock.engine.core.plan import SampleInputs, StepResult
from penstock.engine.runner.sampler.adjustments import NOTHING_LEFT
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling.buffers import Column

MODEL_VOCAB = 257
WORDS = -(-MODEL_VOCAB // 32)
GREEDY, RANDOM = SamplingParams(max_tokens=9, temperature=0.0), SamplingParams(max_tokens=9, temperature=1.5, seed=4)
LOUD = SamplingParams(max_tokens=9, temperature=1.0, seed=2, top_k=3, logprobs=2, repetition_penalty=1.3)


def bits(*allowed: set[int], words: int = WORDS) -> np.ndarray:
    """[l, words]: a mask of each set of tokens."""
    masks = np.zeros((len(allowed), words * 32), np.uint8)
    for mask, tokens in zip(masks, allowed, strict=True):
        mask[list(tokens)] = 1
    return np.packbits(masks, axis=1, bitorder="little").view(np.int32)


def sampled(runner, plan, masked=(), masks=None) -> StepResult:
    inputs = SampleInputs(plan.step_id, np.array(masked, np.int32), bits() if masks is None else masks)
    runner.execute(plan)
    result = runner.sample(inputs)
    return result if isinstance(result, StepResult) else result.result()


@pytest.fixture(params=["build_runner", "build_device_runner"])
def runner(request, checkpoint):
    return request.getfixturevalue(request.param)(checkpoint("llama"))


@pytest.mark.parametrize("params", [GREEDY, RANDOM, LOUD], ids=["greedy", "random", "loud"])
def test_masked_rows_sample_what_is_allowed_and_others_what_they_would(runner, driver, params):
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    play = driver(runner)
    free = sampled(runner, play.plan([(play.admit(prompt, params), len(prompt)) for prompt in prompts])).token_ids[:, 0]
    play = driver(runner)
    plan = play.plan([(play.admit(prompt, params), len(prompt)) for prompt in prompts])
    allowed = {3, 64, 255} - {int(free[0])}, {int(free[2])}
    found = sampled(runner, plan, [0, 2], bits(*allowed))
    assert int(found.token_ids[0, 0]) in allowed[0]
    assert found.token_ids[1:, 0].tolist() == free[1:].tolist()
    assert found.counts.tolist() == [1, 1, 1] and not found.failed


def test_a_masks_rows_are_found_beside_rows_that_do_not_sample(runner, driver):
    play = driver(runner)
    chunk, one, other = (play.admit(tokens, GREEDY) for tokens in ([5] * 9, [6, 7], [8, 9]))
    found = sampled(runner, play.plan([(chunk, 4), (one, 2), (other, 2)]), [1, 2], bits({40}, {41}))
    assert found.token_ids[1:, 0].tolist() == [40, 41] and found.counts.tolist() == [0, 1, 1]


def test_a_row_with_drafts_has_a_mask_for_each_of_its_choices(runner, driver):
    """The row before it has none; the draft that its mask does not allow is not accepted, though the model would choose it."""
    play = driver(runner)
    free, bound = play.admit([8, 9], GREEDY), play.admit([5, 6, 7], GREEDY)
    play.step([(free, 2), (bound, 3)])
    plan = play.plan([(free, 1), (bound, 3)])
    drafts = np.array([0, 2], np.int32), np.array([1], np.int32), np.array([40, 41], np.int32)
    plan = msgspec.structs.replace(
        plan, samples=np.ones(2, np.bool_), num_drafts=drafts[0], draft_rows=drafts[1], draft_ids=drafts[2]
    )
    found = sampled(play.runner, plan, [1], bits({40}, {41}, {42}))
    assert found.token_ids[1].tolist() == [40, 41, 42] and found.counts.tolist() == [1, 3]
    bound.tokens += [40, 41, 42]
    again = msgspec.structs.replace(
        play.plan([(free, 1), (bound, 3)]), samples=plan.samples, num_drafts=drafts[0], draft_rows=drafts[1], draft_ids=drafts[2]
    )
    found = sampled(play.runner, again, [1], bits({40}, {50}, {51}))
    assert found.token_ids[1].tolist() == [40, 50, -1] and found.counts.tolist() == [1, 2]


def test_a_mask_of_nothing_ends_its_request_alone(runner, driver):
    play = driver(runner)
    plan = play.plan([(play.admit([5, 6], GREEDY), 2), (play.admit([7, 8], RANDOM), 2), (play.admit([9, 9], RANDOM), 2)])
    found = sampled(runner, plan, [0, 1], bits(set(), set()))
    assert found.failed == {0: NOTHING_LEFT, 1: NOTHING_LEFT} and found.counts.tolist() == [0, 0, 1]
    assert not len(found.not_finite), "the cache may keep what it has of them"


def test_masks_that_do_not_fit_the_step_fail_it(runner, driver):
    play = driver(runner)
    with pytest.raises(StepFailed, match="2 masks came for 1 choices"):
        sampled(runner, play.plan([(play.admit([5, 6], GREEDY), 2)]), [0], bits({1}, {2}))


def test_a_row_that_may_have_masks_is_not_sampled_in_a_graph(build_device_runner, checkpoint, driver):
    """Its graph ends with the logits; one that has sampled already takes no masks."""
    graphs = GraphConfig(mode="FULL_AND_PIECEWISE", capture_sizes=(1,))
    runner = build_device_runner(checkpoint("llama"), recording=RecordingGraphs(), graphs=graphs)
    runner.warm_up()
    while runner.graphs.capture_next():
        pass
    for guided in (True, False):
        play = driver(runner)
        sequence = play.admit([5, 6, 7], GREEDY)
        first = play.plan([(sequence, 3)])
        admission = msgspec.structs.replace(first.admissions[0], guided=guided)
        token = int(sampled(runner, msgspec.structs.replace(first, admissions=[admission])).token_ids[0, 0])
        sequence.tokens.append(token)
        decode = play.plan([(sequence, 1)])
        if guided:
            result = sampled(runner, decode, [0], bits({40}))
            assert result.graph.mode == "FULL" and result.token_ids.tolist() == [[40]]
        else:
            with pytest.raises(RuntimeError, match="its masks come too late"):
                sampled(runner, decode, [0], bits({40}))


@pytest.mark.parametrize("make", [on_cpu, Requests], ids=["cpu", "device"])
def test_a_processor_of_ones_own_brings_no_token_back(make):
    requests = [([1, 2], [], {"temperature": temperature, "extra_args": {"insist": 9}}) for temperature in (0.0, 0.8)]
    one = make(requests)
    assert one.choose(logits_of(2)).result[:, Column.TOKEN].tolist() == [9, 9]
    inputs = SampleInputs(1, np.array([0, 1], np.int32), bits({3}, {4}))
    assert one.choose(logits_of(2), inputs=inputs).result[:, Column.TOKEN].tolist() == [3, 4]


@given(st.lists(REQUEST, min_size=1, max_size=ROWS), st.integers(0, 99), st.data())
@settings(max_examples=40)
def test_what_else_a_request_asks_for_brings_nothing_back(requests, seed, data):
    """And a device gives the tokens of a CPU. Masks have fewer bits than there are logits, or more."""
    logits = logits_of(len(requests), seed)
    words = data.draw(st.sampled_from([3, -(-VOCAB // 32), 7]))
    allowed = [data.draw(st.sets(st.integers(0, min(VOCAB, words * 32) - 1), min_size=1)) for _ in requests]
    masked = np.array(sorted(data.draw(st.sets(st.integers(0, len(requests) - 1)))), np.int32)
    inputs = SampleInputs(1, masked, bits(*[allowed[at] for at in masked], words=words))
    cpu, device = on_cpu(requests), Requests(requests)
    expected, found = cpu.choose(logits, inputs=inputs), device.choose(logits, inputs=inputs)
    left = expected.result[:, Column.NOTHING_LEFT].numpy() == 0
    assert found.result[:, Column.NANS :].tolist() == expected.result[:, Column.NANS :].tolist()
    assert found.result[left, Column.TOKEN].tolist() == expected.result[left, Column.TOKEN].tolist()
    for at in masked[left[masked]].tolist():
        assert int(found.result[at, Column.TOKEN]) in allowed[at]
    assert torch.equal(logits, logits_of(len(requests), seed)), "the model's logits stay for logprobs"
