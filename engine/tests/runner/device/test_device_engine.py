"""What goes on around a device's steps: requests that end, are aborted and fail while steps are in flight; and who waits."""

import gzip
import json
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from test_core_with_runner import SCHEDULER, requests
from test_device_runner import VOCAB, Engine

from penstock.engine.commands import ResetPrefixCache
from penstock.engine.config import SchedulerConfig
from penstock.engine.core.core import MAX_FAILURES
from penstock.engine.core.executor import StepFailed
from penstock.engine.core.plan import SampleInputs
from penstock.engine.messages import AbortRequests, AddRequest, Control, FinishReason
from penstock.engine.runner.device.program import StepShape
from penstock.engine.runner.device.runtime import DeviceFailed
from penstock.engine.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def ask(index: int, length: int = 20, sampling: SamplingParams = GREEDY, seed: int | None = None) -> AddRequest:
    tokens = np.random.default_rng(index if seed is None else seed).integers(0, VOCAB, length).tolist()
    return AddRequest(index, f"r{index}", tokens, sampling, float(index))


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("llama")


@pytest.fixture(scope="module")
def runners(path, build_device_runner):
    """By depth; each test runs until nothing is left."""
    return {depth: build_device_runner(path, scheduler=SCHEDULER, depth=depth) for depth in (1, 2)}


