"""A device whose host looks drafts up: every request gets the tokens, and their logprobs, that it gets on a CPU, alone and
without drafts."""

from collections import Counter

import msgspec
import numpy as np
import pytest
from lettered_model import with_letters
from recording_graphs import RecordingGraphs
from test_core_with_runner import OUTPUTS, SCHEDULER, VOCAB, Engine, requests
from test_draft_model import alone as alone_of  # noqa: F401 (a fixture)
from test_drafts_in_core import DIES, NGRAM, SUFFIX, Guesses, K
from test_grammars_on_devices import FORM
from test_guides_in_core import ROOMY

from penstock.engine.config import GraphConfig
from penstock.engine.core.executor import Pending
from penstock.engine.core.plan import SampleInputs, StepResult
from penstock.engine.messages import AbortRequests, AddRequest
from penstock.engine.runner import own_drafts
from penstock.engine.runner.device import device_runner
from penstock.engine.runner.device.graphs.descriptor import GraphMode
from penstock.engine.sampling import SamplingParams
from penstock.engine.spec.costs import Timing
from penstock.engine.spec.proposer import Proposer

pytestmark = pytest.mark.slow

DRAFTING = msgspec.structs.replace(SCHEDULER, num_speculative_tokens=K, drafts_after_result=True)
FREE, DEAR = ([Timing(1, 0, plain), Timing(1, K, drafts)] for plain, drafts in ((1e9, 1.0), (1e-9, 1e9)))


class Watched:
    """A step that counts what comes of its drafts."""

    def __init__(self, pending: Pending, plan, counts: Counter) -> None:
        self.pending, self.plan, self.counts = pending, plan, counts

    def result(self) -> StepResult:
        result = self.pending.result()
        if len(self.plan.num_drafts):
            self.counts["accepted"] += int((result.counts - 1).clip(0).sum())
            self.counts["drafted"] += int(self.plan.num_drafts.sum())
        return result


class Drafting(Engine):
    """An engine on a device that proposes drafts."""

    def __init__(
        self, build, path, depth, num_blocks=100, config=NGRAM, proposer=None, timings=FREE, budget=48, lookahead=0, **kwargs
    ) -> None:
        scheduler = msgspec.structs.replace(DRAFTING, max_num_batched_tokens=budget, num_lookahead_tokens=lookahead)
        runner = build(path, scheduler=scheduler, depth=depth, speculative=config, **kwargs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(own_drafts, "measure_steps", lambda *_: timings)
            if proposer is not None:
                patch.setattr(device_runner, "lookup_proposer", lambda *_: proposer)
            super().__init__(runner, depth, num_blocks)
        depth = runner._own_drafts._depth
        depth.followed = lambda *_: None
        if timings is FREE:
            depth.observe_step = lambda *_: None  # free whatever steps take
        self.counts, self.in_flight, sample, submit = Counter(), Counter(), runner.sample, self.executor.submit

        def watched(inputs) -> Watched:
            plan = runner._launched.plan
            return Watched(sample(inputs), plan, self.counts)

        def submitted(plan, masked) -> None:
            self.in_flight[len(self.core.scheduler._in_flight)] += 1
            submit(plan, masked)

        runner.sample, self.executor.submit = watched, submitted


class Sevens(Proposer):
    """Always has as many drafts as there may be."""

    def propose(self, table, rows, known, most):
        return np.full((len(rows), K), 7, np.int32)


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("llama")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "adjusted"])
def asked(request) -> list[AddRequest]:
    """Greedy and random, some of which ask for logprobs."""
    return [
        msgspec.structs.replace(it, sampling=msgspec.structs.replace(it.sampling, logprobs=2 if it.index % 3 == 0 else None))
        for it in requests(request.param)
    ]


@pytest.fixture(scope="module")
def alone(path, build_runner, asked):
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    runner = build_runner(path, scheduler=SCHEDULER, form="reference")
    for request in asked:
        engine = Engine(runner, depth=1, num_blocks=100)
        tokens |= engine.run([request])
        logprobs |= engine.logprobs
    return tokens, logprobs


