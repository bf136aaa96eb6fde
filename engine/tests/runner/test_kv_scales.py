"""Scales of an eight-bit KV cache that a checkpoint brings."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_core_with_runner import SCHEDULER, Engine, requests
from test_model_runner import PARTS
from test_tensor_parallel import ALL_LOGPROBS, alone, on_ranks, prompt, rank_runner  # noqa: F401  a fixture
from torch.nn.functional import scaled_dot_product_attention

from penstock.engine.attention.context import ForwardContext, GroupInputs
from penstock.engine.config import ConfigError
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.shard import Shard
from penstock.engine.quant.kv_scales import KVScales, read_kv_scales
from penstock.kernels.ops import REFERENCE, ops_for
from penstock.kernels.paged_attention.batch import PagedBatch
from penstock.kernels.prepare_kv.reference import Rotary

FACTOR = 2.0**11
"""A power of two: bfloat16 holds a weight times it exactly."""
ATTENTION = "model.layers.{}.self_attn"


def changed(folder, tmp_path, change):
    copy = tmp_path / "changed"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def scaled(*names):
    """A change that adds these, relative to each layer's attention."""

    def change(tensors):
        for layer in (0, 1):
            for name, value in names:
                tensors[f"{ATTENTION.format(layer)}.{name}"] = torch.tensor(value)

    return change


@pytest.mark.parametrize("form", ["best", "reference"])
@pytest.mark.parametrize(("family", "key", "query"), [("llama", "k_proj", "q_proj"), ("qwen3", "k_norm", "q_norm")])
def test_large_keys_and_values_are_stored_as_finely_as_small_ones(family, key, query, form, checkpoint, build_runner, tmp_path):
    """A model whose keys and values are 2,048 times as large, and nothing else differs: with scales of 2,048 the same bits."""

    def enlarge(tensors):
        for name in tensors:
            part = name.split(".")[-2]
            if part in (key, "v_proj"):
                tensors[name] = tensors[name] * FACTOR
            elif part in (query, "o_proj"):
                tensors[name] = tensors[name] / FACTOR

    def enlarge_and_say_so(tensors):
        enlarge(tensors)
        scaled(("k_scale", FACTOR), ("v_scale", FACTOR))(tensors)

    def answers(folder):
        runner = build_runner(folder, dtype="bfloat16", kv_dtype="fp8_e4m3", scheduler=SCHEDULER, form=form)
        return Engine(runner, 1, 100).run(requests(adjusted=False)[:4])

    plain = answers(checkpoint(family))
    assert answers(changed(checkpoint(family), tmp_path / "with", enlarge_and_say_so)) == plain
    assert answers(changed(checkpoint(family), tmp_path / "without", enlarge)) != plain, "what is beyond 448 is cut"


