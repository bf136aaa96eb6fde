"""Towers and projectors give transformers' embeddings, and the decoders inside serve text as they do alone."""

import json
import shutil

import pytest
import safetensors.torch
import torch
from vision_models import IMAGE_TOKEN, SEEING, TOKENS, picture

from penstock.engine.config import ConfigError
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.loading.json_files import read_object
from penstock.engine.models.config import parse_decoder_config
from penstock.engine.multimodal.normalization import normalized
from penstock.engine.multimodal.resize import resized

KINDS = {
    "llava": {},
    "llava-mistral": {"text": "Mistral"},
    "llava-qwen2": {"text": "Qwen2"},
    "llava-class": {"strategy": "full", "layer": -1},
    "llava-first": {"layer": 1, "tie_word_embeddings": True},
    "gemma3": {},
    "qwen2_5_vl": {},
    "qwen2_5_vl-windows": {"vision": {"window_size": 24, "fullatt_block_indexes": [0, 2]}, "tie_word_embeddings": True},
    "gemma3-full": {"sliding_window": 200, "query_pre_attn_scalar": 16, "final_logit_softcapping": 8.0},
}


def family_of(kind: str):
    return SEEING[kind.partition("-")[0]]


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
    found = resized(image, settings.resize)
    pixels = normalized(found.array(), settings.normalization)
    with torch.inference_mode():
        return runner.model.encode_image(torch.from_numpy(pixels))


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
            [expected] = reference.get_image_features(**inputs).pooler_output
        ours = embeddings(runner, image)
        assert ours.shape == expected.shape
        assert ours.shape[1] == 64
        torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)


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
    ("change", "field"),
    [({"do_resize": False}, "do_resize"), ({"do_pan_and_scan": True}, "do_pan_and_scan"), ({"size": 5}, "size")],
)
def test_processors_that_are_not_supported_are_refused_by_their_field(model, tmp_path, change, field):
    path = tmp_path / "other"
    shutil.copytree(model("gemma3"), path)
    (path / "preprocessor_config.json").write_text(json.dumps(change))
    with pytest.raises(ConfigError, match=field):
        read_model_config(path, served_names=())


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
    for wrong, word in (({"mrope_section": [2, 3]}, "mrope_section"), ({"mrope_interleaved": True}, "mrope_interleaved")):
        scaling = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]} | wrong}
        with pytest.raises(ConfigError, match=word):
            parse_decoder_config(text | raw | scaling)
