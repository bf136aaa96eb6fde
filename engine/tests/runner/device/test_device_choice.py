"""What requests ask for beside a token, on a device: the same changes, tokens and logprobs as on the CPU."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_runtime import LateRuntime
from own_processors import Favour, Sharpen

from penstock.engine.core.plan import StepPlan, empty
from penstock.engine.core.row_table import RowTable
from penstock.engine.runner.device.adjustments import DeviceAdjustments, Tokens
from penstock.engine.runner.device.choice import Choice, DeviceChoice
from penstock.engine.runner.device.sampler import DeviceSampler
from penstock.engine.runner.device.scores import score_prompts as score_on_device
from penstock.engine.runner.prompt_logprobs import PromptRows, score_prompts
from penstock.engine.runner.sampler.adjustments import Adjustments
from penstock.engine.runner.sampler.custom import GuardedProcessor
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.logprobs import gather_logprobs
from penstock.engine.runner.sampler.params import SamplingTable
from penstock.engine.runner.sampler.sampler import sample
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling.buffers import Column
from penstock.kernels.sampling.ops import REFERENCE, triton_sampling_ops

ROWS, VOCAB, LENGTH = 6, 140, 24
TOKEN = st.integers(0, VOCAB + 3)
WANTS = {
    "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9).map(tuple),
    "bad_words": st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6).map(tuple),
    "min_tokens": st.sampled_from([1, 3, 9]),
    "stop_token_ids": st.lists(TOKEN, max_size=4).map(tuple),
    "logit_bias": st.dictionaries(TOKEN, st.floats(-99, 99, width=32), max_size=4).map(lambda biases: tuple(biases.items())),
    "repetition_penalty": st.sampled_from([0.7, 1.3]),
    "frequency_penalty": st.sampled_from([-0.5, 0.3]),
    "presence_penalty": st.sampled_from([-1.5, 0.9]),
    "temperature": st.sampled_from([0.0, 0.6]),
    "top_k": st.sampled_from([1, 7]),
    "top_p": st.sampled_from([0.5371, 0.9017]),
    "min_p": st.sampled_from([0.0317]),
    "seed": st.integers(0, 2**64),
    "logprobs": st.integers(0, 6),
    "extra_args": st.sampled_from([{"favour": [3, 9.0, 2]}, {"sharpen": True}]),
}
REQUEST = st.tuples(
    st.lists(st.integers(0, 5), min_size=1, max_size=9),
    st.lists(st.integers(0, 5), max_size=9),
    st.fixed_dictionaries({}, optional=WANTS),
)


class Both:
    """Requests in rows 0, 1, … (prompt, output, fields) of a CPU's sampler and of a device's."""

    def __init__(self, requests: list[tuple[list[int], list[int], dict[str, Any]]], mode: str = "raw_logprobs", ops=REFERENCE):
        count = len(requests)
        self.rows = RowTable(ROWS, LENGTH, [16])
        self.mode, self.runtime, self.params = mode, LateRuntime(), []
        self.cpu, self.table = Adjustments(ROWS, VOCAB, self._processors()), SamplingTable(ROWS)
        self.token_ids = torch.zeros(ROWS + 1, LENGTH, dtype=torch.int32)
        # The host's table lacks the tokens that are still on their way.
        tokens = Tokens(self.token_ids, np.zeros((ROWS, LENGTH), np.int32))
        self.sampler = DeviceSampler(ROWS, ROWS, VOCAB, torch.device("cpu"), ops)
        self.adjustments = DeviceAdjustments(self.runtime, ops, ROWS, VOCAB, tokens, self._processors())
        self.device = DeviceChoice(self.runtime, ops, self.sampler, self.adjustments, ROWS, mode)
        for row, (prompt, output, fields) in enumerate(requests):
            known = np.array(prompt + output, np.int32)
            params = SamplingParams(max_tokens=9, **fields)
            self.params.append(params)
            self.rows.token_ids[row, : len(known)] = known
            self.token_ids[row, : len(known)] = torch.from_numpy(known)
            self.rows.num_prompt_tokens[row], self.rows.num_computed[row] = len(prompt), len(known)
            self.table.admit(row, params)
            self.cpu.admit(row, known, len(prompt), params)
            self.device.admit(row, known, len(prompt), params)
        changes = self.sampler.take_changes()
        self.sampler.params.index_copy_(0, torch.from_numpy(changes.rows).long(), torch.from_numpy(changes.words))
        self.at = np.arange(count, dtype=np.int32)

    def _processors(self):
        return [GuardedProcessor(kind(ROWS, VOCAB), kind.__name__, ROWS) for kind in (Favour, Sharpen)]

    def step(self) -> LogitsRows:
        at = self.at
        return LogitsRows(at, self.rows.num_computed[at], self.rows.num_prompt_tokens[at], self.rows.token_ids)

    def on_cpu(self, logits):
        """(sampled, adjusted)."""
        step = self.step()
        adjusted = self.cpu.apply(logits, step)
        batch = self.table.batch(self.at, step.positions)
        invariant = lambda part, at: self.cpu.apply_invariant(part, step.take(at.numpy()))  # noqa: E731
        return sample(adjusted, batch, invariant), adjusted

    def plan(self, samples) -> StepPlan:
        return StepPlan(1, empty(), [], [empty()], [empty()], self.at, np.ones(len(self.at), np.int32), samples)

    def on_device(self, logits, samples=None) -> Choice:
        positions = torch.from_numpy(self.rows.num_computed[self.at])
        plan = self.plan(np.ones(len(self.at), np.bool_) if samples is None else samples)
        return self.device.choose(plan, self.rows, logits, torch.from_numpy(self.at), positions)

    def scores(self, choice: Choice):
        """What arrives of its logprobs."""
        if choice.scores is None:
            return None
        self.runtime.download(choice.scores.download.pairs).wait()
        return choice.scores.read()


def logits_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def anything_left(adjusted: torch.Tensor) -> np.ndarray:
    return (adjusted.amax(-1) > float("-inf")).numpy()


@pytest.mark.req("SMP-01", "SMP-15", "SMP-16", "SMP-18", "SMP-19", "SMP-20", "LP-01")
@given(st.lists(REQUEST, min_size=1, max_size=ROWS), st.integers(0, 99))
@settings(max_examples=60)
def test_tokens_and_logprobs_are_those_of_the_cpu(requests, seed):
    both, logits = Both(requests), logits_of(len(requests), seed)
    before = logits.clone()
    expected, adjusted = both.on_cpu(logits)
    choice = both.on_device(logits)
    left = anything_left(adjusted)
    assert torch.equal(logits, before)
    assert choice.result[:, Column.NOTHING_LEFT].bool().tolist() == (~left).tolist()
    assert choice.result[left, Column.TOKEN].tolist() == expected.token_ids[left].tolist()
    counts = np.array([-1 if params.logprobs is None else params.logprobs for params in both.params])
    asked = np.flatnonzero(counts >= 0)
    scores = both.scores(choice)
    if not len(asked):
        assert scores is None
        return
    tokens = choice.result[asked, Column.TOKEN].long()
    found = gather_logprobs(logits[asked], tokens, torch.from_numpy(counts[asked]))
    assert scores.plan_rows.tolist() == asked.tolist()
    assert scores.top_ids.tolist() == found.top_ids.tolist()
    assert scores.ranks.tolist() == found.ranks.tolist()
    np.testing.assert_allclose(scores.sampled, found.sampled.numpy(), atol=1e-5)
    np.testing.assert_allclose(scores.top_logprobs, found.top_logprobs.numpy(), atol=1e-5)


@given(st.lists(REQUEST, min_size=1, max_size=ROWS), st.integers(0, 99))
@settings(max_examples=60)
def test_changed_logits_are_those_of_the_cpu_to_the_bit(requests, seed):
    both, logits = Both(requests), logits_of(len(requests), seed)
    expected = both.cpu.apply(logits, both.step())
    both.adjustments.change(logits, both.at.astype(np.int64), both.step())
    assert torch.equal(logits, expected)


@pytest.mark.req("SMP-17", "SMP-18")
def test_tokens_that_the_host_does_not_know_yet_count():
    """The host's table ends a token earlier than the device's, as it does with two steps in flight."""
    fields = [
        {"bad_words": ((2, 7),)},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 2.0},
        {"extra_args": {"favour": [1, 9, 0]}},
    ]
    requests = [([1], [3, 2], {"temperature": 0.0, **each}) for each in fields]
    both, logits = Both(requests), torch.zeros(4, VOCAB)
    logits[:, 7], logits[:, 2], logits[:, 4] = 3.0, 2.5, 2.0
    logits[0, 2] = 2.9
    logits[1:, 7] = 0.0
    both.rows.token_ids[:, 2] = 0  # the output's last token is the device's alone
    assert both.on_device(logits).result[:, Column.TOKEN].tolist() == [2, 4, 4, 1]
    assert both.adjustments._tokens.host[3, :3].tolist() == [1, 3, 2]


@pytest.mark.req("LP-02", "LP-06")
@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs", "processed_logits"])
def test_every_mode_gives_what_the_cpu_gives(mode):
    wants = {"logprobs": 5, "bad_words": ((3,),), "temperature": 0.5}
    requests = [
        ([1, 2], [3], {**wants, "top_k": 3}),
        ([1, 2], [3], {**wants, "temperature": 0.0}),
        ([4], [], {**wants, "extra_args": {"sharpen": True}, "min_p": 0.0513}),
        ([4], [], {"logprobs": 2, "top_p": 0.6037}),
    ]
    both, logits = Both(requests, mode), logits_of(4, seed=5)
    expected, adjusted = both.on_cpu(logits)
    choice = both.on_device(logits)
    assert choice.result[:, Column.TOKEN].tolist() == expected.token_ids.tolist()
    of = expected.processed(adjusted) if mode.startswith("processed") else logits
    counts = torch.tensor([5, 5, 5, 2])
    found, scores = gather_logprobs(of, expected.token_ids, counts, normalised=mode.endswith("logprobs")), both.scores(choice)
    assert scores.top_ids.tolist() == found.top_ids.tolist()
    np.testing.assert_allclose(scores.sampled, found.sampled.numpy(), atol=1e-5)
    np.testing.assert_allclose(scores.top_logprobs, found.top_logprobs.numpy(), atol=1e-5)


@pytest.mark.req("LP-04")
def test_rows_that_do_not_sample_ask_for_nothing():
    both = Both([([1], [2], {"logprobs": 3}), ([1], [2], {}), ([1], [2], {"logprobs": 1})])
    logits = logits_of(3)
    choice = both.on_device(logits, samples=np.array([False, True, True]))
    scores = both.scores(choice)
    assert scores.plan_rows.tolist() == [2]
    assert scores.top_ids.shape == (1, 1)
    assert both.device.plain(both.plan(np.array([False, True, False])))
    assert not both.device.plain(both.plan(np.array([True, True, False])))


@pytest.mark.req("SMP-22")
def test_a_processor_s_failure_is_told_and_harms_nobody():
    requests = [
        ([1], [2], {"temperature": 0.0, "extra_args": {"favour": [7, 99.0, 0], "break": "raise"}}),
        ([1], [2], {"temperature": 0.0, "extra_args": {"favour": [7, 99.0, 0]}}),
        ([1], [2], {"temperature": 0.0, "extra_args": {"favour": [7, 99.0, 0], "break": "nan"}}),
    ]
    choice = Both(requests).on_device(logits_of(3))
    assert choice.result[1, Column.TOKEN] == 7
    assert sorted(choice.failed) == [0, 2]
    assert "out of luck" in choice.failed[0]


def test_broken_logits_are_told_beside_masks():
    both = Both([([1], [2], {"allowed_token_ids": (3, 4)}), ([1], [2], {"allowed_token_ids": (3, 4)})])
    logits = logits_of(2)
    logits[0, 9], logits[0, 10] = float("nan"), float("-inf")
    result = both.on_device(logits).result
    assert result[:, Column.NANS].tolist() == [1, 0]
    assert result[:, Column.INFINITIES].tolist() == [1, 0]
    assert result[1, Column.TOKEN] in (3, 4)


def test_nothing_of_it_waits_for_the_device_but_processors_of_ones_own():
    both = Both([([1], [2], {"logprobs": 3, "bad_words": ((2, 3),), "top_p": 0.5, "min_tokens": 3, "stop_token_ids": (4,)})])
    both.on_device(logits_of(1))
    assert not both.runtime.waits
    assert not both.runtime.synchronizations


def test_kernels_in_their_place_give_the_same():
    fields = {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "logprobs": 4, "top_p": 0.8117, "bad_words": ((5,),)}
    requests = [([1, 5], [5, 6], fields), ([1], [2], {"logprobs": 2, "temperature": 0.0}), ([3], [], {})]
    logits = logits_of(3, seed=8)
    here, there = Both(requests), Both(requests, ops=triton_sampling_ops())
    expected, found = here.on_device(logits), there.on_device(logits)
    assert found.result.tolist() == expected.result.tolist()
    ours, theirs = there.scores(found), here.scores(expected)
    assert ours.top_ids.tolist() == theirs.top_ids.tolist()
    np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=1e-5)


@pytest.mark.req("LP-02")
@pytest.mark.parametrize("normalised", [True, False])
def test_prompts_are_scored_as_on_the_cpu_in_parts(normalised):
    both, head = Both([]), torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(40, 8, generator=torch.Generator().manual_seed(2))
    number, random = 2 * ROWS + 3, np.random.default_rng(3)
    rows = PromptRows(
        hidden_indices=random.permutation(40)[:number].astype(np.int64),
        plan_rows=np.repeat(np.arange(3, dtype=np.int32), 5),
        positions=np.arange(number, dtype=np.int32),
        token_ids=random.integers(0, VOCAB, number).astype(np.int32),
        counts=np.repeat([4, 0, 2], 5),
    )
    hidden[rows.hidden_indices[6]] = float("nan")
    expected = score_prompts(lambda part: part @ head, hidden, rows, normalised)
    parts = score_on_device(both.runtime, REFERENCE, both.sampler.buffers, lambda part: part @ head, hidden, rows, normalised)
    both.runtime.download([pair for part in parts.downloads for pair in part.pairs]).wait()
    found = parts.read()
    assert list(found.not_finite) == [1]
    assert found.not_finite == expected.not_finite
    well = np.flatnonzero(rows.plan_rows != 1)
    assert found.logprobs.top_ids[well].tolist() == expected.logprobs.top_ids[well].tolist()
    assert found.logprobs.ranks[well].tolist() == expected.logprobs.ranks[well].tolist()
    np.testing.assert_allclose(found.logprobs.logprobs[well], expected.logprobs.logprobs[well], atol=1e-5)
    np.testing.assert_allclose(found.logprobs.top_logprobs[well], expected.logprobs.top_logprobs[well], atol=1e-5)