def with_one_large_head(folder, tmp_path, *scales):
    """The model whose second KV head has keys and values that are 2,048 times as large, and nothing else differs."""

    def enlarge(tensors):
        scaled(*scales)(tensors)
        for layer in (0, 1):
            for part, heads, factor in (("k", 2, FACTOR), ("v", 2, FACTOR), ("q", 4, 1 / FACTOR), ("o", 4, 1 / FACTOR)):
                name = f"{ATTENTION.format(layer)}.{part}_proj.weight"
                weight = (tensors[name].T if part == "o" else tensors[name]).unflatten(0, (heads, -1)).clone()
                weight[heads // 2 :] *= factor
                tensors[name] = (weight.flatten(0, 1).T if part == "o" else weight.flatten(0, 1)).contiguous()

    return changed(folder, tmp_path, enlarge)


@pytest.mark.req("Q-18")
@pytest.mark.parametrize("form", ["best", "reference"])
def test_a_large_head_is_stored_as_finely_as_the_others_where_each_has_a_scale(form, checkpoint, build_runner, tmp_path):
    """With scales of 1 and 2,048 the same bits, in the shape that compressed-tensors gives them; with one for both not."""

    def answers(folder):
        runner = build_runner(folder, dtype="bfloat16", kv_dtype="fp8_e4m3", scheduler=SCHEDULER, form=form)
        return Engine(runner, 1, 100).run(requests(adjusted=False)[:4])

    own = [[[1.0]], [[FACTOR]]]
    plain, folder = answers(checkpoint("llama")), checkpoint("llama")
    assert answers(with_one_large_head(folder, tmp_path / "own", ("k_scale", own), ("v_scale", own))) == plain
    assert answers(with_one_large_head(folder, tmp_path / "one", ("k_scale", FACTOR), ("v_scale", FACTOR))) != plain


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_divide_or_replicate_the_heads_use_their_own_scales(
    world,
    checkpoint,
    driver,
    on_ranks,  # noqa: F811
    tmp_path,
):
    def answer(folder):
        def life(group):
            return alone(driver(rank_runner(folder, group, "bfloat16", kv_dtype="fp8_e4m3")), prompt(1, 40), ALL_LOGPROBS, 33)

        return on_ranks(world, life)[-1]

    own = [[[1.0]], [[FACTOR]]]
    folder = with_one_large_head(checkpoint("llama"), tmp_path, ("k_scale", own), ("v_scale", own))
    assert answer(folder).same_bits(answer(checkpoint("llama")))


@pytest.mark.req("Q-21")
@pytest.mark.parametrize("form", ["best", "reference"])
def test_large_keys_and_values_need_no_scales_where_each_row_has_one(form, checkpoint, build_runner, tmp_path):
    """The same model, whose keys and values are beyond what E4M3 holds: in int8 the same bits as those of ordinary ones."""

    def enlarge(tensors):
        for name in tensors:
            if (part := name.split(".")[-2]) in ("k_proj", "v_proj"):
                tensors[name] = tensors[name] * FACTOR
            elif part in ("q_proj", "o_proj"):
                tensors[name] = tensors[name] / FACTOR

    enlarged = changed(checkpoint("llama"), tmp_path, enlarge)
    found = [
        Engine(build_runner(folder, "bfloat16", kv_dtype="int8_per_token_head", scheduler=SCHEDULER, form=form), 1, 100).run(
            requests(adjusted=False)[:3]
        )
        for folder in (checkpoint("llama"), enlarged)
    ]
    assert found[0] == found[1]


@pytest.mark.req("Q-18")
@pytest.mark.parametrize("form", ["best", "reference"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("value_size", "kv_heads"), [(0, 1), (16, 1), (0, 3)])
def test_attention_reads_what_was_stored_times_the_scales_of_its_head(value_size, kv_heads, dtype, form):
    """Against dense attention in float64 over keys and values that were rounded by hand; with latent attention, too."""
    heads, size, n = 2 * kv_heads, 24 if value_size else 16, 21
    torch.manual_seed(3)
    large, own = torch.tensor([900.0, 90.0, 9e4])[:kv_heads, None], torch.tensor([[7.0, 0.7, 700.0], [5.0, 0.3, 900.0]])
    q, (k, v) = torch.randn(n, heads * size), (large * torch.randn(2, n, kv_heads, size)).flatten(2)
    scales = own[:, :kv_heads].contiguous()
    layer = Attention(0, heads, kv_heads, size, 1e-5, 0.0, None, value_size=value_size)
    cache = torch.zeros(3, 1 if value_size else 2, kv_heads, 16, size, dtype=dtype)
    blocks = np.array([[2, 1]], np.int32)
    slots = torch.tensor([(2 if at < 16 else 1) * 16 + at % 16 for at in range(n)])
    batch = PagedBatch(16, np.array([0, n], np.int32), np.array([n], np.int32), blocks)
    rotary = Rotary(torch.ones(n, size // 2), torch.zeros(n, size // 2))  # by no angle
    ops = ops_for("cpu", torch.float32) if form == "best" else REFERENCE
    ctx = ForwardContext(ops, [cache], [GroupInputs(slots, batch)], kv_scales=[scales])
    found = ctx.attend(layer, q, k, k[:, -value_size:] if value_size else v, rotary).view(n, heads, -1)

    def stored(x, scale):
        most = torch.finfo(dtype).max
        rounded = (x.view(n, kv_heads, size) / scale[:, None]).clamp(-most, most).to(dtype)
        return (rounded.double() * scale[:, None]).transpose(0, 1).repeat_interleave(2, 0)

    keys = stored(k, scales[0])
    values = keys[..., -value_size:] if value_size else stored(v, scales[1])
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    expected = scaled_dot_product_attention(q.double().view(n, heads, size).transpose(0, 1), keys, values, seen, scale=1e-5)
    torch.testing.assert_close(found.double(), expected.transpose(0, 1), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    "names",
    [
        [("k_scale", [0.5]), ("v_scale", [0.25])],
        [("attn.k_scale", 0.5), ("attn.v_scale", 0.25)],
        [("k_proj.k_scale", 0.5), ("v_proj.v_scale", 0.25)],
        [("k_proj.output_scale", [0.5]), ("v_proj.output_scale", [0.25])],
        [("qkv_proj.k_scale", 0.5), ("qkv_proj.v_scale", 0.25)],
        [("k_scale", 0.5), ("v_scale", 0.25), ("q_scale", 9.0), ("k_proj.output_scale", 0.5)],
    ],
)
def test_every_name_that_checkpoints_have_for_a_scale_is_known(names, checkpoint, tmp_path):
    if names[0][0].startswith("attn."):
        names = [(f"../{name}", value) for name, value in names]

    def change(tensors):
        for layer in (0, 1):
            for name, value in names:
                full = f"{ATTENTION.format(layer)}.{name}".replace("self_attn.../attn", "attn")
                tensors[full] = torch.tensor(value)

    folder = changed(checkpoint("llama"), tmp_path, change)
    assert read_kv_scales(folder, 2, 3) == [KVScales((0.5,) * 3, (0.25,) * 3)] * 2


def test_one_scale_may_be_for_both_and_a_layer_may_have_none(checkpoint, tmp_path, caplog):
    def change(tensors):
        tensors["model.layers.1.self_attn.kv_scale"] = torch.tensor(0.5)
        tensors["model.layers.7.self_attn.kv_scale"] = torch.tensor(0.5)  # of an MTP layer, say

    with caplog.at_level("WARNING"):
        found = read_kv_scales(changed(checkpoint("llama"), tmp_path, change), 2, 1)
    assert found == [KVScales((1.0,), (1.0,)), KVScales((0.5,), (0.5,))]
    assert "layer 0 has no scales for keys and values; 1.0 is used" in caplog.text


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([("k_scale", 0.0)], r"model.layers.0.self_attn.k_scale is 0: a scale must be a positive number"),
        ([("v_scale", -1.0)], r"model.layers.0.self_attn.v_scale is -1: a scale must be"),
        ([("v_scale", float("nan"))], r"model.layers.0.self_attn.v_scale is nan: a scale must be"),
        ([("k_scale", [1.0, 2.0, 3.0])], r"k_scale has 3 scales: a layer has one, or one for each of its 2 KV heads"),
        ([("k_scale", [[[1.0]], [[0.0]]])], r"model.layers.0.self_attn.k_scale\[1\] is 0: a scale must be a positive number"),
        ([("v_scale", [-2.0, 1.0])], r"model.layers.0.self_attn.v_scale\[0\] is -2: a scale must be"),
        ([("v_scale", [1.0, float("nan")])], r"model.layers.0.self_attn.v_scale\[1\] is nan: a scale must be"),
        ([("k_scale", [1.0, 2.0]), ("kv_scale", 1.0)], r"is (1|2), but .*scale is (1|2): both are the KV cache's scale"),
        ([("k_scale", 1.0), ("kv_scale", 2.0)], r"is (1|2), but .*scale is (1|2): both are the KV cache's scale"),
    ],
)
def test_a_wrong_scale_is_refused_by_its_name(names, message, checkpoint, build_runner, tmp_path):
    folder = changed(checkpoint("llama"), tmp_path, scaled(*names))
    with pytest.raises(ConfigError, match=message):
        build_runner(folder, "bfloat16", kv_dtype="fp8_e4m3")
    build_runner(folder, "bfloat16")  # a cache of the model's dtype needs no scale


def test_new_weights_bring_new_scales_and_wrong_ones_change_nothing(checkpoint, build_runner, tmp_path):
    other = changed(checkpoint("llama"), tmp_path / "other", scaled(("kv_scale", 0.5)))
    wrong = changed(checkpoint("llama"), tmp_path / "wrong", scaled(("kv_scale", 0.0)))
    runner = build_runner(checkpoint("llama"), "bfloat16", kv_dtype="fp8_e4m3")
    assert runner._kv_scales is None
    plain = runner._namespace().identity.scales
    runner.reload_weights(str(other))
    assert runner._kv_scales == [KVScales((0.5, 0.5), (0.5, 0.5))] * 2
    assert len(runner._namespace().identity.scales) == 64 != len(plain), "pages of one are not read by the other"
    with pytest.raises(ConfigError, match="kv_scale is 0"):
        runner.reload_weights(str(wrong))
    assert runner._kv_scales == [KVScales((0.5, 0.5), (0.5, 0.5))] * 2


@pytest.mark.req("Q-19")
def test_pages_of_other_heads_scales_are_not_read(checkpoint, build_runner, tmp_path):
    """Two checkpoints whose scales differ in one head of one layer, and by nothing else."""

    def identity(of_first):
        def change(tensors):
            scaled(("k_scale", [0.5, 0.25]), ("v_scale", 1.0))(tensors)
            tensors[f"{ATTENTION.format(1)}.k_scale"] = torch.tensor(of_first)

        folder = changed(checkpoint("llama"), tmp_path / str(of_first), change)
        return build_runner(folder, "bfloat16", kv_dtype="fp8_e4m3")._namespace().identity.scales

    assert identity([0.5, 0.25]) != identity([0.5, 0.5])


@pytest.mark.parametrize(("world", "heads"), [(1, 4), (2, 4), (4, 2)])
def test_ranks_have_the_scales_of_their_heads(world, heads):
    """Divided, and replicated where there are fewer heads than ranks."""
    whole = KVScales(tuple(range(1, heads + 1)), tuple(range(11, heads + 11)))
    parts = [whole.part(span) for span in (Shard(rank, world).kv_heads(heads) for rank in range(world))]
    every = torch.cat(parts, 1)
    assert every.dtype is torch.float32
    if world > heads:
        assert every.tolist() == [[1, 1, 2, 2], [11, 11, 12, 12]]
    else:
        assert every.tolist() == [list(side) for side in whole]


def test_a_search_for_what_is_not_finite_uses_the_steps_scales(checkpoint, build_runner, driver, tmp_path, monkeypatch):
    folder = changed(checkpoint("llama"), tmp_path, scaled(("k_scale", 0.5), ("v_scale", 0.25)))
    runner, seen, attend = build_runner(folder, kv_dtype="fp8_e4m3"), [], ForwardContext.attend
    monkeypatch.setattr(ForwardContext, "attend", lambda self, *given: seen.append(self.kv_scales) or attend(self, *given))
    PARTS["norm"](runner.model).fill_(float("nan"))
    play = driver(runner)
    assert list(play.step([(play.admit([1, 2, 3]), 3)]).failed) == [0]
    assert len(seen) == 2 * 2 and all(scales is not None and scales[1].tolist() == [[0.5] * 2, [0.25] * 2] for scales in seen)