@pytest.mark.parametrize(
    ("asked", "depth", "num_blocks"),
    [(False, 1, 100), (True, 2, 22)],
    ids=["plain-roomy", "adjusted-preempted"],
    indirect=["asked"],
)
@pytest.mark.parametrize("proposer", ["ngram", "suffix", "right", "wrong", "mixed", "outside", "dies"])
@pytest.mark.req("SD-01", "SD-03", "SD-04", "SD-11", "SD-20", "SD-22", "SD-23", "SPV-03")
def test_drafts_change_no_token(path, build_device_runner, asked, alone, depth, num_blocks, proposer) -> None:
    tokens, logprobs = alone
    own = {
        "right": Guesses(tokens, 1.0),
        "wrong": Guesses(tokens, 0.0),
        "mixed": Guesses(tokens, 0.7),
        "outside": Guesses(tokens, 0.7, wrong=VOCAB + 5),
        "dies": Guesses(tokens, 0.7, wrong=DIES),
    }.get(proposer)
    config = SUFFIX if proposer == "suffix" else NGRAM
    engine = Drafting(build_device_runner, path, depth, num_blocks, config, own)
    assert engine.run(asked) == tokens
    assert engine.logprobs.keys() == logprobs.keys()
    for index, scores in engine.logprobs.items():
        assert scores == pytest.approx(logprobs[index], abs=1e-4)
    assert (engine.core.stats().preemptions > 0) == (num_blocks == 22)
    assert (engine.counts["drafted"] > 0) == (proposer != "dies")
    if proposer == "wrong":
        assert engine.counts["accepted"] == 0
    if proposer == "right":
        assert engine.counts["accepted"] > 100
    assert engine.core.scheduler.kv.pool.num_used == 0


class ForSome(Guesses):
    """Drafts for one of two requests."""

    def propose(self, table, rows, known, most):
        drafts = super().propose(table, rows, known, most)
        drafts[1::2] = -1
        return drafts


@pytest.mark.req("SD-12")
def test_drafts_of_some_requests_run_from_the_graphs_of_drafts_of_all(path, build_device_runner, alone_of) -> None:  # noqa: F811
    """The others' are guesses. Beside a prompt, and where a request has room for fewer, the step has no graph of its own."""
    tokens = alone_of("llama", False)
    graphs = GraphConfig(mode="FULL_AND_PIECEWISE", capture_sizes=(1, 2, 4, 8, 16, 32, 48))
    engine = Drafting(build_device_runner, path, 1, proposer=ForSome(tokens, 1.0), graphs=graphs, recording=RecordingGraphs())
    runner, steps = engine.runner, list[tuple[bool, bool]]()
    while runner.graphs.capture_next():
        pass
    begin = runner._begin

    def begun(plan, *given):
        step = begin(plan, *given)
        if len(plan.num_drafts):
            steps.append((bool((plan.num_drafts == K).all()), step.found.mode is GraphMode.FULL))
        return step

    runner._begin = begun
    assert engine.run(requests(False)) == tokens
    whole = [full for all_alike, full in steps if all_alike]
    assert len(whole) > 3 and all(whole)


@pytest.mark.parametrize("name", ["gemma3", "qwen3-windows"])
def test_groups_of_windows_lose_nothing(checkpoint, build_runner, build_device_runner, name) -> None:
    asked = requests(adjusted=False)
    expected = Engine(build_runner(checkpoint(name), scheduler=SCHEDULER, form="reference"), 1, 120).run(asked)
    engine = Drafting(build_device_runner, checkpoint(name), 2, 60, proposer=Guesses(expected, 0.7))
    assert engine.run(asked) == expected and engine.counts["accepted"] > 0


@pytest.fixture(scope="module")
def plain(path, build_runner):
    """The requests that ask for tokens alone, and what they get."""
    asked = requests(adjusted=False)
    return asked, Engine(build_runner(path, scheduler=SCHEDULER, form="reference"), 1, 100).run(asked)


