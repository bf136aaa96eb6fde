"""Keys and values of another dtype than the model's."""

import msgspec
import pytest
import torch
from test_core_with_runner import SCHEDULER, Engine, requests

from penstock.engine.args import EngineArgs
from penstock.engine.cache.layout import KVLayer, attention_plane
from penstock.engine.cache.pages import kv_dtypes
from penstock.engine.config import ConfigError
from penstock.engine.core.ipc.process import build_executor
from penstock.engine.quant.online import QuantizedLinearMethod

TORCH = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8_per_token_head": torch.int8}
"""What torch calls them, where the names differ."""
SIZES = {"bfloat16": 2, "float32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8_per_token_head": 1 + 4 / 16}
"""Bytes of a number, with its part of a scale of four bytes in rows of 16."""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["best", "reference"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("bfloat16", "fp8_e4m3"),
        ("float32", "fp8_e5m2"),
        ("bfloat16", "int8_per_token_head"),
    ],
)
def test_a_crowd_gets_what_each_gets_alone(checkpoint, build_runner, dtype, kv_dtype, form):
    """Chunked, cached and preempted, with other bytes a token."""
    runner = build_runner(checkpoint("llama"), dtype=dtype, kv_dtype=kv_dtype, scheduler=SCHEDULER, form=form)
    plain = build_runner(checkpoint("llama"), dtype=dtype, scheduler=SCHEDULER, form=form)
    assert {cache.dtype for cache in runner.kv_caches} == {TORCH.get(kv_dtype) or getattr(torch, kv_dtype)}
    assert runner.kv_layout().page_bytes * SIZES[dtype] == plain.kv_layout().page_bytes * SIZES[kv_dtype]
    of_token = [sum(window.kv_bytes_per_token for window in one.config.model.cost.windows) for one in (runner, plain)]
    assert of_token[0] * SIZES[dtype] == of_token[1] * SIZES[kv_dtype], "the cost of a step counts the same bytes"
    assert kv_dtypes(runner._kv_layers) != kv_dtypes(plain._kv_layers), "pages of one are not read by the other"
    assert len(runner._namespace().identity.differences(plain._namespace().identity)) == 1
    wanted = requests(adjusted=False)[:5]
    alone = {}
    for request in wanted:
        alone |= Engine(runner, depth=1, num_blocks=100).run([request])
    crowd = Engine(runner, depth=1, num_blocks=22)
    assert crowd.run(wanted) == alone and crowd.core.stats().preemptions > 0


def test_a_finer_cache_changes_little_and_a_coarser_one_rounds(checkpoint, build_runner):
    """Log-probabilities of one prompt: float32 throughout, and with keys and values in bfloat16."""
    found = {}
    (request,) = [one for one in requests(adjusted=False) if one.index == 1]
    request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=1))
    for kv_dtype in ("auto", "bfloat16", *TORCH):
        engine = Engine(build_runner(checkpoint("llama"), kv_dtype=kv_dtype, scheduler=SCHEDULER), 1, 100)
        engine.run([request])
        found[kv_dtype] = torch.tensor(list(engine.scores[1].values()))
    assert not torch.equal(found["auto"], found["bfloat16"])
    torch.testing.assert_close(found["auto"], found["bfloat16"], rtol=0, atol=0.05)
    errors = {name: (found[name] - found["auto"]).abs().mean() for name in ("bfloat16", *TORCH)}
    assert 4 * errors["bfloat16"] < errors["fp8_e4m3"] < 64 * errors["bfloat16"], "four bits fewer"
    assert errors["int8_per_token_head"] < errors["fp8_e4m3"] / 1.5, "seven bits of magnitude for numbers of one row"
    assert 1.3 * errors["fp8_e4m3"] < errors["fp8_e5m2"] < 4 * errors["fp8_e4m3"], "one bit fewer"


