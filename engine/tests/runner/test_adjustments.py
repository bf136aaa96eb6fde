"""What requests ask to be changed in the logits: each stage against its definition and against transformers, their order, their
distribution, and that what is kept of a row is a function of the row's own request."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampler import chi_square_accepts, choose

from penstock.engine.runner.device.host import HostRuntime
from penstock.engine.runner.sampler.adjustments import Adjustments
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.stage import Tokens
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling.buffers import Column
from penstock.kernels.sampling.ops import CPU, REFERENCE, SamplingOps

VOCAB, LENGTH = 40, 64
INF = float("inf")


class Rows:
    """Requests in rows 0, 1, … of an engine that adjusts; `tokens[i]` is the prompt and the output so far."""

    def __init__(
        self, requests: list[tuple[list[int], list[int], dict[str, Any]]], vocab: int = VOCAB, ops: SamplingOps = CPU
    ) -> None:
        self.table = np.zeros((len(requests), LENGTH), np.int32)
        tokens = Tokens(torch.from_numpy(self.table), self.table)
        self.adjustments = Adjustments(HostRuntime(), ops, len(requests), vocab, tokens)
        self.prompts = np.array([len(prompt) for prompt, _, _ in requests], np.int32)
        self.known = self.prompts + np.array([len(output) for _, output, _ in requests], np.int32)
        for row, (prompt, output, fields) in enumerate(requests):
            self.admit(row, prompt, output, fields)

    def admit(self, row: int, prompt: list[int], output: list[int], fields: dict[str, Any]) -> None:
        tokens = np.array(prompt + output, np.int32)
        self.table[row, : len(tokens)] = tokens
        self.prompts[row], self.known[row] = len(prompt), len(tokens)
        self.adjustments.admit(row, tokens, len(prompt), SamplingParams(max_tokens=50, **fields))

    def adjust(self, logits: torch.Tensor, rows: list[int], ahead: list[int] | None = None) -> torch.Tensor:
        """Of choices by these rows; `ahead`: how many tokens after what is known each one is."""
        at = np.array(rows, np.int32)
        positions = self.known[at] + np.array(ahead or [0] * len(rows), np.int32)
        found = logits.clone()
        rows_of = LogitsRows(at, positions, self.prompts, self.table)
        self.adjustments.apply(found, np.arange(len(rows)), rows_of, torch.from_numpy(positions))
        return found

    def choose(self, rows: list[int], tokens: list[int]) -> None:
        """A step's tokens, as the runner takes them in."""
        self.table[rows, self.known[rows]] = tokens
        self.known[rows] += 1


def adjusted(logits: torch.Tensor, prompt: list[int], output: list[int], **fields: Any) -> torch.Tensor:
    """One request's [vocab]."""
    return Rows([(prompt, output, fields)], len(logits)).adjust(logits[None], [0])[0]


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def masked(logits: torch.Tensor) -> list[int]:
    return logits.isneginf().nonzero().squeeze(-1).tolist()


@pytest.fixture(scope="module")
def processors() -> Any:
    pytest.importorskip("transformers")
    from transformers.generation import logits_process

    return logits_process


@pytest.mark.req("SMP-15")
@pytest.mark.parametrize("penalty", [0.5, 1.3, 7.0])
def test_repetition_penalty_equals_transformers(processors, penalty):
    """Over prompt and output, of positive and of negative logits."""
    prompt, output = [3, 5, 3, 11], [7, 5, 0]
    logits = logits_of(1)
    logits[0, [3, 7]], logits[0, [5, 0]] = logits[0, [3, 7]].abs(), -logits[0, [5, 0]].abs()
    expected = processors.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())[0]
    assert torch.equal(adjusted(logits[0], prompt, output, repetition_penalty=penalty), expected)
    assert not torch.equal(expected, logits[0])


@pytest.mark.req("SMP-16")
def test_frequency_and_presence_follow_openais_formula():
    """Counts 0, 1 and 3; the prompt's tokens do not count."""
    logits, prompt, output = logits_of(2)[0], [1, 2, 2], [2, 4, 4, 4]
    found = adjusted(logits, prompt, output, frequency_penalty=0.7, presence_penalty=-0.4)
    expected = logits.clone()
    expected[2] -= 1 * 0.7 - 0.4
    expected[4] -= 3 * 0.7 - 0.4
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    untouched = [token for token in range(VOCAB) if token not in (2, 4)]
    assert torch.equal(found[untouched], logits[untouched])