def test_a_plan_with_drafts_is_alone_in_flight_and_others_are_not(path, build_device_runner, plain) -> None:
    """At depth 2. Where no drafts pay, nothing waits for them."""
    asked, tokens = plain
    dear = Drafting(build_device_runner, path, 2, proposer=Guesses(tokens, 1.0), timings=DEAR)
    assert dear.run(asked) == tokens
    assert not dear.counts["drafted"] and dear.in_flight[2] > 0.9 * dear.in_flight.total()
    free = Drafting(build_device_runner, path, 2, proposer=Guesses(tokens, 1.0))
    scheduler, submit = free.core.scheduler, free.executor.submit

    def submitted(plan, masked) -> None:
        flights = [flight.plan for flight in scheduler._in_flight._flights]
        assert len(flights) == 1 or not any(len(flight.num_drafts) for flight in flights)
        submit(plan, masked)

    free.executor.submit = submitted
    assert free.run(asked) == tokens
    assert free.counts["accepted"] > 100 and free.in_flight[1] > 0.5 * free.in_flight.total()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("timings", [FREE, DEAR], ids=["drafts", "none"])
def test_an_output_is_remembered_as_the_host_has_it(path, build_device_runner, plain, depth, timings) -> None:
    """Also of requests that are aborted, while a step of theirs is in flight whose token nobody knows."""
    asked, tokens = plain
    ended: list[list[int]] = []

    class Remembers(Guesses):
        def ended(self, output) -> None:
            ended.append(output.tolist())

    engine = Drafting(build_device_runner, path, depth, proposer=Remembers(tokens, 0.7), timings=timings)
    ended.clear()
    gone, waiting, step = {2: 6, 5: 9, 7: 4}, list(asked), 0
    while waiting or engine.core.has_work:
        if waiting and step % 2 == 0:
            engine.core.handle(waiting.pop(0))
        if out := [index for index, at in gone.items() if asked[index] not in waiting and at <= step - 2 * index]:
            engine.core.handle(AbortRequests(out))
            gone = {index: at for index, at in gone.items() if index not in out}
        engine.core.step()
        step += 1
    assert not gone and engine.core.scheduler.kv.pool.num_used == 0
    outputs = [it for it in ended if it]
    assert len(outputs) >= len(asked) - 4
    for output in outputs:
        assert any(output == known[: len(output)] for known in tokens.values()), output


def test_a_result_that_comes_late_leaves_the_rows_next_request_alone(path, build_device_runner, driver) -> None:
    runner = build_device_runner(path, scheduler=DRAFTING, speculative=NGRAM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_drafts, "measure_steps", lambda *_: FREE)
        patch.setattr(device_runner, "lookup_proposer", lambda *_: Sevens())
        runner.warm_up()
    play = driver(runner)
    leaving = play.admit([5, 6, 7])
    plan = play.plan([(leaving, 3)])
    runner.execute(plan)
    late = runner.sample(SampleInputs(plan.step_id))
    play.release(leaving)
    coming = play.admit([3, 1, 4, 1, 5])
    assert coming.row == leaving.row
    plan = play.plan([(coming, 5)])
    runner.execute(plan)
    pending = runner.sample(SampleInputs(plan.step_id))
    assert late.result().counts.tolist() == [1]
    assert runner._requests.rows.token_ids[coming.row, :5].tolist() == [3, 1, 4, 1, 5]
    assert (runner._own_drafts.drafts[coming.row] == -1).all()
    assert pending.result().drafts.tolist() == [[7] * K]


