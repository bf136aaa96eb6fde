"""Towers and projectors give transformers' embeddings, and the decoders inside serve text as they do alone."""

import json
import shutil

import pytest
import safetensors.torch
import torch
import transformers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from vision_models import IMAGE_TOKEN, TOKENS, make_llava, picture

from penstock.engine.config import ConfigError
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.multimodal.clip import clip_pixels
from penstock.engine.multimodal.normalization import normalized

KINDS = {
    "llava": {},
    "llava-mistral": {"text": "Mistral"},
    "llava-qwen2": {"text": "Qwen2"},
    "llava-class": {"strategy": "full", "layer": -1},
    "llava-first": {"layer": 1, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    made = {}

    def make(kind: str):
        if kind not in made:
            made[kind] = make_llava(tmp_path_factory.mktemp("models") / kind, **KINDS[kind])
        return made[kind]

    return make


def embeddings(runner, image):
    settings = runner.config.model.images
    pixels = normalized(clip_pixels(image, settings.clip).array(), settings.normalization)
    with torch.inference_mode():
        return runner.model.encode_image(torch.from_numpy(pixels))


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_those_of_transformers(llava, build_runner, kind):
    path = llava(kind)
    runner = build_runner(path)
    reference = transformers.LlavaForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    processor = CLIPImageProcessorPil.from_pretrained(path)
    for seed, size in enumerate([(40, 50), (30, 30), (200, 31)]):
        image = picture(seed, *size)
        with torch.inference_mode():
            pixels = processor(image, return_tensors="pt")["pixel_values"]
            [expected] = reference.get_image_features(pixel_values=pixels).pooler_output
        ours = embeddings(runner, image)
        assert ours.shape == (TOKENS + (kind == "llava-class"), 64)
        torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_text_alone_has_the_tokens_of_transformers(llava, build_runner, driver, kind):
    path = llava(kind)
    runner = build_runner(path)
    reference = transformers.LlavaForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    tokens = [(7 * at) % IMAGE_TOKEN for at in range(40)]
    play = driver(runner)
    outputs = play.generate(play.admit(tokens), 6)
    with torch.inference_mode():
        expected = reference.generate(torch.tensor([tokens]), max_new_tokens=6, do_sample=False)[0, len(tokens) :].tolist()
    assert outputs == expected


def test_towers_under_their_old_name_are_read(llava, build_runner, tmp_path):
    path = tmp_path / "old"
    shutil.copytree(llava("llava"), path)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    renamed["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(TOKENS + 1)[None]
    safetensors.torch.save_file(renamed, path / "model.safetensors")
    image = picture(0)
    expected = embeddings(build_runner(llava("llava")), image)
    assert torch.equal(embeddings(build_runner(path), image), expected)


def test_what_is_not_supported_is_refused_by_its_field(llava, tmp_path):
    for change, field in (
        ({"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
        ({"vision_feature_layer": -9}, "vision_feature_layer"),
        ({"vision_feature_select_strategy": "some"}, "vision_feature_select_strategy"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ({"vision_config": None}, "vision_config"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "siglip_vision_model"),
        ({"vision_config": {"hidden_act": "relu"}}, "hidden_act"),
        ({"vision_config": {"num_attention_heads": 5}}, "hidden_size"),
        ({"text_config": {"model_type": "opt"}}, "opt"),
        ({"text_config": None}, "text_config"),
    ):
        raw = json.loads((llava("llava") / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(ConfigError, match=field):
            read_model_config(tmp_path, served_names=(), load_format="dummy")


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
