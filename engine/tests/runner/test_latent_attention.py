"""Models with latent attention: what the cache holds of a token, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, LATENT

from penstock.engine.config import ConfigError
from penstock.engine.models.build import Build
from penstock.engine.models.config import parse_decoder_config
from penstock.engine.models.layers.head_linear import HeadLinear
from penstock.engine.models.layers.linear_method import UnquantizedLinearMethod
from penstock.engine.models.layers.shard import Shard
from penstock.engine.parallel.sizes import check_sizes
from penstock.engine.sampling import SamplingParams
from penstock.kernels.ops import REFERENCE

FILE = "model.safetensors"


def config_of(path: Path) -> dict:
    return json.loads((path / "config.json").read_text())


@pytest.mark.req("ATT-21")
@pytest.mark.parametrize("name", LATENT)
def test_the_cache_holds_the_latent_and_one_rotated_key_of_each_token(name, loaded):
    runner, fields = loaded(name), CONFIGS[name][1]
    values = fields["kv_lora_rank"] + fields["qk_rope_head_dim"]
    layout, layers = runner.kv_layout(), fields["num_hidden_layers"]
    assert all(cache[0].numel() == 16 * values for cache in runner.kv_caches) and len(runner.kv_caches) == layers
    assert layout.page_bytes == layout.num_slots * 16 * values * 4  # float32; these sizes need no padding
    expanded = fields["num_attention_heads"] * (2 * fields["qk_nope_head_dim"])
    assert values < expanded
    cost = runner.config.model.cost
    assert sum(window.kv_bytes_per_token for window in cost.windows) == layers * values * 4


def test_a_tokens_slot_holds_what_the_formula_says(loaded, driver):
    """The normed latent, behind the rotated key: in the first layer, computed by hand from the embedding."""
    name = "deepseek-v2"
    runner = loaded(name)
    play, tokens = driver(runner), [5, 6, 7]
    sequence = play.admit(tokens, SamplingParams(max_tokens=2, temperature=0.0))
    play.step([(sequence, 3)])
    weights = load_file(runner.config.model.path / FILE)
    fields, layer = CONFIGS[name][1], "model.layers.0"
    rank = fields["kv_lora_rank"]

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    hidden = weights["model.embed_tokens.weight"][tokens]
    hidden = norm(hidden, weights[f"{layer}.input_layernorm.weight"], runner.decoder_config.rms_norm_eps)
    both = hidden @ weights[f"{layer}.self_attn.kv_a_proj_with_mqa.weight"].T
    expected = norm(both[:, :rank], weights[f"{layer}.self_attn.kv_a_layernorm.weight"], 1e-6)
    held = runner.kv_caches[0][sequence.blocks[0], 0, 0, :3]
    torch.testing.assert_close(held[:, -rank:], expected, rtol=1e-4, atol=1e-5)
    # Position 0 does not rotate; neighbouring elements have moved half the size apart.
    turned = both[0, rank:]
    torch.testing.assert_close(held[0, : len(turned)], torch.cat((turned[0::2], turned[1::2])), rtol=1e-4, atol=1e-5)


def test_the_layer_that_predicts_further_tokens_is_left_out(checkpoint, build_runner, loaded, driver, tmp_path):
    path = tmp_path / "further"
    shutil.copytree(checkpoint("deepseek-v3"), path)
    tensors = load_file(path / FILE)
    tensors |= {"model.layers.3.eh_proj.weight": torch.zeros(64, 128), "model.layers.3.self_attn.q_a_proj.weight": torch.zeros(1)}
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    outputs = [play.generate(play.admit([5, 6, 7]), 4) for play in (driver(build_runner(path)), driver(loaded("deepseek-v3")))]
    assert outputs[0] == outputs[1]


def test_weights_of_heads_are_filled_again_in_place():
    """As on a device, which reloads weights into the model that it has: recorded graphs keep the addresses."""
    linear = HeadLinear(2, 3, 4, Build(REFERENCE, UnquantizedLinearMethod, torch.float32, 64, Shard()))
    x, found, addresses = torch.ones(1, 2, 3), [], set()
    for value in (1.0, 2.0):
        linear.weight.fill_(value)
        linear.finish()
        addresses.add(linear.weight.data_ptr())
        found.append(linear(x))
    assert torch.equal(found[1], 2 * found[0]) and len(addresses) == 1


def test_ranks_among_which_the_heads_cannot_be_divided_are_refused(checkpoint):
    raw = config_of(checkpoint("deepseek-v3"))
    with pytest.raises(ConfigError, match=r"size 2: num_attention_heads 3 .* possible sizes: 1, 3$"):
        check_sizes("DeepseekV3ForCausalLM", parse_decoder_config(raw), 2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 does not rotate whole pairs"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be a positive whole number"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported here"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"n_group": 3}, "cannot be divided into 3 groups"),
    ],
)
def test_what_is_not_supported_is_refused_by_field(change, sentence, checkpoint):
    with pytest.raises(ConfigError, match=sentence):
        parse_decoder_config(config_of(checkpoint("deepseek-v3")) | change)


def test_weights_of_a_softmax_that_are_divided_by_their_sum_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="norm_topk_prob is set"):
        parse_decoder_config(config_of(checkpoint("deepseek-v2")) | {"norm_topk_prob": True})


def test_greedy_routing_has_no_groups(checkpoint):
    experts = parse_decoder_config(config_of(checkpoint("deepseek-v2")) | {"topk_method": "greedy"}).experts
    assert experts is not None and (experts.groups, experts.top_groups) == (1, 1)


def test_the_scores_are_scaled_by_what_yarn_says_of_all_dimensions(checkpoint):
    raw = config_of(checkpoint("deepseek-v3"))
    rope = raw["rope_parameters"]
    factors = [
        parse_decoder_config(raw | {"rope_parameters": rope | {"mscale_all_dim": over}}).attention_scale * 32**0.5
        for over in (0.0, 1.0)
    ]
    assert factors == pytest.approx([1.0, (0.1 * torch.tensor(4.0).log().item() + 1) ** 2])
