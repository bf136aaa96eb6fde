"""Towers and projectors give transformers' embeddings, and the decoders inside serve text as they do alone."""

import json
import random
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.utils.flop_counter import FlopCounterMode
from vision_models import IMAGE_TOKEN, QWEN3_MOE, SEEING, TOKENS, picture

from penstock.engine.config import ConfigError
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.loading.json_files import read_object
from penstock.engine.models.config import parse_decoder_config
from penstock.engine.models.vision.config import LLAVA_NEXT_RESOLUTIONS
from penstock.engine.multimodal.resize import resized
from penstock.engine.runner.images import whole
from penstock.prompt.image_size import TiledSize

KINDS = {
    "llava": {},
    "llava-mistral": {"text": "Mistral"},
    "llava-qwen2": {"text": "Qwen2"},
    "llava-class": {"strategy": "full", "layer": -1},
    "llava-first": {"layer": 1, "tie_word_embeddings": True},
    "llava_next": {},
    "llava_next-llama": {"text": "Llama", "layer": -1},
    "gemma3": {},
    "qwen2_5_vl": {},
    "qwen2_5_vl-windows": {"vision": {"window_size": 24, "fullatt_block_indexes": [0, 2]}, "tie_word_embeddings": True},
    "qwen3_vl": {},
    "qwen3_vl-last": {"vision": {"num_position_embeddings": 81, "deepstack_visual_indexes": [2]}, "tie_word_embeddings": True},
    "qwen3_vl_moe": {},
    "gemma3-full": {"sliding_window": 200, "query_pre_attn_scalar": 16, "final_logit_softcapping": 8.0},
}


