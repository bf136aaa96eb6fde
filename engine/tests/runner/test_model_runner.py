"""The runner's side of the contract: what it derives from plans, what it leaves, and what fails alone."""

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Thread, get_ident

import msgspec
import numpy as np
import pytest
import torch

from penstock.engine.cache.layout import KVGroup, full_attention
from penstock.engine.config import ConfigError
from penstock.engine.core.plan import Admission, SampleInputs, StepPlan, empty
from penstock.engine.runner.device.host import HostRuntime
from penstock.engine.runner.input_batch import StepArrays, StepInputs
from penstock.engine.runner.prompt_logprobs import NO_LOGPROBS
from penstock.engine.runner.requests import Requests
from penstock.engine.runner.sampler.sampler import Sampler
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling import buffers
from penstock.kernels.sampling import params as sampling_params
from penstock.kernels.sampling.ops import CPU

VOCAB = 257
GREEDY = SamplingParams(max_tokens=10, temperature=0.0)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def plan(rows, counts, samples, admissions=(), appends=(), released=(), step_id=1) -> StepPlan:
    return StepPlan(
        step_id=step_id,
        released=np.array(released, np.int32),
        admissions=list(admissions),
        append_rows=[np.array([row for row, _ in appends], np.int32)],
        append_blocks=[np.array([block for _, block in appends], np.int32)],
        rows=np.array(rows, np.int32),
        num_new_tokens=np.array(counts, np.int32),
        samples=np.array(samples, np.bool_),
    )


def admission(row: int, tokens: list[int], computed: int = 0, sampling: SamplingParams = GREEDY) -> Admission:
    return Admission(row, np.array(tokens, np.int32), len(tokens), computed, sampling)


class Batch(Requests):
    """A CPU's requests, with the steps that their plans become."""

    def __init__(self, rows: int, longest: int, groups: Sequence[KVGroup], vocab_size: int) -> None:
        sampler = Sampler(rows, rows, vocab_size, torch.device("cpu"), CPU)
        super().__init__(rows, longest, groups, vocab_size, HostRuntime(), sampler)
        self.arrays = StepArrays(100, rows, longest, groups, max_logits_rows=rows)

    def apply(self, plan: StepPlan) -> StepInputs:
        starts = self.take_in(plan)
        self.sampler.apply_changes()
        return self.arrays.of_plan(plan, self.rows, starts, None)