def engine(runners, depth: int, num_blocks: int = 100) -> Engine:
    return Engine(runners[depth], depth, num_blocks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen3-windows", "phi3-longrope", "olmo2"])
def test_families_and_groups_of_windows_give_the_tokens_of_a_cpu(checkpoint, build_runner, build_device_runner, name):
    """Greedy and random, in a crowd that is chunked and preempted; windows give blocks back while steps are in flight."""
    batch = requests(adjusted=False)
    config = msgspec.structs.replace(SCHEDULER, max_num_batched_tokens=32)
    expected = Engine(build_runner(checkpoint(name), scheduler=config, form="reference"), 1, 120).run(batch)
    found = Engine(build_device_runner(checkpoint(name), scheduler=config), 2, 60)
    assert found.run(batch) == expected


@pytest.mark.req("MR-12", "AS-06", "AS-09", "MR-11", "MR-13", "CG-05")
def test_the_host_waits_once_a_step_and_nothing_moves(runners):
    found = engine(runners, 2)
    runner, runtime = found.runner, found.runner.runtime
    persistent = [*vars(runner.state).values(), *vars(runner.buffers.inputs).values(), runner.buffers.results]
    places = [tensor.data_ptr() for tensor in persistent]
    before = (runtime.waits, runtime.synchronizations, runtime.uploads, runtime.downloads)
    found.run([ask(index, 30 + index) for index in range(8)])
    steps = found.core.num_steps
    now = (runtime.waits, runtime.synchronizations, runtime.uploads, runtime.downloads)
    assert [after - earlier for after, earlier in zip(now, before, strict=True)] == [steps, 0, steps, steps]
    assert [tensor.data_ptr() for tensor in persistent] == places


@pytest.mark.req("AS-01", "AS-03", "AS-06")
def test_a_step_is_launched_before_anybody_knows_the_tokens_of_the_one_before(runners, driver):
    runner = runners[2]
    play = driver(runner, poison=False)
    sequence = play.admit(ask(1).prompt_token_ids)
    first = play.plan([(sequence, 20)])
    sequence.tokens.append(-1)  # whatever it is
    second = play.plan([(sequence, 1)])
    waits, pending = runner.runtime.waits, []
    for plan in (first, second):
        runner.execute(plan)
        pending.append(runner.sample(SampleInputs(plan.step_id)))
    assert runner.runtime.waits == waits
    tokens = [step.result().token_ids[0, 0] for step in pending]
    alone = Engine(runner, 1, 100).run([ask(1)])[1]
    assert tokens == alone[:2]


def lives(found: Engine, batch: list[AddRequest], aborted: dict[int, int]) -> None:
    """Runs requests of which one comes each second step and some are aborted: index → step."""
    step = 0
    while batch or found.core.has_work:
        if batch and step % 2 == 0:
            found.core.handle(batch.pop(0))
        if gone := [index for index, at in aborted.items() if at == step]:
            found.core.handle(AbortRequests(gone))
        found.step()
        step += 1


@pytest.mark.slow
@pytest.mark.req("AS-10", "AS-12", "AS-15", "AS-17")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_stops_and_aborts_in_flight_touch_nobody_else(runners, depth, seed):
    rng = np.random.default_rng(seed)
    alone = engine(runners, 1)
    batch, stops = [ask(index, int(rng.integers(1, 60)), seed=seed * 100 + index) for index in range(12)], {}
    expected = alone.run(batch)
    for index in range(0, 12, 3):
        stops[index] = expected[index][int(rng.integers(0, 12))]
        sampling = msgspec.structs.replace(GREEDY, stop_token_ids=(stops[index],))
        batch[index] = msgspec.structs.replace(batch[index], sampling=sampling)
    aborted = {index: int(rng.integers(0, 30)) for index in range(1, 12, 4)}
    found = engine(runners, depth, num_blocks=int(rng.integers(21, 40)))
    lives(found, list(batch), dict(aborted))
    for index, tokens in expected.items():
        got, reason = found.tokens.get(index, []), found.finished[index].reason
        if index in stops and reason is not FinishReason.ABORT:
            assert got == tokens[: tokens.index(stops[index]) + 1] and reason is FinishReason.STOP
        elif index in aborted:
            assert got == tokens[: len(got)] and reason in (FinishReason.ABORT, FinishReason.LENGTH)
        else:
            assert got == tokens and reason is FinishReason.LENGTH
    assert found.core.scheduler.kv.pool.num_used == 0


@pytest.mark.req("AS-11")
def test_requests_that_lose_their_rows_to_a_command_go_on_as_they_were(runners):
    batch = [ask(index, 40) for index in range(5)]
    expected = engine(runners, 1).run(batch)
    found = engine(runners, 2)
    for request in batch:
        found.core.handle(request)
    for step in range(200):
        if step % 5 == 4:
            found.core.handle(Control(step, ResetPrefixCache(True)))
        found.step()
        if not found.core.has_work:
            break
    assert found.tokens == expected and found.core.stats().preemptions > 5


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_outside_the_vocabulary_are_that_requests_error(runners, depth):
    bad = msgspec.structs.replace(ask(3), prompt_token_ids=[5, VOCAB + 7, 9])
    batch = [ask(1), bad, ask(2)]
    expected = engine(runners, 1).run([ask(1), ask(2)])
    found = engine(runners, depth)
    tokens = found.run(batch)
    assert tokens == expected
    assert found.finished[3].error == f"token {VOCAB + 7} at position 1 is outside the vocabulary of {VOCAB}"


@pytest.mark.parametrize("depth", [1, 2])
def test_logits_that_are_not_finite_are_that_requests_error(path, build_device_runner, runners, depth):
    batch = [ask(index) for index in (1, 2)]
    expected = engine(runners, 1).run(batch)
    used = {token for request in batch for token in [*request.prompt_token_ids, *expected[request.index]]}
    broken = next(token for token in range(VOCAB) if token not in used)
    runner = build_device_runner(path, scheduler=SCHEDULER, depth=depth)
    found = Engine(runner, depth, 100)
    runner.model.embed_tokens.weight[broken] = float("nan")
    bad = msgspec.structs.replace(ask(3, 40), prompt_token_ids=[broken] * 3)
    assert found.run([batch[0], bad, batch[1]]) == expected
    assert f"the model's logits are not finite ({VOCAB} NaN and 0 infinite of {VOCAB})" in (found.finished[3].error or "")
    assert (found.finished[3].error or "").endswith("; the first values that are not: embed_tokens")
    assert found.core.stats().step.not_finite == 1, "the step that was in flight has it again"


@pytest.mark.req("IPC-11")
@pytest.mark.parametrize("part", ["forward", "compute_logits"])
def test_a_step_that_fails_takes_its_requests_and_no_others(runners, monkeypatch, part):
    expected = engine(runners, 1).run([ask(1), ask(2)])
    found = engine(runners, 2)
    runner, calls, real = found.runner, [], getattr(found.runner.model, part)

    def break_down(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise RuntimeError("an operator is missing")
        return real(*arguments)

    monkeypatch.setattr(runner.model, part, break_down)
    found.run([ask(1)])
    assert "RuntimeError: an operator is missing" in (found.finished[1].error or "")
    assert found.tokens[1] == expected[1][: len(found.tokens[1])]
    assert found.run([ask(2)])[2] == expected[2]
    monkeypatch.undo()
    monkeypatch.setattr(runner.model, part, lambda *_: 1 / 0)
    with pytest.raises(StepFailed, match="division by zero"):
        for index in range(10, 10 + MAX_FAILURES):
            found.run([ask(index)])
    while found.core._submitted:
        found.core._submitted.popleft()


@pytest.mark.parametrize("moment", ["launch", "wait"])
def test_a_lost_device_ends_the_core_with_its_name(path, build_device_runner, monkeypatch, moment):
    found = Engine(build_device_runner(path, scheduler=SCHEDULER), 2, 100)
    runner, runtime = found.runner, found.runner.runtime
    found.core.handle(ask(1))
    found.step()
    runtime.broken = "CUDA error: device-side assert triggered"

    def lost(*_):
        raise RuntimeError("lost")

    if moment == "launch":
        monkeypatch.setattr(runner.model, "forward", lost)
    else:
        monkeypatch.setattr(runtime, "finish", lost)
    with pytest.raises(DeviceFailed, match="CUDA error: device-side assert triggered"):
        for _ in range(5):
            found.step()


@pytest.mark.req("MR-01")
def test_a_step_is_sampled_once_before_the_next(runners, driver):
    runner = runners[1]
    play = driver(runner, poison=False)
    plan = play.plan([(play.admit(ask(1).prompt_token_ids), 20)])
    with pytest.raises(RuntimeError, match="none waits for it"):
        runner.sample(SampleInputs(plan.step_id))
    runner.execute(plan)
    with pytest.raises(RuntimeError, match=f"step {plan.step_id} waits for it"):
        runner.sample(SampleInputs(plan.step_id + 1))
    with pytest.raises(RuntimeError, match=f"step {plan.step_id} has not been sampled yet"):
        runner.execute(plan)
    assert runner.sample(SampleInputs(plan.step_id)).result().counts.tolist() == [1]


@pytest.mark.req("IB-01")
def test_what_the_host_does_in_a_decode_step_does_not_grow_with_what_rows_hold(runners):
    """Numbers sent for a step without changes: the request alone."""
    found = engine(runners, 2)
    found.core.handle(ask(1, 90))
    sent, upload = [], found.runner.runtime.upload
    for _ in range(3):
        found.step()
    found.runner.runtime.upload = lambda source, target: (sent.append(len(source)), upload(source, target))
    try:
        while found.core.has_work:
            found.step()
    finally:
        del found.runner.runtime.upload
    begin = 4 + 4 + 3 * 8  # the slot, a shared prefix, three numbers for each of six rows, and where they begin
    assert min(sent) == begin and max(sent) == begin + 5, "a block now and then: four numbers of its run, and it"


def test_steps_may_be_smaller_than_a_block(path, build_device_runner, runners):
    batch = [ask(index) for index in range(3)]
    expected = engine(runners, 1).run(batch)
    small = build_device_runner(path, scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=5))
    assert Engine(small, 2, 100).run(batch) == expected
    with pytest.raises(ValueError, match="a step of 9 tokens of 1 requests, where there is room for 8 tokens of 3 requests"):
        small.buffers.of(StepShape(9, 1, 9))


def test_what_kernels_read_begins_where_they_were_compiled_for(checkpoint, build_device_runner):
    """At multiples of 16 bytes, whatever the numbers of rows, tokens and blocks are."""
    scheduler = SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=33)
    runner = build_device_runner(checkpoint("gemma3"), scheduler=scheduler, max_model_len=311)
    step = runner.program.step(StepShape(33, 5, 9), runner._staging.request(5), runner.ops, runner.kv_caches)
    request, inputs = vars(step.request).values(), vars(step.inputs).values()
    groups = [tensor for group in step.ctx.layer_groups for tensor in (group.slot_mapping, group.batch.block_table)]
    tensors = [*request, *inputs, *vars(runner.state).values(), *groups, runner.buffers.results, runner.sampler.params]
    assert len(tensors) > 20 and not [tensor.shape for tensor in tensors if tensor.data_ptr() % 16]