def family_of(kind: str):
    return QWEN3_MOE if kind == "qwen3_vl_moe" else SEEING[kind.partition("-")[0]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = {}

    def make(kind: str):
        if kind not in made:
            made[kind] = family_of(kind).make(tmp_path_factory.mktemp("models") / kind, **KINDS[kind])
        return made[kind]

    return make


def embeddings(runner, image):
    settings = runner.config.model.images
    pixels = resized(image, settings.resize)
    with torch.inference_mode():
        found = whole(runner._images.encoding(pixels))
    assert len(found) == settings.tokens_of(pixels) <= settings.tokens
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_those_of_transformers(model, build_runner, kind):
    path = model(kind)
    runner, reference = build_runner(path), family_of(kind).reference(path)
    processor = family_of(kind).processor(path)
    for seed, size in enumerate([(40, 50), (30, 30), (200, 31), (9, 90)]):
        image = picture(seed, *size)
        inputs = dict(processor(image, return_tensors="pt"))
        inputs.pop("num_crops", None)
        with torch.inference_mode():
            found = reference.get_image_features(**inputs)
        [expected] = found.pooler_output
        deep = getattr(found, "deepstack_features", None) or []
        expected = torch.cat([expected, *(feature for [feature] in deep)], dim=-1)
        ours = embeddings(runner, image)
        assert ours.shape == expected.shape
        assert ours.shape[1] == 64 * (1 + len(deep))
        torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", ["llava-class", "gemma3", "qwen2_5_vl", "qwen3_vl"])
def test_the_cost_of_a_tower_is_what_its_products_take(model, kind):
    """As torch counts them, but for patches and projectors, which weigh little in real towers."""
    path, family = model(kind), family_of(kind)
    config, reference = read_model_config(path, served_names=(), dtype="float32"), family.reference(path)
    reference.set_attn_implementation("eager")
    image = picture(0, 200, 150)
    inputs = dict(family.processor(path)(image, return_tensors="pt"))
    inputs.pop("num_crops", None)
    with torch.inference_mode(), FlopCounterMode(display=False) as tower:
        reference.get_image_features(**inputs)
    counts = tower.get_flop_counts()
    outside = (".patch_embedding", ".patch_embed", "projector")
    left_out = sum(sum(counts[name].values()) for name in counts if name.endswith(outside))
    pixels = resized(image, config.images.resize)
    cost = config.images.cost.tokens(pixels.height * pixels.width) * config.cost.linear_flops_per_token
    assert cost == pytest.approx(tower.get_total_flops() - left_out, rel=0.15)


@pytest.mark.parametrize("kind", KINDS)
def test_text_alone_has_the_tokens_of_transformers(model, build_runner, driver, kind):
    path = model(kind)
    runner, reference = build_runner(path), family_of(kind).reference(path)
    tokens = [(7 * at) % IMAGE_TOKEN for at in range(40)]
    play = driver(runner)
    outputs = play.generate(play.admit(tokens), 6)
    with torch.inference_mode():
        prompt = family_of(kind).inputs(None, [], tokens)
        expected = reference.generate(**prompt, max_new_tokens=6, do_sample=False)[0, len(tokens) :].tolist()
    assert outputs == expected


@pytest.mark.parametrize("kind", ["llava", "gemma3"])
def test_towers_under_their_old_name_are_read(model, build_runner, tmp_path, kind):
    path = tmp_path / "old"
    shutil.copytree(model(kind), path)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    renamed["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(TOKENS + 1)[None]
    safetensors.torch.save_file(renamed, path / "model.safetensors")
    image = picture(0)
    expected = embeddings(build_runner(model(kind)), image)
    assert torch.equal(embeddings(build_runner(path), image), expected)


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        ("llava", {"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
        ("llava", {"vision_feature_layer": -9}, "vision_feature_layer"),
        ("llava", {"vision_feature_select_strategy": "some"}, "vision_feature_select_strategy"),
        ("llava", {"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ("llava", {"vision_config": None}, "vision_config"),
        ("llava", {"vision_config": {"model_type": "siglip_vision_model"}}, "siglip_vision_model"),
        ("llava", {"vision_config": {"hidden_act": "relu"}}, "hidden_act"),
        ("llava", {"vision_config": {"num_attention_heads": 5}}, "hidden_size"),
        ("llava", {"text_config": {"model_type": "opt"}}, "opt"),
        ("llava", {"text_config": None}, "text_config"),
        (
            "llava_next",
            {"vision_feature_select_strategy": "full"},
            "vision_feature_select_strategy 'full' is not supported for tiles",
        ),
        (
            "llava_next",
            {"image_grid_pinpoints": [[12, 24], [13, 24]]},
            r"image_grid_pinpoints .* multiples of 12, not \[13, 24\]",
        ),
        ("llava_next", {"image_grid_pinpoints": "(1x1)"}, "image_grid_pinpoints"),
        ("llava_next", {"vision_config": {"image_size": 13, "patch_size": 6}}, "image_size 13 is no multiple of patch_size 6"),
        ("qwen3_vl", {"vision_config": {"num_position_embeddings": 26}}, "num_position_embeddings 26 is no square"),
        ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [1, 0]}}, "deepstack_visual_indexes"),
        ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [27]}}, "deepstack_visual_indexes"),
        ("qwen2_5_vl", {"vision_config": None}, "vision_config"),
        ("qwen2_5_vl", {"vision_config": {"hidden_act": "gelu"}}, "hidden_act"),
        ("qwen2_5_vl", {"vision_config": {"num_heads": 17}}, "hidden_size"),
        ("qwen2_5_vl", {"vision_config": {"window_size": 14}}, "window_size"),
        ("qwen2_5_vl", {"vision_config": {"fullatt_block_indexes": 7}}, "fullatt_block_indexes"),
        ("gemma3", {"vision_config": {"model_type": "clip_vision_model"}}, "clip_vision_model"),
        ("gemma3", {"mm_tokens_per_image": 8}, "mm_tokens_per_image"),
        ("gemma3", {"mm_tokens_per_image": 16}, "mm_tokens_per_image"),
        ("gemma3", {"text_config": {"model_type": "llama"}}, "text_config.model_type"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_field(model, tmp_path, kind, change, field):
    raw = json.loads((model(kind) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ConfigError, match=field):
        read_model_config(tmp_path, served_names=(), load_format="dummy")


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        ("gemma3", {"do_resize": False}, "do_resize"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ("gemma3", {"size": 5}, "size"),
        ("llava_next", {"do_pad": False}, "do_pad"),
        ("llava_next", {"size": 24, "crop_size": 12}, "size 24 is not that of a tile, 12"),
        ("llava_next", {"size": 12, "crop_size": 12, "image_grid_pinpoints": [[12, 12]]}, "image_grid_pinpoints"),
        ("llava_next", {}, "size 336 and crop_size 336 do not give"),
    ],
)
def test_processors_that_are_not_supported_are_refused_by_their_field(model, tmp_path, kind, change, field):
    path = tmp_path / "other"
    shutil.copytree(model(kind), path)
    (path / "preprocessor_config.json").write_text(json.dumps(change))
    with pytest.raises(ConfigError, match=field):
        read_model_config(path, served_names=())


def test_resolutions_and_numbers_of_tokens_are_those_of_transformers():
    """Of images from 1 x 200 to 4,000 pixels, with the resolutions of the published checkpoints."""
    from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
    from transformers.image_utils import ChannelDimension
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    size, draw = TiledSize(tile=336, side=24, resolutions=LLAVA_NEXT_RESOLUTIONS), random.Random(0)
    processor = SimpleNamespace(patch_size=14, num_additional_image_tokens=0, image_processor=SimpleNamespace())
    processor.image_processor.image_grid_pinpoints = [list(each) for each in LLAVA_NEXT_RESOLUTIONS]
    processor._get_unpadded_features = partial(LlavaNextProcessor._get_unpadded_features, processor)
    sizes = [(1, 200), (200, 1), (336, 336), (1, 1), *((draw.randint(20, 4000), draw.randint(20, 4000)) for _ in range(3000))]
    seen = set()
    for height, width in sizes:
        best = select_best_resolution((height, width), LLAVA_NEXT_RESOLUTIONS)
        assert size.resolution(height, width) == best
        seen.add(best)
        image = np.empty((height, width, 1), np.uint8)
        assert size.resized(height, width) == get_patch_output_size(image, best, ChannelDimension.LAST)
        tokens = LlavaNextProcessor._get_number_of_features(processor, height, width, 336, 336)
        assert size.tokens(height, width) == tokens <= size.most_tokens
    assert seen == set(LLAVA_NEXT_RESOLUTIONS) and size.most_tokens == 576 + 48 * 49


def test_fields_that_a_checkpoint_leaves_out_are_those_of_transformers(tmp_path):
    raw = {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
        "vision_config": {"model_type": "clip_vision_model"},
        "torch_dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = read_model_config(tmp_path, served_names=(), load_format="dummy")
    assert (model.max_model_len, model.vocab_size, model.dtype, model.eos_token_ids) == (4096, 32064, "float16", (2,))


def test_fields_among_those_of_the_model_are_the_decoders(model, tmp_path):
    """As Qwen2.5-VL's checkpoints were written before transformers 5."""
    raw = json.loads((model("qwen2_5_vl") / "config.json").read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    (tmp_path / "config.json").write_text(json.dumps(text | raw))
    flat, nested = (parse_decoder_config(read_object(path / "config.json")) for path in (tmp_path, model("qwen2_5_vl")))
    assert flat == nested
    assert flat.ropes[0].sections == (2, 3, 3)
    for wrong, word in (({"mrope_section": [2, 3]}, "mrope_section"), ({"mrope_interleaved": True}, "fewer pairs for time")):
        scaling = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]} | wrong}
        with pytest.raises(ConfigError, match=word):
            parse_decoder_config(text | raw | scaling)