@pytest.mark.req("Q-16")
def test_eight_bits_hold_twice_the_tokens(checkpoint):
    """Of the same memory."""
    model, blocks = str(checkpoint("llama")), {}
    for kv_dtype in ("bfloat16", "fp8", "fp8_e5m2", "int8_per_token_head"):
        config = EngineArgs(model=model, dtype="bfloat16", kv_cache_dtype=kv_dtype, kv_cache_memory_bytes=2**20).config("cpu")
        _, blocks[kv_dtype] = build_executor(config)
    assert 1.9 <= blocks["fp8"] / blocks["bfloat16"] <= 2.1 and blocks["fp8_e5m2"] == blocks["fp8"]
    # The tiny model's heads have 16 numbers. In heads of 128, a scale takes 3 % instead of 25 %.
    assert blocks["int8_per_token_head"] / blocks["bfloat16"] == pytest.approx(2 / (1 + 4 / 16), rel=0.03)
    pages = [KVLayer(planes=(attention_plane(8, size, "int8"),)).offsets(16)[-1] for size in (2 * 128, 128 + 4)]
    assert 1.9 <= pages[0] / pages[1] <= 2.1


def test_a_gpu_keeps_the_models_dtype_or_eight_bits(checkpoint):
    """What else is asked for is refused: see `test_engine_args`."""
    args = {"model": str(checkpoint("llama")), "dtype": "bfloat16"}
    kept = {name: EngineArgs(**args, kv_cache_dtype=name).config("cuda").model.kv_dtype for name in ("bfloat16", "fp8", *TORCH)}
    assert kept == {"bfloat16": "bfloat16", "fp8": "fp8_e4m3"} | {name: name for name in TORCH}


@pytest.mark.req("Q-15")
def test_a_cache_has_one_of_these_dtypes_and_as_a_rule_the_models(checkpoint):
    def stored(asked):
        return EngineArgs(model=str(checkpoint("llama")), dtype="bfloat16", kv_cache_dtype=asked).config("cpu").model.kv_dtype

    assert stored("auto") == "bfloat16" and stored("fp8") == "fp8_e4m3"
    for name in ("bfloat16", "float32", *TORCH):
        assert stored(name) == name
    for other in ("fp8_inc", "fp8_ds_mla", "fp8_per_token_head", "nvfp4", "int4", ""):
        with pytest.raises(
            ConfigError, match=f"kv_cache_dtype: must be auto, bfloat16, .* or int8_per_token_head, not {other!r}"
        ):
            stored(other)


@pytest.mark.req("Q-01")
@pytest.mark.parametrize("weights", [None, "int8_per_channel_weight_only"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", *TORCH])
def test_weights_and_cache_are_separate_choices(checkpoint, build_runner, weights, kv_dtype):
    """Each combination answers; activations keep the model's dtype."""
    runner = build_runner(checkpoint("llama"), "bfloat16", kv_dtype=kv_dtype, quantization=weights, scheduler=SCHEDULER)
    assert len(Engine(runner, 1, 100).run([requests(adjusted=False)[0]])) == 1
    method = runner.model.layers[0].mlp.down_proj._method
    assert isinstance(method, QuantizedLinearMethod) is (weights is not None)
    assert {cache.dtype for cache in runner.kv_caches} == {TORCH.get(kv_dtype) or getattr(torch, kv_dtype)}
    assert runner.model.embed_tokens.weight.dtype is torch.bfloat16


@pytest.mark.req("Q-20")
def test_a_cache_of_eight_bits_without_scales_is_warned_of_once(checkpoint, build_runner, caplog):
    """Not where numbers up to 57,344 fit, nor where each row has a scale."""
    for kv_dtype in ("fp8_e4m3", "bfloat16", "fp8_e5m2", "int8_per_token_head"):
        build_runner(checkpoint("llama"), "bfloat16", kv_dtype=kv_dtype)
    assert caplog.text.count("the checkpoint has no scales for keys and values; 1.0 is used") == 1