@pytest.mark.req("SMP-20")
def test_logit_bias_equals_transformers_and_forces_a_token(processors):
    logits = logits_of(3)
    biases = {0: 2.5, 9: -100.0, 39: 0.25}
    expected = processors.SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()})(
        torch.tensor([[1, 2]]), logits.clone()
    )[0]
    assert torch.equal(adjusted(logits[0], [1, 2], [], logit_bias=tuple(biases.items())), expected)
    assert int(adjusted(logits[0], [1], [], logit_bias=((17, 100.0),)).argmax()) == 17


@pytest.mark.req("SMP-19")
@pytest.mark.parametrize("outputs", [0, 2, 3, 4])
def test_min_tokens_equals_transformers(processors, outputs):
    """Masked while there are fewer than three."""
    prompt, output = [1, 2, 3], [8, 9, 10, 11][:outputs]
    processor = processors.MinNewTokensLengthLogitsProcessor(len(prompt), 3, [6, 30], device="cpu")
    expected = processor(torch.tensor([prompt + output]), logits_of(4))[0]
    found = adjusted(logits_of(4)[0], prompt, output, min_tokens=3, stop_token_ids=(6, 30))
    assert torch.equal(found, expected) and masked(found) == ([6, 30] if outputs < 3 else [])


@pytest.mark.req("SMP-18")
def test_bad_words_equal_transformers_on_the_output(processors):
    words = ((5,), (7, 8), (7, 9), (1, 7, 10), (2, 2, 2), (3, 1, 7, 11), tuple(range(12, 40)))
    for output in ([], [7], [1], [1, 7], [3, 1, 7], [2], [2, 2], [7, 8], list(range(12, 39))):
        found = adjusted(logits_of(5)[0], [4], output, bad_words=words)
        processor = processors.NoBadWordsLogitsProcessor([list(word) for word in words])
        assert torch.equal(found, processor(torch.tensor([[4, *output]]), logits_of(5))[0]), output
    # What the prompt has begun may be completed, as in vLLM.
    assert masked(adjusted(logits_of(5)[0], [3, 1, 7], [], bad_words=words)) == [5]


@pytest.mark.req("SMP-18")
def test_allowed_token_ids_leave_nothing_else():
    logits = logits_of(6)[0]
    found = adjusted(logits, [1], [], allowed_token_ids=(4, 30))
    assert masked(found) == [token for token in range(VOCAB) if token not in (4, 30)]
    assert torch.equal(found[[4, 30]], logits[[4, 30]])


def test_tokens_without_logits_change_nothing():
    """The tokenizer may know tokens that the model does not; a word with one of them is never completed."""
    fields = {"logit_bias": ((VOCAB, 5.0),), "bad_words": ((VOCAB,), (1, VOCAB + 7)), "min_tokens": 2}
    found = adjusted(logits_of(7)[0], [1], [1], **fields, stop_token_ids=(VOCAB + 1,))
    assert torch.equal(found, logits_of(7)[0])
    assert masked(adjusted(logits_of(7)[0], [1], [], allowed_token_ids=(VOCAB, 3))) == [*range(3), *range(4, VOCAB)]


@pytest.mark.req("SMP-01")
def test_the_order_of_the_stages():
    """A bias is added before the repetition penalty divides, masks survive every sum, and the frequency comes last."""
    logits = torch.full((VOCAB,), -1.0)
    found = adjusted(logits, [0], [1], logit_bias=((0, 5.0), (1, 5.0)), repetition_penalty=2.0, frequency_penalty=1.5)
    assert found[:3].tolist() == [(-1 + 5) / 2, (-1 + 5) / 2 - 1.5, -1.0]
    for masks in ({"allowed_token_ids": (1, 2)}, {"bad_words": ((0,),)}, {"min_tokens": 2, "stop_token_ids": (0,)}):
        found = adjusted(logits, [0], [1], logit_bias=((0, 100.0),), repetition_penalty=0.5, presence_penalty=-2.0, **masks)
        assert found[0] == -INF and int(found.argmax()) == 1


@pytest.mark.req("SMP-17")
@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=lambda ops: ops.form)
def test_what_is_adjusted_counts_the_drafts_before_a_position(ops):
    """A request with a draft has two rows of logits: what the draft is changes the second one."""
    draft = 4
    fields = {"frequency_penalty": 1.0, "bad_words": ((draft, 6),), "min_tokens": 2, "stop_token_ids": (9,)}
    rows = Rows([([1], [draft], fields)], ops=ops)
    rows.table[0, 2] = draft
    found = rows.adjust(torch.zeros(2, VOCAB), [0, 0], ahead=[0, 1])
    assert found[:, draft].tolist() == [-1.0, -2.0]
    rows = Rows([([1], [], fields)], ops=ops)
    rows.table[0, 1] = draft
    found = rows.adjust(torch.zeros(3, VOCAB), [0, 0, 0], ahead=[0, 1, 2])
    assert found[:, [6, 9]].tolist() == [[0.0, -INF], [-INF, -INF], [0.0, 0.0]]


