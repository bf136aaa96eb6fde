"""Logits processors of one's own: when they pass, and whose error theirs is."""

import msgspec
import numpy as np
import pytest
import torch

from penstock.engine.config import ConfigError
from penstock.engine.runner.device.host import HostRuntime
from penstock.engine.runner.sampler.custom import load_processors
from penstock.engine.sampling import SamplingParams

VOCAB = 257


def prompt(seed: int, length: int = 9) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def greedy(**extra) -> SamplingParams:
    return SamplingParams(max_tokens=10, temperature=0.0, extra_args=extra)


@pytest.fixture
def play(loaded, driver, monkeypatch):
    """A driver of a runner that has both processors; `play.favour` and `play.sharpen` are what they saw."""
    return with_processors(loaded("llama"), driver, monkeypatch)


def with_processors(runner, driver, monkeypatch):
    names = ("own_processors:Favour", "own_processors:Sharpen")
    model = msgspec.structs.replace(runner.config.model, logits_processors=names)
    monkeypatch.setattr(runner, "config", msgspec.structs.replace(runner.config, model=model))
    monkeypatch.setattr(runner, "_requests", runner._new_requests())
    play = driver(runner)
    play.favour, play.sharpen = (guarded._processor for guarded in runner._requests.chooser._adjustments._processors)
    return play


@pytest.mark.req("SMP-22")
def test_passes_the_rows_that_ask_and_sees_their_tokens(play):
    plain = play.generate(play.admit(prompt(1)), 4)
    sequence = play.admit(prompt(1), greedy(favour=[7, 1000.0, 2]))
    other = play.admit(prompt(2))
    play.step([(other, 9), (sequence, 9)])
    for _ in range(3):
        play.step([(sequence, 1), (other, 1)])
    assert sequence.outputs == [*plain[:2], 7, 7]
    assert play.favour.calls == [1] * 4


@pytest.mark.req("SMP-22")
def test_an_invariant_one_is_not_called_for_greedy_rows(play):
    random = SamplingParams(max_tokens=10, temperature=1.0, seed=3, extra_args={"sharpen": True}, logprobs=VOCAB)
    work = [(play.admit(prompt(1), greedy(sharpen=True)), 9), (play.admit(prompt(2), greedy(sharpen=True)), 9)]
    play.step(work)
    assert play.sharpen.calls == []
    sequence = play.admit(prompt(3), random)
    chooser = play.runner._requests.chooser
    chooser._mode = "processed_logits"
    sharpened = play.step([(work[0][0], 1), (sequence, 9)]).logprobs
    assert play.sharpen.calls == [[sequence.row]]
    chooser._mode = "raw_logits"
    raw = play.step([(play.admit(prompt(3), random), 9)]).logprobs
    assert np.array_equal(sharpened.top_logprobs[0], 2 * raw.top_logprobs[0])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("raise", "RuntimeError: out of luck"),
        ("nan", "ValueError: apply returned NaN or infinity"),
        ("shape", r"ValueError: apply returned torch.float32 \[1, 256\], not float32 \[1, 257\]"),
        ("admit", "KeyError: 'no such thing'"),
    ],
)
@pytest.mark.req("SMP-22")
def test_what_it_breaks_is_the_error_of_one_request(play, broken, message):
    favour = [7, 1000.0, 0]
    plain = play.generate(play.admit(prompt(3)), 1)
    asks = [greedy(favour=favour), greedy(favour=favour, **{"break": broken}), greedy(favour=[9, 1000.0, 0]), greedy()]
    work = [(play.admit(prompt(at), params), 9) for at, params in enumerate(asks)]
    result = play.step(work)
    assert list(result.failed) == [1] and result.counts.tolist() == [1, 0, 1, 1]
    with pytest.raises(AssertionError, match=f"own_processors:Favour failed: {message}"):
        raise AssertionError(result.failed[1])
    assert [sequence.outputs for sequence, _ in work] == [[7], [], [9], plain]
    # The row's next request has nothing to do with it.
    play.release(work[1][0])
    again = play.admit(prompt(3), greedy(favour=favour))
    assert again.row == work[1][0].row
    assert play.generate(again, 2) == [7, 7]


@pytest.mark.req("SMP-03")
def test_sees_float32_whatever_the_model_computes_in(loaded, driver, monkeypatch):
    play = with_processors(loaded("llama", "bfloat16"), driver, monkeypatch)
    play.generate(play.admit(prompt(1), greedy(favour=[7, 1.0, 0])), 2)
    assert play.favour.dtypes == {torch.float32}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("own_processors.Favour", "expected module:Class"),
        ("no_such_module:Favour", "ModuleNotFoundError"),
        ("own_processors:Nothing", "has no attribute 'Nothing'"),
        ("own_processors:Unfinished", "own_processors:Unfinished lacks apply"),
        ("own_processors:Unmade", "OSError: its file is missing"),
    ],
)
def test_refuses_by_name_what_cannot_be_had(name, sentence):
    with pytest.raises(ConfigError, match=f"--logits-processors .*{sentence}"):
        load_processors([name], HostRuntime(), 4, VOCAB)
