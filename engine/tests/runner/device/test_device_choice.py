"""What requests ask for beside a token, on a device: the same changes, tokens and logprobs as on the CPU."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_runtime import LateRuntime
from own_processors import Favour, Insist, Sharpen

from penstock.engine.core.plan import SampleInputs
from penstock.engine.runner.device.host import HostRuntime
from penstock.engine.runner.device.runtime import Copies
from penstock.engine.runner.prompt_logprobs import PromptRows
from penstock.engine.runner.sampler.adjustments import Adjustments
from penstock.engine.runner.sampler.choice import Choice, Chooser, Choosing
from penstock.engine.runner.sampler.custom import GuardedProcessor
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.sampler import Sampler
from penstock.engine.runner.sampler.scores import score_prompts
from penstock.engine.runner.sampler.stage import Tokens
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling.buffers import Column, Path
from penstock.kernels.sampling.ops import CPU, REFERENCE, SamplingOps, triton_sampling_ops

ROWS, VOCAB, LENGTH = 6, 140, 24
NO_MASKS = SampleInputs(1)
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


class Requests:
    """Requests in rows 0, 1, … (prompt, output, fields) of one form of the sampler."""

    def __init__(
        self,
        requests: list[tuple[list[int], list[int], dict[str, Any]]],
        mode: str = "raw_logprobs",
        ops: SamplingOps = REFERENCE,
        copies: Copies | None = None,
    ) -> None:
        self.copies, self.params, size = copies or LateRuntime(), [], max(ROWS, len(requests))
        self.token_ids, self.host = torch.zeros(size + 1, LENGTH, dtype=torch.int32), np.zeros((size, LENGTH), np.int32)
        if self.copies.shares_memory:
            self.host = self.token_ids.numpy()
        processors = [GuardedProcessor(kind(size, VOCAB), kind.__name__, self.copies, size) for kind in (Favour, Insist, Sharpen)]
        self.sampler = Sampler(size, size, VOCAB, torch.device("cpu"), ops)
        self.adjustments = Adjustments(self.copies, ops, size, VOCAB, Tokens(self.token_ids, self.host), processors)
        self.chooser = Chooser(self.copies, self.sampler, self.adjustments, size, mode)
        self.prompts, self.known = (
            np.array([len(x) for x in xs], np.int32) for xs in zip(*[r[:2] for r in requests], strict=True)
        )
        self.known += self.prompts
        for row, (prompt, output, fields) in enumerate(requests):
            known, params = np.array(prompt + output, np.int32), SamplingParams(max_tokens=9, **fields)
            self.params.append(params)
            self.token_ids[row, : len(known)] = torch.from_numpy(known)
            self.chooser.admit(row, known, len(prompt), params)
        self.rows = np.arange(len(requests), dtype=np.int32)
        self.write_params()

    def write_params(self) -> None:
        """As a step does with what has been admitted."""
        changes = self.sampler.take_changes()
        self.sampler.params.index_copy_(0, torch.from_numpy(changes.rows).long(), torch.from_numpy(changes.words))

    def choosing(self, samples=None) -> Choosing:
        at = self.rows if samples is None else np.flatnonzero(samples).astype(np.int32)
        return Choosing(at.astype(np.int64), at, LogitsRows(at, self.known[at], self.prompts, self.host))

    def adjusted(self, logits):
        found = logits.clone()
        choosing = self.choosing()
        self.adjustments.apply(found, choosing.at, choosing.rows, torch.from_numpy(self.known))
        return found

    def choose(self, logits, samples=None, inputs=NO_MASKS) -> Choice:
        given = logits, torch.from_numpy(self.rows), torch.from_numpy(self.known), inputs
        return self.chooser.choose(self.choosing(samples), *given)

    def scores(self, choice: Choice):
        """What arrives of its logprobs."""
        if choice.scores is None:
            return None
        self.copies.download(choice.scores.download.pairs).wait()
        return choice.scores.read()


def on_cpu(requests, mode: str = "raw_logprobs") -> Requests:
    """As a CPU has them."""
    return Requests(requests, mode, CPU, HostRuntime())


def assert_scores_agree(found, expected) -> None:
    assert found.plan_rows.tolist() == expected.plan_rows.tolist()
    assert found.top_ids.tolist() == expected.top_ids.tolist()
    assert found.ranks.tolist() == expected.ranks.tolist()
    np.testing.assert_allclose(found.sampled, expected.sampled, atol=1e-5)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, atol=1e-5)


def logits_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.req("SMP-01", "SMP-15", "SMP-16", "SMP-18", "SMP-19", "SMP-20", "LP-01")
@given(st.lists(REQUEST, min_size=1, max_size=ROWS), st.integers(0, 99))
@settings(max_examples=60)
def test_tokens_and_logprobs_are_those_of_the_cpu(requests, seed):
    cpu, device, logits = on_cpu(requests), Requests(requests), logits_of(len(requests), seed)
    before = logits.clone()
    expected, choice = cpu.choose(logits), device.choose(logits)
    assert torch.equal(logits, before)
    assert choice.result[:, Column.NANS :].tolist() == expected.result[:, Column.NANS :].tolist()
    left = (cpu.adjusted(logits).amax(-1) > float("-inf")).numpy()
    assert choice.result[:, Column.NOTHING_LEFT].bool().tolist() == (~left).tolist()
    assert choice.result[left, Column.TOKEN].tolist() == expected.result[left, Column.TOKEN].tolist()
    scores, due = device.scores(choice), cpu.scores(expected)
    asked = [at for at, params in enumerate(device.params) if params.logprobs is not None]
    assert (scores is None) == (due is None) == (not asked)
    # Those of a row without a token are of any token.
    if scores is not None and left[asked].all():
        assert scores.plan_rows.tolist() == asked
        assert_scores_agree(scores, due)


@given(st.lists(REQUEST, min_size=1, max_size=ROWS), st.integers(0, 99))
@settings(max_examples=60)
def test_changed_logits_are_those_of_the_cpu_to_the_bit(requests, seed):
    logits = logits_of(len(requests), seed)
    assert torch.equal(Requests(requests).adjusted(logits), on_cpu(requests).adjusted(logits))


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
    device, logits = Requests(requests), torch.zeros(4, VOCAB)
    logits[:, 7], logits[:, 2], logits[:, 4] = 3.0, 2.5, 2.0
    logits[0, 2] = 2.9
    logits[1:, 7] = 0.0
    assert not device.host.any(), "tokens are on the device alone"
    assert device.choose(logits).result[:, Column.TOKEN].tolist() == [2, 4, 4, 1]
    assert device.host[3, :3].tolist() == [1, 3, 2]


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
    cpu, device, logits = on_cpu(requests, mode), Requests(requests, mode), logits_of(4, seed=5)
    expected, choice = cpu.choose(logits), device.choose(logits)
    assert choice.result[:, Column.TOKEN].tolist() == expected.result[:, Column.TOKEN].tolist()
    assert_scores_agree(device.scores(choice), cpu.scores(expected))


@pytest.mark.req("LP-02", "LP-06")
@pytest.mark.parametrize("form", [CPU, REFERENCE], ids=lambda ops: ops.form)
def test_processed_logits_are_what_a_token_was_drawn_from(form):
    """By the definition: masks, temperature, top-k."""
    wants = {"logprobs": 4, "bad_words": ((3,),), "temperature": 0.5, "top_k": 3, "seed": 1}
    requests, logits = Requests([([1, 2], [3], wants)], "processed_logits", form), logits_of(1, seed=5)
    logits[0, 3] = 90.0
    scores = requests.scores(requests.choose(logits))
    due = (logits[0] / 0.5).index_fill(0, torch.tensor([3]), float("-inf")).topk(3)
    assert scores.top_ids[0, :3].tolist() == due.indices.tolist()
    assert scores.top_logprobs[0].tolist() == [*due.values.tolist(), float("-inf")]


@pytest.mark.req("LP-04")
def test_rows_that_do_not_sample_ask_for_nothing():
    device = Requests([([1], [2], {"logprobs": 3}), ([1], [2], {}), ([1], [2], {"logprobs": 1})])
    logits = logits_of(3)
    choice = device.choose(logits, samples=np.array([False, True, True]))
    scores = device.scores(choice)
    assert scores.plan_rows.tolist() == [2]
    assert scores.top_ids.shape == (1, 1)
    assert device.chooser.plain(np.array([1], np.int32)) is Path.RANDOM
    assert device.chooser.plain(np.array([0, 1], np.int32)) is None


@pytest.mark.req("SMP-22")
def test_a_processor_s_failure_is_told_and_harms_nobody():
    requests = [
        ([1], [2], {"temperature": 0.0, "extra_args": {"favour": [7, 99.0, 0], "break": "raise"}}),
        ([1], [2], {"temperature": 0.0, "extra_args": {"favour": [7, 99.0, 0]}}),
        ([1], [2], {"temperature": 0.0, "extra_args": {"favour": [7, 99.0, 0], "break": "nan"}}),
    ]
    choice = Requests(requests).choose(logits_of(3))
    assert choice.result[1, Column.TOKEN] == 7
    assert sorted(choice.failed) == [0, 2]
    assert "out of luck" in choice.failed[0]


def test_broken_logits_are_told_beside_masks():
    device = Requests([([1], [2], {"allowed_token_ids": (3, 4)}), ([1], [2], {"allowed_token_ids": (3, 4)})])
    logits = logits_of(2)
    logits[0, 9], logits[0, 10] = float("nan"), float("-inf")
    result = device.choose(logits).result
    assert result[:, Column.NANS].tolist() == [1, 0]
    assert result[:, Column.INFINITIES].tolist() == [1, 0]
    assert result[1, Column.TOKEN] in (3, 4)


def test_nothing_of_it_waits_for_the_device_but_processors_of_ones_own():
    device = Requests(
        [([1], [2], {"logprobs": 3, "bad_words": ((2, 3),), "top_p": 0.5, "min_tokens": 3, "stop_token_ids": (4,)})]
    )
    device.choose(logits_of(1))
    assert not device.copies.waits
    assert not device.copies.synchronizations


def test_kernels_in_their_place_give_the_same():
    fields = {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "logprobs": 4, "top_p": 0.8117, "bad_words": ((5,),)}
    requests = [([1, 5], [5, 6], fields), ([1], [2], {"logprobs": 2, "temperature": 0.0}), ([3], [], {})]
    logits = logits_of(3, seed=8)
    here, there = Requests(requests), Requests(requests, ops=triton_sampling_ops())
    expected, found = here.choose(logits), there.choose(logits)
    assert found.result.tolist() == expected.result.tolist()
    ours, theirs = there.scores(found), here.scores(expected)
    assert ours.top_ids.tolist() == theirs.top_ids.tolist()
    np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=1e-5)


@pytest.mark.req("LP-02")
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_prompts_are_scored_in_parts_and_alike_in_every_form(mode):
    head = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1))
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
    found = []
    for copies, ops in ((HostRuntime(), CPU), (LateRuntime(), REFERENCE)):
        sampler = Sampler(ROWS, ROWS, VOCAB, torch.device("cpu"), ops)
        parts = score_prompts(copies, sampler, lambda part: part @ head, hidden, rows, mode)
        copies.download([pair for part in parts.downloads for pair in part.pairs]).wait()
        found.append(parts.read())
        assert len(parts.downloads) == 3
    cpu, device = found
    assert list(device.not_finite) == [1]
    assert device.not_finite == cpu.not_finite
    well = np.flatnonzero(rows.plan_rows != 1)
    exact = (hidden[torch.from_numpy(rows.hidden_indices)] @ head).double()
    exact = exact.log_softmax(-1) if mode.endswith("logprobs") else exact
    for form in found:
        due = exact.gather(1, torch.from_numpy(rows.token_ids).long()[:, None])[well, 0]
        np.testing.assert_allclose(form.logprobs.logprobs[well], due, atol=1e-5)
    assert device.logprobs.top_ids[well].tolist() == cpu.logprobs.top_ids[well].tolist()
    assert device.logprobs.ranks[well].tolist() == cpu.logprobs.ranks[well].tolist()
    np.testing.assert_allclose(device.logprobs.top_logprobs[well], cpu.logprobs.top_logprobs[well], atol=1e-5)