@pytest.mark.req("PERF-07")
def test_the_vocabulary_is_multiplied_by_one_token_of_each_request(runners, driver, monkeypatch):
    runner, rows = runners[2], []
    real = runner.model.compute_logits
    monkeypatch.setattr(runner.model, "compute_logits", lambda hidden: (rows.append(len(hidden)), real(hidden))[1])
    play = driver(runner, poison=False)
    sequences = [play.admit(ask(index, 14).prompt_token_ids) for index in range(3)]
    play.step([(sequence, 14) for sequence in sequences])
    play.step([(sequence, 1) for sequence in sequences])
    assert rows == [3, 3]


@pytest.mark.req("MR-17")
def test_the_parts_of_every_step_are_in_a_profile_by_name(runners, tmp_path):
    found = engine(runners, 2)
    runner, before = found.runner, found.core.num_steps
    runner.start_profile()
    found.run([ask(1)])
    path = runner.stop_profile(tmp_path)
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    names = Counter(event["name"] for event in events if event.get("ph") == "X")
    steps = found.core.num_steps - before
    assert {name: names[name] for name in ("execute", "sample", "lm_head")} == {
        "execute": steps,
        "sample": steps,
        "lm_head": steps,
    }
    assert names["attend"] == names["prepare_kv"] == steps * runner.decoder_config.num_layers