@pytest.mark.req("KV-17", "KV-22")
def test_each_group_has_slots_of_its_own_blocks():
    """Against a loop over tokens, for groups with blocks of 4 and 8 tokens."""
    groups = (KVGroup((0,), 4, None), KVGroup((1,), 8, 12))
    rng, batch = np.random.default_rng(0), Batch(5, 40, groups, 100)
    computed, counts = [0, 7, 16, 30, 39], [5, 1, 9, 2, 1]
    ends = [first + count for first, count in zip(computed, counts, strict=True)]
    appends = [
        [(row, int(rng.integers(1, 90))) for row in range(5) for _ in range(-(-ends[row] // group.block_size))]
        for group in groups
    ]
    admissions = [admission(row, [1] * ends[row], computed[row]) for row in range(5)]
    one = plan([3, 0, 1, 2, 4], [counts[row] for row in (3, 0, 1, 2, 4)], [True] * 5, admissions)
    rows, blocks = ([np.array([pair[at] for pair in pairs], np.int32) for pairs in appends] for at in (0, 1))
    inputs = batch.apply(msgspec.structs.replace(one, append_rows=rows, append_blocks=blocks))
    for group, pairs, found in zip(groups, appends, inputs.groups, strict=True):
        tables = {row: [block for owner, block in pairs if owner == row] for row in range(5)}
        expected = [
            tables[row][position // group.block_size] * group.block_size + position % group.block_size
            for row in (3, 0, 1, 2, 4)
            for position in range(computed[row], ends[row])
        ]
        assert found.slot_mapping.tolist() == expected
        assert found.batch.window == group.window and found.batch.block_size == group.block_size


@pytest.mark.req("MR-05", "MR-07", "ATT-09")
def test_derives_a_mixed_step_from_the_plan():
    """Rows 3, 0 and 5 with 2, 5 and 3 tokens, of which 4, 0 and 16 are there already."""
    batch = Batch(6, 40, full_attention(4), 100)
    rows = {3: (6, 4, [9, 7]), 0: (5, 0, [2, 1]), 5: (20, 16, [10, 11, 12, 13, 14])}
    step = plan(
        [3, 0, 5],
        [2, 5, 3],
        [True, True, False],
        [admission(row, [row * 10 + i for i in range(length)], computed) for row, (length, computed, _) in rows.items()],
        [(row, block) for row, (_, _, blocks) in rows.items() for block in blocks],
    )
    inputs = batch.apply(step)
    assert inputs.positions.tolist() == [4, 5, 0, 1, 2, 3, 4, 16, 17, 18]
    assert inputs.input_ids.tolist() == [34, 35, 0, 1, 2, 3, 4, 66, 67, 68]
    assert inputs.groups[0].slot_mapping.tolist() == [28, 29, 8, 9, 10, 11, 4, 56, 57, 58]
    assert inputs.groups[0].batch.query_start_loc.tolist() == [0, 2, 7, 10, 10, 10, 10], "the other rows have no tokens"
    assert inputs.groups[0].batch.seq_lens[:3].tolist() == [6, 5, 19]
    assert inputs.groups[0].batch.block_table[:3].tolist() == [[9, 7, 0, 0, 0], [2, 1, 0, 0, 0], [10, 11, 12, 13, 14]]
    assert inputs.logits_indices.tolist() == [1, 6]
    choosing = batch.choosing(step)
    assert inputs.sampled_rows.tolist() == choosing.plan_rows.tolist() == choosing.at.tolist() == [0, 1]
    assert (choosing.rows.request_rows.tolist(), choosing.rows.positions.tolist()) == ([3, 0], [6, 5])


@pytest.mark.req("IB-04")
def test_a_rows_next_tenant_inherits_nothing():
    batch = Batch(1, 40, full_attention(4), 100)
    loud = SamplingParams(max_tokens=9, temperature=2.0, top_k=3, top_p=0.5, min_p=0.1, seed=7, logprobs=4)
    batch.apply(plan([0], [9], [True], [admission(0, [200] * 9, sampling=loud)], [(0, 5), (0, 6), (0, 7)]))
    row = np.array([0], np.int32)
    assert batch.chooser.plain(row) is None and batch.sampler.path(row) is buffers.Path.FILTERED
    step = plan([0], [2], [True], [admission(0, [1, 2])], [(0, 8)], released=[0])
    inputs = batch.apply(step)
    assert inputs.groups[0].batch.block_table.tolist() == [[8]] and inputs.input_ids.tolist() == [1, 2]
    assert batch.refusals.of(step) == {}
    assert batch.chooser.plain(row) is buffers.Path.GREEDY
    assert batch.sampler.params[0].tolist() == sampling_params.GREEDY.tolist()
    assert batch.chooser._prompt_logprobs[0] == NO_LOGPROBS


@pytest.mark.req("MR-01")
def test_a_step_is_sampled_once_before_the_next(loaded, driver):
    runner = loaded("llama")
    play = driver(runner)
    sequence = play.admit(prompt(1, 5))
    first = play.plan([(sequence, 5)])
    assert runner.execute(first) is None
    with pytest.raises(RuntimeError, match="has not been sampled"):
        runner.execute(first)
    with pytest.raises(RuntimeError, match=f"step {first.step_id} waits"):
        runner.sample(SampleInputs(first.step_id + 1))
    assert runner.sample(SampleInputs(first.step_id)).step_id == first.step_id
    with pytest.raises(RuntimeError, match="none waits"):
        runner.sample(SampleInputs(first.step_id))


def test_plans_need_not_know_sampled_tokens(loaded, driver):
    """The decode's plan is made before the prompt's step has run; the runner takes the token from its own rows."""
    runner = loaded("llama")
    play = driver(runner)
    expected = play.generate(play.admit(prompt(1, 20)), 3)
    play = driver(runner)
    sequence = play.admit(prompt(1, 20))
    plans = [play.plan([(sequence, 20)])]
    for _ in range(2):
        sequence.tokens.append(-1)
        plans.append(play.plan([(sequence, 1)]))
    got = []
    for step in plans:
        runner.execute(step)
        got.append(int(runner.sample(SampleInputs(step.step_id)).token_ids[0, 0]))
    assert got == expected


@pytest.mark.req("SMP-17")
def test_plans_need_not_know_what_penalties_count(loaded, driver):
    """All plans are made before the first step runs; each step's penalties count the tokens of those before it."""
    runner = loaded("llama")
    penalised = SamplingParams(max_tokens=10, temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.5)
    play = driver(runner)
    expected = play.generate(play.admit(prompt(1, 20), penalised), 8)
    plain = driver(runner)
    assert plain.generate(plain.admit(prompt(1, 20)), 8) != expected
    play = driver(runner)
    sequence = play.admit(prompt(1, 20), penalised)
    plans = [play.plan([(sequence, 20)])]
    for _ in range(7):
        sequence.tokens.append(-1)
        plans.append(play.plan([(sequence, 1)]))
    got = []
    for step in plans:
        runner.execute(step)
        got.append(int(runner.sample(SampleInputs(step.step_id)).token_ids[0, 0]))
    assert got == expected


def test_a_full_context_may_sample_once_more(loaded, driver):
    """The scheduler may not know yet that the last token ended it."""
    runner = loaded("llama")
    limit = runner.config.model.max_model_len
    play = driver(runner)
    sequence = play.admit(prompt(1, limit))
    assert play.step([(sequence, limit)]).counts.tolist() == [1]


def test_limits_openmp_in_each_thread_that_runs_steps(loaded, driver, monkeypatch):
    runner, calls = loaded("llama"), []
    play = driver(runner)
    sequence = play.admit(prompt(1, 5))
    play.step([(sequence, 4)])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: calls.append((get_ident(), count)))
    worker = Thread(target=lambda: play.generate(sequence, 3))
    worker.start()
    worker.join()
    assert calls == [(worker.ident, 1)] and len(sequence.outputs) == 3


def test_a_plan_without_rows_gives_an_empty_result(loaded, driver):
    runner = loaded("llama")
    runner.execute(driver(runner).plan([]))
    result = runner.sample(SampleInputs(1))
    assert (result.token_ids.shape, result.counts.shape, result.logprobs, result.failed) == ((0, 1), (0,), None, {})


@pytest.mark.req("MR-07", "CHK-06")
def test_only_sampling_rows_go_through_the_lm_head(loaded, driver, monkeypatch):
    runner, heads = loaded("llama"), []
    play, compute = driver(runner), runner.model.compute_logits
    monkeypatch.setattr(runner.model, "compute_logits", lambda hidden: heads.append(len(hidden)) or compute(hidden))
    first, second, third = (play.admit(prompt(i, 40)) for i in range(3))
    result = play.step([(first, 40), (second, 20), (third, 40)])
    assert (heads, result.counts.tolist(), int(result.token_ids[1, 0])) == ([2], [1, 0, 1], -1)
    play.step([(second, 10)])
    assert heads == [2]


@pytest.mark.req("MR-10")
def test_prefill_and_decode_call_the_model_alike(loaded, driver, monkeypatch):
    runner, calls = loaded("llama"), []
    play, forward = driver(runner), runner.model.forward
    monkeypatch.setattr(
        runner.model, "forward", lambda ids, positions, ctx: calls.append(len(ids)) or forward(ids, positions, ctx)
    )
    play.generate(play.admit(prompt(1, 7)), 3)
    assert calls == [7, 1, 1]


def test_a_request_with_logits_that_are_not_finite_fails_alone(loaded, driver, monkeypatch):
    runner = loaded("llama")
    play = driver(runner)
    expected = play.step([(play.admit(prompt(1, 9)), 9)]).token_ids.tolist()
    play, compute = driver(runner), runner.model.compute_logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        logits[0, 7], logits[2, 3] = float("nan"), float("inf")
        return logits

    monkeypatch.setattr(runner.model, "compute_logits", broken)
    asks = SamplingParams(max_tokens=5, temperature=1.0, top_p=0.9, logprobs=2)
    work = [(play.admit(prompt(i, 9), asks), 9) for i in (0, 2)]
    work.insert(1, (play.admit(prompt(1, 9)), 9))
    result = play.step(work)
    assert result.failed == {
        0: "the model's logits are not finite (1 NaN and 0 infinite of 257); the first values that are not: lm_head",
        2: "the model's logits are not finite (0 NaN and 1 infinite of 257); the first values that are not: lm_head",
    }
    assert result.num_not_finite == 2
    assert (result.counts.tolist(), [result.token_ids[1].tolist()]) == ([0, 1, 0], expected)


PARTS = {
    "embed_tokens": lambda model: model.embed_tokens.weight[7],
    "layers.0.self_attn.qkv_proj": lambda model: model.layers[0]._norms[0].weight,
    "layers.1.self_attn.qkv_proj": lambda model: model.layers[1]._norms[0].weight,
    "layers.1": lambda model: model.layers[1]._norms[1].weight,
    "norm": lambda model: model.norm.weight,
}


@pytest.mark.parametrize("part", PARTS)
def test_the_first_part_with_values_that_are_not_finite_is_named(checkpoint, build_runner, driver, part):
    runner = build_runner(checkpoint("qwen3"))
    play = driver(runner)
    target = PARTS[part](runner.model)
    target.fill_(float("nan"))
    result = play.step([(play.admit([1, 7, 2]), 3), (play.admit([1, 2, 3]), 3)])
    assert sorted(result.failed) == ([0] if part == "embed_tokens" else [0, 1])
    assert all(message.endswith(f"; the first values that are not: {part}") for message in result.failed.values())


def test_a_cache_that_is_not_finite_is_named_by_the_layer_that_reads_it(loaded, driver):
    runner = loaded("llama")
    play = driver(runner, poison=False)
    sequence, other = play.admit(prompt(1, 20)), play.admit(prompt(2, 20))
    play.step([(sequence, 19), (other, 19)])
    runner.kv_caches[1][sequence.blocks[0], 1, 0, 3] = float("nan")
    result = play.step([(sequence, 1), (other, 1)])
    assert list(result.failed) == [0] and result.failed[0].endswith(": layers.1.self_attn")


def test_what_does_not_happen_again_is_said_to_be_so(loaded, driver, monkeypatch):
    runner, calls = loaded("llama"), []
    play, compute = driver(runner), runner.model.compute_logits
    monkeypatch.setattr(
        runner.model, "compute_logits", lambda hidden: compute(hidden) * (1.0 if calls or calls.append(1) else float("nan"))
    )
    result = play.step([(play.admit(prompt(1, 9)), 9)])
    assert result.failed[0].endswith(": nothing when the step was run again")


def test_parts_are_looked_at_in_failing_steps_alone(loaded, driver, monkeypatch):
    runner, calls = loaded("llama"), []
    play, states = driver(runner), runner.model.states
    monkeypatch.setattr(runner.model, "states", lambda *arguments: calls.append(len(arguments[0])) or states(*arguments))
    sequence = play.admit(prompt(1, 7))
    play.generate(sequence, 2)
    assert calls == []
    runner.kv_caches[1][sequence.blocks[0], 1, 0, 3] = float("nan")
    assert list(play.step([(sequence, 1)]).failed) == [0]
    assert calls == [1]


def test_a_request_with_unknown_tokens_fails_alone(loaded, driver):
    runner = loaded("llama")
    play = driver(runner)
    good = [(play.admit(prompt(i, 9)), 9) for i in range(2)]
    expected = play.step(good).token_ids[:, 0].tolist()
    play = driver(runner)
    work = [(play.admit(prompt(0, 9)), 9), (play.admit([1, 2, VOCAB, 4]), 4), (play.admit(prompt(1, 9)), 9)]
    result = play.step(work)
    assert result.failed == {1: "token 257 at position 2 is outside the vocabulary of 257"}
    assert result.counts.tolist() == [1, 0, 1] and result.token_ids[[0, 2], 0].tolist() == expected


def test_a_request_with_no_token_left_fails_alone(loaded, driver):
    runner = loaded("llama")
    play = driver(runner)
    expected = play.step([(play.admit(prompt(1, 9)), 9)]).token_ids.tolist()
    play = driver(runner)
    cornered = SamplingParams(max_tokens=5, temperature=1.0, top_p=0.9, allowed_token_ids=(3,), bad_words=((3,),), logprobs=1)
    work = [(play.admit(prompt(0, 9), cornered), 9), (play.admit(prompt(1, 9)), 9)]
    result = play.step(work)
    assert list(result.failed) == [0] and "no token is left" in result.failed[0]
    assert (result.counts.tolist(), [result.token_ids[1].tolist()]) == ([0, 1], expected)


@pytest.mark.req("LP-01")
def test_logprobs_are_those_before_adjustments(loaded, driver):
    play = driver(loaded("llama"))
    adjusted = SamplingParams(max_tokens=5, temperature=0.0, logprobs=VOCAB, logit_bias=((7, 100.0),), repetition_penalty=9.0)
    plain = SamplingParams(max_tokens=5, temperature=0.0, logprobs=VOCAB)
    result = play.step([(play.admit(prompt(1, 12), sampling), 12) for sampling in (plain, adjusted)])
    assert np.array_equal(*result.logprobs.top_logprobs) and np.array_equal(*result.logprobs.top_ids)
    assert result.token_ids[1, 0] == 7 != result.token_ids[0, 0]


def test_prompt_logprobs_are_of_those_who_asked_and_cost_nobody_else(loaded, driver, monkeypatch):
    runner, heads = loaded("llama"), []
    compute = runner.model.compute_logits
    monkeypatch.setattr(runner.model, "compute_logits", lambda hidden: heads.append(len(hidden)) or compute(hidden))
    play = driver(runner)
    asks = [SamplingParams(max_tokens=5, temperature=0.0, prompt_logprobs=count) for count in (None, 0, 2)]
    work = [(play.admit(prompt(at, 9), sampling), 9) for at, sampling in enumerate(asks)]
    found = play.step(work).prompt_logprobs
    assert found.plan_rows.tolist() == [1] * 8 + [2] * 8 and found.positions.tolist() == [*range(1, 9)] * 2
    assert (found.top_ids >= 0).sum(1).tolist() == [0] * 8 + [2] * 8
    assert heads == [3, 16]
    assert play.step([(sequence, 1) for sequence, _ in work]).prompt_logprobs is None
    assert heads == [3, 16, 3]


def test_a_prompt_with_logits_that_are_not_finite_fails_alone(loaded, driver, monkeypatch):
    runner = loaded("llama")
    play, compute = driver(runner), runner.model.compute_logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        logits[1 : len(logits) - 2, 5] = float("nan")  # of the prompts', not of the two that are sampled
        return logits

    monkeypatch.setattr(runner.model, "compute_logits", broken)
    asks = SamplingParams(max_tokens=5, temperature=0.0, prompt_logprobs=1)
    result = play.step([(play.admit(prompt(1, 9)), 9), (play.admit(prompt(2, 9), asks), 9)])
    assert list(result.failed) == [1] and result.counts.tolist() == [1, 0]


@pytest.mark.req("LP-02", "LP-06")
def test_logprobs_are_of_what_the_mode_says(loaded, driver, monkeypatch):
    """Of a row with temperature 0.5 and top-k 5, beside a greedy one with a bias."""
    runner = loaded("llama")
    asks = [
        SamplingParams(max_tokens=5, temperature=0.5, top_k=5, seed=4, logprobs=VOCAB),
        SamplingParams(max_tokens=5, temperature=0.0, logit_bias=((9, 50.0),), logprobs=VOCAB, prompt_logprobs=VOCAB),
    ]

    def run(mode: str) -> tuple[list[torch.Tensor], np.ndarray, object]:
        monkeypatch.setattr(runner, "config", msgspec.structs.replace(runner.config, logprobs_mode=mode))
        monkeypatch.setattr(runner, "_requests", runner._new_requests())
        play = driver(runner)
        result = play.step([(play.admit(prompt(1, 12), params), 12) for params in asks])
        found = [torch.empty(VOCAB, dtype=torch.float64) for _ in asks]
        for row, values in enumerate(found):
            values[result.logprobs.top_ids[row]] = torch.from_numpy(result.logprobs.top_logprobs[row]).double()
            assert result.logprobs.sampled[row] == values[result.token_ids[row, 0]].float()
        return found, result.token_ids, result.prompt_logprobs

    (raw, greedy_raw), tokens, prompt_logits = run("raw_logits")
    assert torch.equal(raw, greedy_raw) and not torch.allclose(raw.exp().sum(), torch.tensor(1.0).double())
    scaled, kept = raw / 0.5, raw.topk(5).indices
    processed = torch.full_like(raw, float("-inf")).index_copy(0, kept, scaled[kept])
    biased = raw.index_add(0, torch.tensor([9]), torch.tensor([50.0]).double())
    for mode, expected in {
        "raw_logprobs": (raw.log_softmax(0), raw.log_softmax(0)),
        "processed_logits": (processed, biased),
        "processed_logprobs": (processed.log_softmax(0), biased.log_softmax(0)),
    }.items():
        found, again, prompts = run(mode)
        assert np.array_equal(tokens, again)
        for ours, due in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, due, rtol=1e-5, atol=2e-5)
        assert np.array_equal(prompts.top_logprobs, prompt_logits.top_logprobs) == mode.endswith("logits")


@pytest.mark.req("LP-03", "LP-04")
def test_each_request_gets_the_logprobs_that_it_asked_for(loaded, driver):
    play = driver(loaded("llama"))
    asked = [None, 0, 3, 1]
    params = [SamplingParams(max_tokens=5, temperature=1.5, seed=3, logprobs=count) for count in asked]
    result = play.step([(play.admit(prompt(1, 12), sampling), 12) for sampling in params])
    found = result.logprobs
    assert found.plan_rows.tolist() == [1, 2, 3]
    assert (found.top_ids >= 0).sum(1).tolist() == [0, 3, 1]
    # One prompt and one seed: the same token and distribution for all, and the alternatives are a common list's start.
    assert len(set(result.token_ids[:, 0].tolist())) == 1
    assert np.all(found.sampled == found.sampled[0]) and np.all(found.ranks == found.ranks[0])
    assert found.top_ids[2, 0] == found.top_ids[1, 0] and np.all(np.diff(found.top_logprobs[1]) <= 0)


def test_warm_up_leaves_nothing_behind(checkpoint, build_runner, driver):
    runner = build_runner(checkpoint("llama"))
    runner.warm_up()
    expected = driver(runner).runner._requests
    assert expected.rows.num_tokens.sum() == 0
    warm = driver(runner)
    cold_runner = build_runner(checkpoint("llama"))
    cold = driver(cold_runner)
    assert warm.generate(warm.admit(prompt(1, 30)), 4) == cold.generate(cold.admit(prompt(1, 30)), 4)


def test_warm_up_writes_no_block_that_a_row_had(checkpoint, build_runner, driver):
    runner = build_runner(checkpoint("llama"))
    play = driver(runner)
    play.step([(play.admit(prompt(1, 20)), 20)])
    for cache in runner.kv_caches:
        cache.zero_()
    runner.warm_up()
    assert all(cache[0].any() and not cache[1:].any() for cache in runner.kv_caches)


def test_warm_up_names_weights_that_are_not_finite(checkpoint, build_runner):
    runner = build_runner(checkpoint("llama"))
    runner.model.norm.weight[3] = float("nan")
    with pytest.raises(RuntimeError, match="warm-up: the model's logits are not finite"):
        runner.warm_up()


def test_a_block_is_one_range_of_bytes(checkpoint, build_runner):
    runner = build_runner(checkpoint("llama"), "bfloat16")
    runner.initialize_kv_cache(5)
    storage = runner.kv_caches[0].untyped_storage()
    assert storage.nbytes() == 5 * runner.kv_layout().page_bytes == 5 * 2 * 2 * 2 * 16 * 16 * 2
    runner.kv_caches[1][3] = 1.0
    filled = torch.tensor([], dtype=torch.bfloat16).set_(storage).view(5, -1).count_nonzero(1).tolist()
    assert filled == [0, 0, 0, runner.kv_layout().page_bytes // 4, 0]


def test_an_unused_cache_takes_no_memory(checkpoint, build_runner):
    runner = build_runner(checkpoint("llama"))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    runner.initialize_kv_cache((1 << 30) // runner.kv_layout().page_bytes)
    assert resident() - before < 1 << 26
    assert all(not cache[1].any() for cache in runner.kv_caches)


def test_loads_sharded_checkpoints(checkpoint, build_runner, driver):
    path = checkpoint("llama", max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    play = driver(build_runner(path))
    assert play.step([(play.admit(prompt(1, 5)), 5)]).failed == {}


def test_refuses_a_checkpoint_that_does_not_fit(checkpoint, build_runner, tmp_path):
    """A Llama without a head of its own, said to be untied."""
    source = checkpoint("llama-7to1-llama3-tied")
    for file in source.iterdir():
        text = file.read_bytes()
        if file.name == "config.json":
            text = text.replace(b'"tie_word_embeddings": true', b'"tie_word_embeddings": false')
        (tmp_path / file.name).write_bytes(text)
    with pytest.raises(ConfigError, match=r"lacks the tensors lm_head\.weight"):
        build_runner(tmp_path)


def test_empty_arrays_are_int32():
    assert empty().dtype == np.int32
