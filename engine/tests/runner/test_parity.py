"""Logits and greedy tokens equal Hugging Face transformers', on tiny random checkpoints of every family."""

import numpy as np
import pytest
import torch
from tiny_models import CONFIGS

from penstock.engine.sampling import SamplingParams
from penstock.kernels.cpu.isa import available

NAMES = [*CONFIGS]
PROMPT, OUTPUTS, VOCAB = 150, 12, 257
ALL_LOGPROBS = SamplingParams(max_tokens=100, temperature=0.0, logprobs=VOCAB)


@pytest.fixture(scope="module")
def reference(checkpoint):
    """`reference(name)`: transformers' model in float32."""
    transformers = pytest.importorskip("transformers")

    def load(name: str):
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(name), attn_implementation="eager")
        return model.float().eval()

    return load


def prompt(seed: int, length: int = PROMPT) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@torch.no_grad()
def reference_logprobs(model, tokens: list[int]) -> torch.Tensor:
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1)


def by_token(result) -> torch.Tensor:
    """The first row's log probabilities in the order of the vocabulary."""
    found = torch.empty(VOCAB)
    found[torch.tensor(result.logprobs.top_ids[0]).long()] = torch.tensor(result.logprobs.top_logprobs[0])
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["reference", *(isa.name for isa in available())])
@pytest.mark.req("ATT-08", "ATT-31", "LP-01")
def test_logprobs_equal_transformers(name, form, loaded, driver, reference):
    play, tokens = driver(loaded(name, "float32", form)), prompt(1)
    expected = reference_logprobs(reference(name), tokens)
    sequence = play.admit(tokens[:-4], ALL_LOGPROBS)
    results = [play.step([(sequence, 100)]), play.step([(sequence, PROMPT - 104)])]
    assert results[0].counts.tolist() == [0]
    torch.testing.assert_close(by_token(results[1]), expected[PROMPT - 5], rtol=0, atol=2e-5)


@pytest.mark.req("LP-01")
def test_prompt_logprobs_equal_transformers(loaded, driver, reference):
    play, tokens = driver(loaded("llama")), prompt(1)
    expected = reference_logprobs(reference("llama"), tokens)
    sequence = play.admit(tokens, SamplingParams(max_tokens=5, temperature=0.0, prompt_logprobs=VOCAB))
    for count, positions in ((100, range(1, 101)), (49, range(101, 150)), (1, ())):
        found = play.step([(sequence, count)]).prompt_logprobs
        assert (found is None) == (not positions)
        if found is not None:
            assert found.positions.tolist() == [*positions] and found.token_ids.tolist() == [tokens[at] for at in positions]
            due = expected[torch.from_numpy(found.positions - 1).long()]
            given = torch.full_like(due, float("nan")).scatter(
                1, torch.from_numpy(found.top_ids).long(), torch.from_numpy(found.top_logprobs)
            )
            torch.testing.assert_close(given, due, rtol=0, atol=3e-5)
            own = torch.from_numpy(found.token_ids).long()[:, None]
            assert torch.equal(torch.from_numpy(found.logprobs)[:, None], given.gather(1, own))
            assert found.ranks.tolist() == (given > given.gather(1, own)).sum(1).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers(name, loaded, driver, reference):
    play, tokens = driver(loaded(name)), prompt(2)
    model = reference(name)
    with torch.no_grad():
        expected = model.generate(torch.tensor([tokens]), max_new_tokens=OUTPUTS, do_sample=False)[0, PROMPT:].tolist()
    assert play.generate(play.admit(tokens), OUTPUTS) == expected


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"logit_bias": ((9, 8.0), (5, 7.5))}, {"sequence_bias": [[[9], 8.0], [[5], 7.5]]}),
        ({"min_tokens": OUTPUTS, "stop_token_ids": tuple(range(99))}, {"min_new_tokens": OUTPUTS, "eos_token_id": [*range(99)]}),
        ({"allowed_token_ids": tuple(range(200, VOCAB))}, {"suppress_tokens": [*range(200)]}),
    ],
    ids=["repetition", "bias", "min_tokens", "allowed"],
)
@pytest.mark.req("SMP-15", "SMP-18", "SMP-19", "SMP-20")
def test_adjusted_greedy_tokens_equal_transformers(ours, theirs, loaded, driver, reference):
    play, tokens = driver(loaded("llama")), prompt(2)
    inputs = torch.tensor([tokens])
    with torch.no_grad():
        expected = (
            reference("llama")
            .generate(
                inputs, attention_mask=torch.ones_like(inputs), pad_token_id=0, max_new_tokens=OUTPUTS, do_sample=False, **theirs
            )[0, PROMPT:]
            .tolist()
        )
    sampling = SamplingParams(max_tokens=OUTPUTS, temperature=0.0, **ours)
    assert play.generate(play.admit(tokens, sampling), OUTPUTS) == expected
    assert play.generate(play.admit(tokens), OUTPUTS) != expected


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "olmo2"])
def test_bfloat16_is_close(name, loaded, driver, reference):
    """Teacher-forced: each position's log probabilities near float32's, and the same choice but for near-ties."""
    play, tokens = driver(loaded(name, "bfloat16")), prompt(3, 80)
    expected = reference_logprobs(reference(name), tokens)
    sequence = play.admit(tokens[:60], ALL_LOGPROBS)
    play.step([(sequence, 59)])
    for position in range(59, 79):
        sequence.tokens = tokens[: position + 1]
        play.runner._requests.rows.token_ids[sequence.row, position] = tokens[position]
        got = by_token(play.step([(sequence, 1)]))
        torch.testing.assert_close(got, expected[position], rtol=0, atol=0.25)
        chosen = int(got.argmax())
        assert expected[position].max() - expected[position, chosen] < 0.1
