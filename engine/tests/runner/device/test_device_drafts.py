"""Drafts that a plan brings: a stream does not depend on them, on a CPU and on a device."""

import msgspec
import numpy as np
import pytest
from recording_graphs import RecordingGraphs

from penstock.engine.config import GraphConfig, SchedulerConfig
from penstock.engine.core.plan import SampleInputs, StepPlan, StepResult
from penstock.engine.runner.device.graphs.descriptor import GraphMode
from penstock.engine.sampling import SamplingParams

OUTPUTS, VOCAB = 30, 257
PARAMS = [
    SamplingParams(max_tokens=90, temperature=0.0),
    SamplingParams(max_tokens=90, temperature=1.5, seed=4),
    SamplingParams(max_tokens=90, temperature=1.0, seed=2, top_k=9, logprobs=2, repetition_penalty=1.3),
]
PROMPTS = [[5, 6, 7], [8, 9] * 9, [10, 11, 12, 13]]


def drafted(play, work) -> StepPlan:
    """A step of sequences, each with its drafts."""
    plan = play.plan([(sequence, 1 + len(drafts)) for sequence, drafts in work])
    counts = np.array([len(drafts) for _, drafts in work], np.int32)
    ids = np.array([token for _, drafts in work for token in drafts], np.int32)
    rows = np.flatnonzero(counts).astype(np.int32)
    return msgspec.structs.replace(plan, samples=np.ones(len(work), np.bool_), num_drafts=counts, draft_rows=rows, draft_ids=ids)


def launched(runner, plan):
    runner.execute(plan)
    return runner.sample(SampleInputs(plan.step_id))


def result_of(pending) -> StepResult:
    return pending if isinstance(pending, StepResult) else pending.result()


@pytest.fixture(params=["cpu", "device", "device with graphs"])
def runner(request, checkpoint, build_runner, build_device_runner):
    if request.param == "cpu":
        return build_runner(checkpoint("qwen3-windows"))
    mode = "FULL_AND_PIECEWISE" if "graphs" in request.param else "NONE"
    sizes = (1, 2, 4, 8, 16) if "graphs" in request.param else ()
    graphs = GraphConfig(mode=mode, capture_sizes=sizes)
    runner = build_device_runner(checkpoint("qwen3-windows"), recording=RecordingGraphs(), graphs=graphs)
    while runner.graphs.capture_next():
        pass
    return runner


def streams(runner, driver, drafts_of):
    """What each sequence generates, and the logprobs of the last one's tokens; `drafts_of(index, tokens)` are its drafts."""
    play = driver(runner)
    running = [play.admit(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    first = play.step([(sequence, len(sequence.tokens)) for sequence in running])
    logprobs = first.logprobs.sampled.tolist()
    outputs = [[token] for token in first.token_ids[:, 0].tolist()]
    steps = 0
    while min(map(len, outputs)) < OUTPUTS:
        work = [(sequence, drafts_of(at, outputs[at])) for at, sequence in enumerate(running)]
        plan = drafted(play, work) if any(drafts for _, drafts in work) else play.plan([(sequence, 1) for sequence, _ in work])
        result = result_of(launched(runner, plan))
        assert not result.failed
        steps += 1
        for at, ((sequence, drafts), count) in enumerate(zip(work, result.counts.tolist(), strict=True)):
            new = result.token_ids[at, :count].tolist()
            outputs[at] += new
            sequence.tokens += new
            sequence.computed -= len(drafts) + 1 - count
        logprobs += result.logprobs.sampled.tolist()
    return [tokens[:OUTPUTS] for tokens in outputs], logprobs[:OUTPUTS], steps


def test_streams_and_logprobs_do_not_depend_on_drafts(runner, driver):
    expected, logprobs, alone = streams(runner, driver, lambda *_: [])
    rng = np.random.default_rng(3)

    def guesses(at, tokens):
        """Of what comes, some tokens; one of them may be wrong, and one may be none of the vocabulary."""
        due = expected[at][len(tokens) : len(tokens) + int(rng.integers(0, 5))]
        if due and rng.random() < 0.5:
            due[rng.integers(len(due))] = int(rng.choice([7, VOCAB + 3]))
        return due

    found, scores, steps = streams(runner, driver, guesses)
    assert found == expected
    assert scores == pytest.approx(logprobs, abs=1e-4)
    assert steps < alone


def test_steps_of_equally_many_drafts_are_one_graph(checkpoint, build_device_runner, driver):
    """Three requests in a graph of four. The last steps of a stream have fewer drafts, and no graph of a whole step."""
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, num_speculative_tokens=3)
    graphs, recording = GraphConfig(mode="FULL_AND_PIECEWISE", capture_sizes=(1, 2, 4, 16)), RecordingGraphs()
    runner = build_device_runner(checkpoint("qwen3-windows"), recording=recording, graphs=graphs, scheduler=scheduler)
    runner.graphs.capture_first()
    expected, logprobs, alone = streams(runner, driver, lambda *_: [])
    launched, dispatch = [], runner.dispatcher.dispatch
    runner.dispatcher.dispatch = lambda batch: (launched.append(dispatch(batch)), launched[-1])[1]

    def guesses(at, tokens):
        """The last is wrong, if not by chance, and none of the vocabulary in two of the streams."""
        return [*expected[at][len(tokens) : len(tokens) + 2], VOCAB - 1 if at == 1 else VOCAB + 2]

    found, scores, steps = streams(runner, driver, guesses)
    assert found == expected and steps < alone / 2
    assert scores == pytest.approx(logprobs, abs=1e-4)
    full = [it for it in launched if it.descriptor.variant == "verification" and it.mode is GraphMode.FULL]
    assert {(it.descriptor.num_reqs, it.descriptor.num_tokens, it.reason) for it in full} == {(4, 16, "uniform")}
    assert len(full) > 5


def test_drafts_that_come_to_nothing_are_not_taken_from_the_rows_next_request(checkpoint, build_device_runner, driver):
    """Its plan is applied before the host hears of them."""
    runner = build_device_runner(checkpoint("llama"))
    play = driver(runner)
    expected = list(play.generate(play.admit([3, 1, 4, 1, 5]), 6))
    play = driver(runner)
    leaving = play.admit([5, 6, 7])
    play.step([(leaving, 3)])
    first = launched(runner, drafted(play, [(leaving, [VOCAB + 1, VOCAB + 2])]))
    play.release(leaving)
    coming = play.admit([3, 1, 4, 1, 5])
    assert coming.row == leaving.row
    second = launched(runner, play.plan([(coming, 5)]))
    assert first.result().counts.tolist() == [1]
    coming.tokens += second.result().token_ids[0].tolist()
    assert runner._requests.rows.num_computed[coming.row] == 5 and runner._requests.rows.num_tokens[coming.row] == 6
    assert [coming.tokens[-1], *play.generate(coming, 5)] == expected


def test_a_step_with_too_many_choices_is_refused_by_number(checkpoint, build_device_runner, driver):
    runner = build_device_runner(checkpoint("llama"))
    play = driver(runner)
    sequence = play.admit([5, 6, 7])
    play.step([(sequence, 3)])
    most = runner._max_logits_rows
    plan = drafted(play, [(sequence, [1] * most)])
    with pytest.raises(ValueError, match=f"step {plan.step_id} chooses {most + 1} tokens, where there is room for {most}"):
        runner.execute(plan)
