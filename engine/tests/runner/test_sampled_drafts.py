"""Drafts that are drawn from a distribution of their own: tokens are as likely as without them, whatever that distribution is."""

import msgspec
import numpy as np
import pytest
import torch
from draft_heads import DRAFT_VOCAB, ReferenceHead, save_head
from test_core_with_runner import OUTPUTS, SCHEDULER, requests
from test_draft_heads import HEADS
from test_draft_model import drafts_pay
from test_drafts_in_core import K, Watched
from test_sampler import chi_square_accepts

from penstock.engine.config import ConfigError, SpeculativeConfig
from penstock.engine.core.plan import SampleInputs, StepPlan, empty
from penstock.engine.messages import AddRequest
from penstock.engine.runner.device.host import HostRuntime
from penstock.engine.runner.draft_sampler import DraftSampler
from penstock.engine.runner.requests import Requests
from penstock.engine.runner.sampler import choice
from penstock.engine.runner.sampler.choice import Choosing, Drawn
from penstock.engine.runner.sampler.sampler import Sampler
from penstock.engine.runner.verification import planned_drafts, verify
from penstock.engine.sampling import SamplingParams
from penstock.engine.spec.settings import speculative_config
from penstock.kernels.sampling.buffers import Column
from penstock.kernels.sampling.ops import CPU
from penstock.kernels.sampling.rejection import draw_drafts, settle

pytestmark = pytest.mark.slow

DRAWS = 100_000
TARGET = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -8.0])
VOCAB = len(TARGET)
NOTHING = float("-inf")


def logits_of(*weights: float) -> torch.Tensor:
    return torch.tensor(weights).log()


DRAFTERS = {
    "wrong and sure": logits_of(0, 0, 0, 0, 0, 0, 0, 1),
    "right and sure": logits_of(1, 0, 0, 0, 0, 0, 0, 0),
    "equal": TARGET,
    "disjoint": logits_of(0, 0, 0, 0, 0, 0, 1, 1),
    "with holes": logits_of(0, 0.4, 0, 0.1, 0.3, 0, 0.2, 0),
    "flat": torch.zeros(VOCAB),
    "opposite": -TARGET,
}
ASKED = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "filtered": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
    "biased": {"temperature": 1.0, "logit_bias": ((0, -3.0), (4, 2.0)), "allowed_token_ids": (0, 2, 4, 6)},
    "penalised": {"temperature": 1.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
}


