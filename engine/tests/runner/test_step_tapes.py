"""Steps from tapes: the same bits as without, whatever happens between them."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from grids import mostly_slow
from tiny_models import CONFIGS, MAX_MODEL_LEN

from penstock.engine.config import LoraConfig, SchedulerConfig, SpeculativeConfig
from penstock.engine.core.plan import SampleInputs
from penstock.engine.runner.input_batch import MAX_TAPED_TOKENS
from penstock.engine.runner.step_tapes import StepTapes
from penstock.engine.sampling import SamplingParams
from penstock.engine.spec.filling import to_few_sizes

QUICK = ("llama", "qwen3-windows", "gemma3", "cohere2", "starcoder2", "qwen3-moe", "gpt-oss", "deepseek-v3")


@pytest.fixture
def pair(build_runner, checkpoint):
    """`pair(name, dtype)`: a runner with tapes and one without."""

    def make(name, dtype="bfloat16", lora=None):
        taped, plain = (build_runner(checkpoint(name), dtype, lora=lora) for _ in range(2))
        if taped.ops.tape is None:
            pytest.skip("no compiled operations")
        plain.ops = replace(plain.ops, tape=None)
        for runner in (taped, plain):
            runner.warm_up()
        return taped, plain

    return make


@pytest.fixture
def runs(monkeypatch):
    """How many steps ran from tapes, by rows and tokens of each."""
    counts: dict[tuple[int, int], int] = {}
    original = StepTapes.run

    def counted(self, inputs, ctx):
        found = original(self, inputs, ctx)
        if found is not None:
            shape = len(inputs.placed.rows), len(inputs.input_ids)
            counts[shape] = counts.get(shape, 0) + 1
        return found

    monkeypatch.setattr(StepTapes, "run", counted)
    return counts


def play(driver, runner, lengths=(5, 30, 44, 17), steps=40, slots=(-1,)):
    """Sequences that come and go one by one, and go round these LoRA slots; the logits of every step and all outputs."""
    drive, rng = driver(runner), np.random.default_rng(1)
    seen, running, done = [], [], []

    def step(work):
        plan = drive.plan(work)
        runner.execute(plan)
        logits = runner._launched.forward.logits
        seen.append(torch.empty(0) if logits is None else logits.clone())
        result = runner.sample(SampleInputs(plan.step_id))
        for (sequence, _), token, count in zip(work, result.token_ids[:, 0].tolist(), result.counts.tolist(), strict=True):
            sequence.tokens += [token] * count
            sequence.outputs += [token] * count

    for number in range(steps):
        if number % 7 == 0 and number // 7 < len(lengths):
            params = SamplingParams(max_tokens=100, temperature=0.8 * (number % 2), seed=number, logprobs=3)
            prompt, slot = rng.integers(3, 250, lengths[number // 7]).tolist(), slots[number // 7 % len(slots)]
            running.append(drive.admit(prompt, params, lora_slot=slot))
        if number in (25, 33):
            done.append(running.pop(0))
            drive.release(done[-1])
        step([(sequence, min(20, len(sequence.tokens) - sequence.computed)) for sequence in running])
    return seen, [sequence.outputs for sequence in done + running]


@pytest.mark.parametrize("name", mostly_slow(CONFIGS, QUICK))
def test_the_same_bits_with_and_without(pair, driver, runs, name):
    taped, plain = pair(name)
    (seen, outputs), (expected, expected_outputs) = (play(driver, runner) for runner in (taped, plain))
    assert sum(runs.values()) > 20 and len(runs) >= 3, "steps of several sizes ran from tapes"
    assert outputs == expected_outputs
    for number, (one, other) in enumerate(zip(seen, expected, strict=True)):
        assert torch.equal(one, other), f"step {number}"


def test_a_plain_models_tape_is_one_native_call(pair, driver, runs):
    """Nothing of torch is left in it: the sampler takes the logits as the LM head gives them."""
    taped, _ = pair("llama")
    play(driver, taped)
    for tape in taped._tapes._tapes.values():
        assert len(tape._steps) == 1 and tape.result.dtype is torch.bfloat16


def test_steps_with_drafts_of_all_sizes_have_tapes_from_the_start(checkpoint, build_runner):
    """Else the first step of each size would take several times as long, and look as if drafts cost that much."""
    speculative, scheduler = SpeculativeConfig(method="ngram", num_speculative_tokens=4), SchedulerConfig(max_num_seqs=16)
    runner = build_runner(checkpoint("llama"), "bfloat16", scheduler=scheduler, speculative=speculative)
    if runner.ops.tape is None:
        pytest.skip("no compiled operations")
    runner.warm_up()
    fill = to_few_sizes(MAX_TAPED_TOKENS)
    sizes = {fill(1, tokens) for tokens in range(2, 16 * 5 + 1)}
    assert sizes <= {shape.tokens for shape in runner._tapes._tapes if shape.tokens == shape.logits}


def test_the_same_bits_in_float32(pair, driver, runs):
    taped, plain = pair("gemma3", "float32")
    assert play(driver, taped)[1] == play(driver, plain)[1] and runs


def test_new_weights_and_a_new_cache_are_what_the_next_step_uses(pair, driver, runs, checkpoint):
    taped, plain = pair("qwen3")
    for change in (
        lambda runner: (runner.sleep(1), runner.wake_up(["kv_cache"])),
        lambda runner: (runner.sleep(2), runner.wake_up(["kv_cache", "weights"]), runner.reload_weights(None)),
        lambda runner: runner.reload_weights(None),
    ):
        before = sum(runs.values())
        assert play(driver, taped)[1] == play(driver, plain)[1]
        assert sum(runs.values()) > before
        change(taped), change(plain)
    assert play(driver, taped)[1] == play(driver, plain)[1]


def test_what_differs_from_step_to_step_is_not_taped(build_runner, checkpoint, driver, runs, tmp_path):
    runner = build_runner(checkpoint("qwen3"), "bfloat16")
    runner.warm_up()
    drive = driver(runner)
    runner.start_profile()
    drive.generate(drive.admit([5, 6, 7]), 4)
    assert not runs, "a step that is profiled"
    runner.stop_profile(tmp_path)
    sequence = drive.admit([3 + number % 250 for number in range(MAX_MODEL_LEN - 20)])
    drive.generate(sequence, 4)
    assert runs == {(1, 1): 3}, "the prompt's step has too many tokens"


def test_steps_with_adapters_are_taped_whatever_lies_in_the_slots(pair, build_runner, checkpoint, driver, runs):
    """Beside steps without any; adapters come and go between them."""
    lora = LoraConfig(max_loras=2, max_cpu_loras=2, max_lora_rank=16)
    taped, plain = pair("qwen3", lora=lora)
    bare = build_runner(checkpoint("qwen3"), "bfloat16")
    bare.warm_up()
    expected = play(driver, bare, slots=(-1,))
    for filled in (lambda runner: None, lambda runner: fill_slots(runner, 1, 9, 5), lambda runner: fill_slots(runner, 16, 3, 6)):
        filled(taped), filled(plain)
        runs.clear()
        (seen, outputs), (due, due_outputs) = (play(driver, runner, slots=(0, -1, 1, 0)) for runner in (taped, plain))
        assert sum(runs.values()) > 20 and len(runs) >= 3, "steps of several sizes ran from tapes"
        assert outputs == due_outputs
        for number, (one, other) in enumerate(zip(seen, due, strict=True)):
            assert torch.equal(one, other), f"step {number}"
        without, _ = play(driver, taped, slots=(-1,))
        assert all(torch.equal(one, other) for one, other in zip(without, expected[0], strict=True))


@torch.inference_mode()
def fill_slots(runner, *ranks_and_seed):
    """Puts random adapters of these ranks into the slots."""
    *ranks, seed = ranks_and_seed
    torch.manual_seed(seed)
    for module, shelf in runner._lora._shelves.items():
        out_features, in_features = runner._lora._targets[module].shape
        for slot, rank in enumerate(ranks):
            shelf.put(slot, torch.randn(rank, in_features) * 0.3, torch.randn(out_features, rank) * 0.3)


def test_a_model_that_cannot_be_taped_runs_without(pair, driver, runs, caplog):
    taped, plain = pair("qwen3")
    for runner in (taped, plain):
        compute = runner.model.compute_logits
        runner.model.compute_logits = lambda hidden, compute=compute: compute(hidden).sort(dim=-1).values
    assert play(driver, taped)[1] == play(driver, plain)[1]
    assert not runs and "without tapes" in caplog.text


@pytest.mark.parametrize("name", ["qwen3-windows", "gemma3"])
@pytest.mark.parametrize("adapters", [False, True], ids=["", "adapters"])
def test_chunks_of_one_length_have_tapes_once_they_have_come_a_few_times(pair, driver, runs, name, adapters):
    """Chunks in the middle of a prompt and at its end, alone and beside others."""
    taped, plain = pair(name, lora=LoraConfig(max_loras=2, max_cpu_loras=2, max_lora_rank=8) if adapters else None)
    if adapters:
        for runner in (taped, plain):
            fill_slots(runner, 8, 3, 5)
    prompts = np.random.default_rng(2).integers(3, 250, (4, 30)).tolist()
    found = []
    for runner in (taped, plain):
        drive = driver(runner)
        asks, slots = SamplingParams(max_tokens=9, temperature=0.0, logprobs=2), (0, -1, 1, 0) if adapters else (-1,) * 4
        sequences = [drive.admit(prompt, asks, lora_slot=slot) for prompt, slot in zip(prompts, slots, strict=True)]
        scores = []
        for first, second in (sequences[:2], sequences[2:]):
            for work in ([(first, 10), (second, 10)], [(first, 10), (second, 10)], [(first, 10)], [(second, 10)]):
                scores.append(drive.step(work).logprobs)
        drive.step([(sequence, 1) for sequence in sequences])
        found.append(
            ([sequence.outputs for sequence in sequences], [None if it is None else it.sampled.tolist() for it in scores])
        )
    assert found[0] == found[1]
    assert runs == {(2, 20): 1, (1, 10): 1, (4, 4): 1}


@pytest.mark.parametrize("adapters", [False, True], ids=["", "adapters"])
def test_rows_with_unequal_drafts_share_a_tape_of_all_their_tokens(pair, driver, runs, adapters):
    """Whoever has them, four drafts of three rows make one shape. What the tape reads of earlier steps must not be read again."""
    taped, plain = pair("qwen3-windows", lora=LoraConfig(max_loras=2, max_cpu_loras=2, max_lora_rank=8) if adapters else None)
    if adapters:
        for runner in (taped, plain):
            fill_slots(runner, 8, 3, 5)
    shares = [(3, 0, 1), (0, 4, 0), (2, 1, 1), (1, 1, 2), (4, 0, 0), (0, 0, 4), (1, 3, 0)]
    rng, found = np.random.default_rng(2), []
    prompts, guesses = [rng.integers(3, 250, size).tolist() for size in (4, 30, 17)], rng.integers(3, 250, (len(shares), 4))
    for runner in (taped, plain):
        drive, asks, seen = driver(runner), SamplingParams(max_tokens=90, temperature=0.7, seed=3, logprobs=2), []
        sequences = [drive.admit(prompt, asks, lora_slot=at - 1 if adapters else -1) for at, prompt in enumerate(prompts)]
        drive.step([(sequence, len(sequence.tokens)) for sequence in sequences])
        for share, guess in zip(shares, guesses, strict=True):
            drafts = np.array(share, np.int32)
            plan = msgspec.structs.replace(
                drive.plan([(sequence, 1 + count) for sequence, count in zip(sequences, share, strict=True)]),
                samples=np.ones(3, np.bool_),
                num_drafts=drafts,
                draft_rows=np.arange(3, dtype=np.int32),
                draft_ids=guess.astype(np.int32),
            )
            runner.execute(plan)
            seen.append(runner._launched.forward.logits.clone())
            result = runner.sample(SampleInputs(plan.step_id))
            for sequence, tokens, count in zip(sequences, result.token_ids.tolist(), result.counts.tolist(), strict=True):
                sequence.tokens += tokens[:count]
                sequence.computed = len(sequence.tokens) - 1
        found.append((seen, [sequence.tokens for sequence in sequences]))
    assert found[0][1] == found[1][1]
    assert runs == {(3, 7): len(shares)} and list(taped._tapes._tapes) == [(7, 7)]
    for number, (one, other) in enumerate(zip(found[0][0], found[1][0], strict=True)):
        assert torch.equal(one, other), f"step {number}"


def test_a_chunk_whose_prompt_is_scored_runs_without(pair, driver, runs):
    taped, _ = pair("qwen3")
    drive, asks = driver(taped), SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=1)
    for _ in range(3):
        assert drive.step([(drive.admit([5, 6, 7, 8], asks), 4)]).prompt_logprobs is not None
    assert not runs
