"""A runner's attention: chosen once, refused at the start, and the same tokens whosever it is."""

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from device_runners import FORMS

from penstock.engine.attention.backends.flashinfer import FlashInferBackend
from penstock.engine.attention.backends.phases import AttentionPhases
from penstock.engine.config import ConfigError
from penstock.engine.runner import base
from penstock.engine.runner.model_runner import ModelRunner
from penstock.kernels.paged_attention.triton import paged_attention

STAND_INS = Path(__file__).parents[2] / "attention/stand_ins"


def play(driver, runner) -> list[list[int]]:
    """Prompts side by side, in chunks, and decodes beside them."""
    driven = driver(runner)
    rng = np.random.default_rng(0)
    first, second = (driven.admit(rng.integers(0, 257, length).tolist()) for length in (21, 40))
    driven.step([(first, 21), (second, 9)])
    driven.step([(first, 1), (second, 31)])
    for _ in range(2):
        driven.step([(first, 1), (second, 1)])
    return [first.outputs, second.outputs]


@pytest.mark.req("ATT-02")
def test_attention_is_chosen_once(checkpoint, build_runner, driver, monkeypatch):
    choices, choose = [], base.choose_attention
    monkeypatch.setattr(base, "choose_attention", lambda *asked: choices.append(asked) or choose(*asked))
    runner = build_runner(checkpoint("llama"))
    bound = runner.ops.paged_attention
    play(driver, runner)
    [(needs, *asked)] = choices
    assert (needs.device, needs.head_size, asked) == ("cpu", runner.decoder_config.head_size, [None, None, 1])
    assert runner.attention.decode.name == "torch"
    assert runner.ops.paged_attention is bound


@pytest.mark.req("ATT-03")
def test_an_attention_that_cannot_serve_ends_the_start(loaded):
    config = msgspec.structs.replace(loaded("llama").config, attention_backend="triton")
    with pytest.raises(ConfigError, match=r"--attention-backend triton: .* needs a CUDA device"):
        ModelRunner(config).load()


@pytest.mark.slow
def test_interpreted_kernels_give_the_tokens_of_torch(checkpoint, build_device_runner, loaded, driver):
    forms = FORMS._replace(model=replace(FORMS.model, paged_attention=paged_attention))
    runner = build_device_runner(checkpoint("gemma3"), forms=forms)
    assert play(driver, runner) == play(driver, loaded("gemma3"))


def test_a_library_that_plans_on_the_host_is_told_each_steps_lengths(
    checkpoint, build_device_runner, loaded, driver, monkeypatch
):
    monkeypatch.syspath_prepend(STAND_INS / "flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # noted, so that the import below is forgotten at the end
    monkeypatch.delitem(sys.modules, "flashinfer")
    runner = build_device_runner(checkpoint("gemma3"))
    torch_backend = runner.attention.decode
    assert torch_backend.needs.dtype == torch.float32
    library = FlashInferBackend(torch_backend.needs)
    for decode in (library, torch_backend):
        runner.attention = AttentionPhases(decode, library, 1)
        runner.ops = runner.attention.bind(runner.ops)
        assert play(driver, runner) == play(driver, loaded("gemma3"))