def tokens_of(drafter: torch.Tensor, sampling: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """The drafts, and the tokens, at as many positions of a request whose text is token 3 so far."""
    sampler = Sampler(1, DRAWS, VOCAB, torch.device("cpu"), CPU)
    # Every position looks at the same text: one output token before the place in question.
    batch = Requests(1, 8, [], VOCAB, HostRuntime(), sampler)
    batch.chooser.admit(0, np.array([3], np.int32), 0, sampling)
    batch.rows.token_ids[0, 0] = 3
    changes = sampler.take_changes()
    sampler.params[changes.rows] = torch.from_numpy(changes.words)
    rows, positions = np.zeros(DRAWS, np.int32), np.arange(DRAWS, dtype=np.int32)
    drafts, left = draw_drafts(drafter.expand(DRAWS, -1), *(torch.from_numpy(it) for it in (rows, positions)), sampler.params)
    seen = batch.logits_rows(rows, np.ones(DRAWS, np.int32))
    choosing = Choosing(np.arange(DRAWS), rows, seen)
    drawn = Drawn(np.arange(DRAWS), drafts.numpy().astype(np.int32), left)
    given = TARGET.expand(DRAWS, -1), torch.from_numpy(rows), torch.from_numpy(positions)
    with pytest.MonkeyPatch.context() as patch:
        # Penalties read positions on the device: here all are those of the one text.
        apply, ones = batch.chooser._adjustments.apply, torch.ones(DRAWS, dtype=torch.int32)
        patch.setattr(batch.chooser._adjustments, "apply", lambda logits, at, of, _: apply(logits, at, of, ones))
        found = batch.chooser.choose(choosing, *given, SampleInputs(0), drawn)
    return drafts.numpy(), found.result[:, Column.TOKEN].numpy().copy()


def left_of(logits: torch.Tensor, sampling: SamplingParams) -> np.ndarray:
    """Probabilities after temperature and filters."""
    x = logits.double() / sampling.temperature
    x[x < x.max() + np.log(sampling.min_p or 1e-300)] = NOTHING
    ordered = x.softmax(0).sort(descending=True)
    p = x.softmax(0)
    if sampling.top_k:
        p[ordered.indices[sampling.top_k :]] = 0
        p /= p.sum()
    if sampling.top_p < 1:
        ordered = p.sort(descending=True)
        before = ordered.values.cumsum(0) - ordered.values
        p[ordered.indices[before >= sampling.top_p]] = 0
        p /= p.sum()
    return p.numpy()


def target_of(sampling: SamplingParams) -> np.ndarray:
    """What tokens must be like."""
    x = TARGET.clone()
    for token, bias in sampling.logit_bias:
        x[token] += bias
    if sampling.allowed_token_ids:
        x[[token for token in range(VOCAB) if token not in sampling.allowed_token_ids]] = NOTHING
    x[3] -= sampling.frequency_penalty + sampling.presence_penalty
    return left_of(x, sampling)


def fits(counts: np.ndarray, due: np.ndarray) -> bool:
    """By chi-square; what is due less than five times counts as one outcome."""
    rare = (due > 0) & (due * counts.sum() < 5)
    kept = ~rare
    return chi_square_accepts(np.append(counts[kept], counts[rare].sum()), np.append(due[kept], due[rare].sum()))


@pytest.mark.parametrize(
    ("drafter", "asked"),
    [*((drafter, "plain") for drafter in DRAFTERS), *(("opposite", asked) for asked in ASKED if asked != "plain")],
)
@pytest.mark.req("SD-02", "SD-06", "SD-07", "SD-09", "SPV-02")
def test_tokens_are_as_likely_as_without_drafts(drafter, asked):
    sampling = SamplingParams(max_tokens=9, seed=11, **ASKED[asked])
    drafts, tokens = tokens_of(DRAFTERS[drafter], sampling)
    p, q = target_of(sampling), left_of(DRAFTERS[drafter].clone(), sampling)
    counts = np.bincount(tokens, minlength=VOCAB)
    assert fits(np.bincount(drafts, minlength=VOCAB), q), "the drafts are not q's"
    assert fits(counts, p), (counts / DRAWS, p)
    assert np.abs(counts / DRAWS - p).sum() / 2 < 0.006
    accepted, due = (drafts == tokens).mean(), min(np.minimum(p, q).sum(), 1.0)
    assert accepted == pytest.approx(due, abs=4.5 * np.sqrt(due * (1 - due) / DRAWS) + 1e-9)


def test_a_draft_that_could_not_have_come_is_rejected():
    left, drawn = TARGET[None], logits_of(0, 1, 0, 0, 0, 0, 0, 0)[None]
    for seed in range(50):
        token = settle(left, drawn, torch.tensor([0]), torch.tensor([seed]), torch.tensor([5]))
        assert token.item() != 1, "what p has less of cannot come in its place"


def test_what_breaks_breaks_its_row_alone():
    """Logits that are no numbers, and a mask that leaves nothing: the sampler fails these requests; their token is any."""
    bad = torch.full((VOCAB,), float("nan")), torch.full((VOCAB,), NOTHING)
    left, ids = torch.stack((*bad, TARGET, TARGET)), torch.tensor([0, 1, 2, 2])
    drawn = torch.stack((TARGET, TARGET, bad[0], TARGET))
    found = settle(left, drawn, ids, torch.arange(4), torch.arange(4))
    assert ((found >= 0) & (found < VOCAB)).all() and found[3] == 2


@pytest.mark.parametrize("draft", [0, 3, 7])
@pytest.mark.req("SD-08")
def test_a_draft_without_probabilities_biases_nothing(draft):
    """As lookups make them: it is accepted as often as it is likely, and another token comes in its place."""
    sampler, rows = Sampler(1, DRAWS, VOCAB, torch.device("cpu"), CPU), np.arange(DRAWS, dtype=np.int32)
    sampler.admit(0, SamplingParams(max_tokens=9, seed=17, temperature=1.0))
    changes = sampler.take_changes()
    sampler.params[changes.rows] = torch.from_numpy(changes.words)
    of, positions = torch.zeros(DRAWS, dtype=torch.int32), torch.from_numpy(rows)
    sampled = sampler.sample(TARGET.expand(DRAWS, -1), of, positions).numpy()
    count = DRAWS // 2
    ones = np.ones(count, np.int32)
    plan = StepPlan(0, empty(), [], [], [], rows[:count], 2 * ones, np.ones(count, np.bool_), num_drafts=ones)
    verified = verify(plan, planned_drafts(plan, np.full((count, 1), draft, np.int32)), sampled)
    p = target_of(SamplingParams(max_tokens=9, temperature=1.0))
    assert fits(np.bincount(verified.token_ids[:, 0], minlength=VOCAB), p)
    accepted = verified.counts == 2
    assert accepted.mean() == pytest.approx(p[draft], abs=0.01)
    after = verified.token_ids[accepted, 1]
    assert fits(np.bincount(after, minlength=VOCAB), p), "the token after it"
    assert (verified.token_ids[~accepted, 1] == -1).all(), "none after a rejected one"


@pytest.mark.req("SD-07")
def test_numbers_of_several_purposes_are_independent():
    """Given that a draft is rejected, what comes in its place is the residual's at every draft: no number is used twice."""
    q = logits_of(0, 0, 0.5, 0, 0, 0, 0, 0.5)
    sampling = SamplingParams(max_tokens=9, seed=3, temperature=1.0)
    drafts, tokens = tokens_of(q, sampling)
    p = target_of(sampling)
    residual = (p - left_of(q.clone(), sampling)).clip(0)
    for draft in (2, 7):
        others = tokens[(drafts == draft) & (tokens != draft)]
        assert chi_square_accepts(np.bincount(others, minlength=VOCAB), residual / residual.sum())


# --- the whole engine ---


def drafting(checkpoint, build_runner, monkeypatch, method, folder, depth=1, num_blocks=100):
    scheduler = msgspec.structs.replace(SCHEDULER, num_speculative_tokens=K, num_lookahead_tokens=K)
    fields = {"num_speculative_tokens": K, "model": folder, "draft_sample_method": "probabilistic"}
    runner = build_runner(checkpoint("llama"), scheduler=scheduler, speculative=SpeculativeConfig(method=method, **fields))
    drafts_pay(monkeypatch)
    return Watched(runner, depth, num_blocks)


@pytest.fixture
def draft_head(tmp_path):
    """Of another, smaller vocabulary."""
    made, layer, fields = HEADS["eagle3"]
    return save_head(tmp_path / "head", ReferenceHead(**made).tensors(layer), **fields)


def unseeded(first: int, prompt: list[int], count: int = 500, **sampling) -> list[AddRequest]:
    return [
        AddRequest(
            seed,
            f"r{seed}",
            prompt,
            SamplingParams(max_tokens=3, temperature=1.0, seed=seed, seeded=False, **sampling),
            float(seed),
        )
        for seed in range(first, first + count)
    ]


BIASED = ((5, 3.0), (17, 2.5), (100, 2.0))


def triples(model, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Each output of three tokens, and how likely it is, with `BIASED` and `top_k` 3."""
    due: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for known, p in due.items():
            logits = model(torch.tensor([[*prompt, *known]])).logits[0, -1]
            for token, bias in BIASED:
                logits[token] += bias
            best = logits.topk(3)
            for q, token in zip(best.values.double().softmax(0).tolist(), best.indices.tolist(), strict=True):
                longer[*known, token] = p * q
        due = longer
    return due


@pytest.mark.parametrize(("method", "depth"), [("draft_model", 2), ("eagle3", 1)])
@pytest.mark.req("SD-02", "SD-05", "SD-17")
def test_three_tokens_in_a_row_are_as_likely_as_plain_torch_says(
    checkpoint, build_runner, monkeypatch, draft_head, method, depth
):
    """The draft model is the target without the request's bias, which is right at times; the head is as good as never."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32).eval()
    prompt = [5, 7, 11, 200]
    with torch.inference_mode():
        due = triples(model, prompt)
    folder = checkpoint("llama") if method == "draft_model" else draft_head
    engine, found = drafting(checkpoint, build_runner, monkeypatch, method, folder, depth), {}
    try:
        for first in (0, 500):  # as many as may wait
            found |= engine.run(unseeded(first, prompt, top_k=3, logit_bias=BIASED))
    finally:
        engine.executor.close()
    outcomes = list(due)
    counts = np.bincount([outcomes.index(tuple(tokens)) for tokens in found.values()], minlength=len(outcomes))
    assert fits(counts, np.array(list(due.values())))
    assert engine.drafted > 100
    if method == "draft_model":
        assert 30 < engine.accepted < engine.drafted - 30


@pytest.mark.parametrize("num_blocks", [100, 22])
@pytest.mark.req("SD-17")
def test_a_draft_model_that_is_the_target_is_never_rejected(checkpoint, build_runner, monkeypatch, num_blocks):
    """Drawn by other numbers than tokens are: q must be p in every bit, through filters, chunks and preemptions."""
    engine = drafting(checkpoint, build_runner, monkeypatch, "draft_model", checkpoint("llama"), num_blocks=num_blocks)
    equal: list[bool] = []

    def watched(left, draft_left, draft_ids, *given):
        found = settle(left, draft_left, draft_ids, *given)
        equal.extend((found == draft_ids).tolist())
        return found

    monkeypatch.setattr(choice, "settle", watched)
    batch = [
        msgspec.structs.replace(it, sampling=SamplingParams(OUTPUTS, 0.9, 0.9, min_p=0.01, seed=it.index, seeded=False))
        for it in requests(False)
    ]
    found = engine.run(batch)
    assert all(len(tokens) == OUTPUTS for tokens in found.values())
    assert len(equal) > 100 and all(equal)
    assert (engine.core.stats().preemptions > 0) == (num_blocks == 22)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
@pytest.mark.req("SD-11")
def test_seeded_and_greedy_requests_keep_their_tokens(checkpoint, build_runner, monkeypatch, draft_head, method):
    """Beside others whose drafts are drawn."""
    from test_core_with_runner import Engine

    alone, runner = {}, build_runner(checkpoint("llama"), scheduler=SCHEDULER)
    for request in requests(False):
        alone |= Engine(runner, depth=1, num_blocks=100).run([request])
    folder = checkpoint("llama") if method == "draft_model" else draft_head
    engine = drafting(checkpoint, build_runner, monkeypatch, method, folder)
    others = [
        msgspec.structs.replace(
            it, index=it.index + 100, request_id=f"other-{it.index}", sampling=SamplingParams(OUTPUTS, 1.0, seeded=False)
        )
        for it in requests(False)
    ]
    found = engine.run([it for pair in zip(requests(False), others, strict=True) for it in pair])
    assert {index: tokens for index, tokens in found.items() if index < 100} == alone


def test_a_head_draws_tokens_of_its_own_vocabulary(checkpoint, build_runner, monkeypatch, draft_head):
    engine = drafting(checkpoint, build_runner, monkeypatch, "eagle3", draft_head)
    seen, drawn = [], DraftSampler.left_of
    monkeypatch.setattr(DraftSampler, "left_of", lambda *given: seen.append(drawn(*given)) or seen[-1])
    engine.run(unseeded(0, [1, 2, 3], count=8))
    possible = torch.cat(seen) > NOTHING
    assert possible.shape[1] == 257 and possible[:, ::2].any() and not possible[:, 1::2].any()
    assert possible.sum(1).max() == DRAFT_VOCAB


def test_lookups_draw_no_drafts():
    with pytest.raises(ConfigError, match="draft_sample_method probabilistic: the method ngram draws no drafts"):
        speculative_config({"method": "ngram", "draft_sample_method": "probabilistic"}, None, None)