def wishes() -> st.SearchStrategy[dict[str, Any]]:
    """Some of everything."""
    tokens = st.integers(0, VOCAB - 1)
    return st.fixed_dictionaries(
        {},
        optional={
            "presence_penalty": st.sampled_from([-2.0, 0.3, 2.0]),
            "frequency_penalty": st.sampled_from([-1.0, 0.3, 2.0]),
            "repetition_penalty": st.sampled_from([0.7, 1.2, 3.0]),
            "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, 0.5, 4.0]), max_size=4).map(
                lambda biases: tuple(biases.items())
            ),
            "min_tokens": st.integers(0, 4),
            "stop_token_ids": st.lists(tokens, max_size=3, unique=True).map(tuple),
            "bad_words": st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
            "allowed_token_ids": st.lists(tokens, min_size=3, max_size=30, unique=True).map(tuple),
        },
    )


@pytest.mark.req("SMP-15", "SMP-16", "SMP-18", "SMP-19", "SMP-20")
@settings(max_examples=80)
@given(data=st.data())
def test_a_row_is_adjusted_as_if_it_were_alone_and_new(data):
    """Rows gain tokens step by step, and change hands; each time the outcome equals that of a request admitted with those tokens
    into an engine of its own. So neither neighbours, nor former tenants, nor a preemption change anything."""
    tokens = st.integers(0, 5)
    draw_request = st.tuples(st.lists(tokens, min_size=1, max_size=4), st.builds(list), wishes())
    requests = [data.draw(draw_request) for _ in range(3)]
    rows = Rows(requests)
    for step in range(6):
        running = data.draw(st.lists(st.integers(0, 2), min_size=1, unique=True))
        logits = logits_of(step, len(running))
        found = rows.adjust(logits, running)
        for at, row in enumerate(running):
            prompt, output, fields = requests[row]
            assert torch.equal(found[at], adjusted(logits[at], prompt, output, **fields))
        chosen = [data.draw(tokens) for _ in running]
        rows.choose(running, chosen)
        for row, token in zip(running, chosen, strict=True):
            requests[row][1].append(token)
        change = data.draw(st.sampled_from(["none", "preempt", "replace"]))
        if change != "none":
            row = running[0]
            if change == "replace":
                prompt, _, fields = data.draw(draw_request)
                requests[row] = (prompt, [], fields)
            rows.admit(row, *requests[row])


@pytest.mark.slow
@pytest.mark.req("SMP-16", "SMP-20")
@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 2.0},
        {"frequency_penalty": 0.5, "presence_penalty": 0.4},
        {"logit_bias": ((0, -1.0), (5, 3.0))},
        {"allowed_token_ids": (0, 2, 5)},
        {"bad_words": ((1,), (3, 2))},
        {"min_tokens": 9, "stop_token_ids": (0, 4)},
        {"logit_bias": ((7, 2.0),), "repetition_penalty": 1.5, "frequency_penalty": 0.3, "bad_words": ((0,),)},
        {"frequency_penalty": 1.0, "top_k": 3},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_draws_follow_the_adjusted_distribution(fields):
    """Chi-square against a softmax of logits that are adjusted here by the definitions, in float64."""
    logits, draws = torch.tensor([4.0, 3.0, 2.5, 2.0, 1.5, -1.0, 0.5, 0.0]), 20_000
    prompt, output = [0, 5], [1, 1, 3]
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=4, **fields)
    rows = Rows([(prompt, output, fields)], len(logits))
    found = rows.adjust(logits.expand(draws, -1), [0] * draws)
    tokens = choose(found, [params], np.zeros(draws, np.int32), np.arange(draws, dtype=np.int32))[:, Column.TOKEN]
    expected = by_definition(logits.tolist(), prompt, output, params)
    if params.top_k:
        expected[np.argsort(-expected)[params.top_k :]] = -INF
    weights = np.exp(expected)
    assert chi_square_accepts(np.bincount(tokens.numpy(), minlength=len(logits)), weights / weights.sum())


def by_definition(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    biases, found = dict(params.logit_bias), []
    for token, logit in enumerate(logits):
        ends = [word for word in params.bad_words if word[-1] == token]
        banned = any(len(word) == 1 or output[1 - len(word) :] == list(word[:-1]) for word in ends)
        banned |= bool(params.allowed_token_ids) and token not in params.allowed_token_ids
        banned |= len(output) < params.min_tokens and token in params.stop_token_ids
        value = -INF if banned else logit + biases.get(token, 0.0)
        if token in prompt + output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= output.count(token) * params.frequency_penalty + (token in output) * params.presence_penalty
        found.append(value)
    return np.array(found)