def test_rows_that_are_taken_at_once_mix_nothing_up(path, build_device_runner, plain) -> None:
    """Requests come and are aborted all the time."""
    asked, tokens = plain
    engine = Drafting(build_device_runner, path, 2, 40, proposer=Guesses(tokens, 0.7))
    engine.core.step()
    found: dict[int, list[int]] = {}
    copies = [msgspec.structs.replace(it, index=100 * turn + it.index) for turn in range(4) for it in asked]
    aborted = {it.index for it in copies if (it.index + it.index // 100) % 3 == 0}
    step = 0
    while copies or engine.core.has_work:
        while copies and len(engine.core.scheduler.indexes()) < 8:
            engine.core.handle(copies.pop(0))
        if step % 3 == 0 and (there := [it for it in engine.core.scheduler.indexes() if it in aborted and it in found]):
            engine.core.handle(AbortRequests(there[:1]))
        frame = engine.core.step()
        if frame is not None:
            offsets, ids = np.frombuffer(frame.offsets, np.int32), np.frombuffer(frame.token_ids, np.int32)
            for at, index in enumerate(np.frombuffer(frame.indexes, np.int64).tolist()):
                found.setdefault(index, []).extend(ids[offsets[at] : offsets[at + 1]].tolist())
        step += 1
    assert engine.counts["accepted"] > 50
    cut = [index for index, got in found.items() if len(got) < OUTPUTS]
    assert cut and set(cut) <= aborted
    for index, got in found.items():
        assert got == tokens[index % 100][: len(got)]


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_grammar_forces_and_what_is_looked_up_are_verified_in_one_step(
    path, build_runner, build_device_runner, tmp_path, depth
) -> None:
    lettered = with_letters(path, tmp_path / "model")
    asked = [msgspec.structs.replace(it, grammar=FORM if it.index % 2 else None) for it in requests(adjusted=False)]
    expected = Engine(build_runner(lettered, scheduler=ROOMY, form="reference"), 1, 400)
    engine = Drafting(build_device_runner, lettered, depth, 400, proposer=Sevens(), budget=ROOMY.max_num_batched_tokens)
    mixed, execute = [], engine.runner.execute

    def counted(plan) -> None:
        mixed.append(0 < len(plan.draft_rows) < np.count_nonzero(plan.num_drafts))
        execute(plan)

    engine.runner.execute = counted
    try:
        assert engine.run(asked) == expected.run(asked)
        assert any(mixed) and engine.counts["accepted"] > 0
    finally:
        for it in (engine, expected):
            it.core._grammars.close()


def test_a_request_may_do_without(path, build_device_runner, plain) -> None:
    asked, tokens = plain
    without = [
        msgspec.structs.replace(it, sampling=msgspec.structs.replace(it.sampling, speculative_decoding=False)) for it in asked
    ]
    engine = Drafting(build_device_runner, path, 2, proposer=Guesses(tokens, 1.0))
    assert engine.run(without) == tokens and not engine.counts["drafted"]


def test_a_context_that_is_full_has_no_place_for_drafts(path, build_runner, build_device_runner) -> None:
    """Requests that end with the context, at the last token of their rows."""
    asked = [
        AddRequest(index, f"r{index}", [index + 3] * (5 + index), SamplingParams(max_tokens=99, temperature=0.0), float(index))
        for index in range(4)
    ]
    kwargs = {"max_model_len": 48}
    expected = Engine(build_runner(path, scheduler=SCHEDULER, form="reference", **kwargs), 1, 100).run(asked)
    assert {len(it.prompt_token_ids) + len(expected[it.index]) for it in asked} == {48}
    for depth in (1, 2):
        engine = Drafting(build_device_runner, path, depth, proposer=Sevens(), **kwargs)
        assert engine.run(asked) == expected and engine.counts["drafted"] > 0


def test_steps_are_timed_before_the_first_request(path, build_device_runner, caplog) -> None:
    """For real: nothing of it is left in rows, blocks or drafts."""
    caplog.set_level("INFO")
    runner = build_device_runner(path, scheduler=DRAFTING, depth=2, speculative=NGRAM)
    runner.warm_up()
    assert f"steps with {K} drafts take, as multiple of those without: " in caplog.text
    assert not runner._requests.rows.num_tokens.any() and runner._launched is None
