"""Tiny random checkpoints that read images, and images for them."""

import base64
import io
import json
import shutil
import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

IMAGE_TOKEN = 250
VOCAB = 257
SIZE, PATCH = 30, 6
TOKENS = (SIZE // PATCH) ** 2
"""Of an image."""
LONGEST = 320


def make_llava(
    folder: Path,
    text: str = "Llama",
    strategy: str = "default",
    layer: int = -2,
    image_token: int = IMAGE_TOKEN,
    size: int = SIZE,
    **fields,
) -> Path:
    """Saves a LLaVA 1.5 with random weights."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "initializer_range": 0.2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    language = getattr(transformers, f"{text}Config")(
        **{"vocab_size": VOCAB, "max_position_embeddings": LONGEST, "eos_token_id": None, "bos_token_id": None}
        | sizes
        | heads
        | fields
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=3, image_size=size, patch_size=PATCH
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=language,
        image_token_index=image_token,
        image_seq_length=(size // PATCH) ** 2 + (strategy == "full"),
        vision_feature_select_strategy=strategy,
        vision_feature_layer=layer,
    )
    torch.manual_seed(zlib.crc32(folder.name.encode()))
    model = transformers.LlavaForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
        elif "vision_tower" in name or "projector" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder)
    processor = {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


TILE = 12
NEXT_RESOLUTIONS = [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE], [3 * TILE, TILE]]


def make_llava_next(folder: Path, text: str = "Mistral", **fields) -> Path:
    """Saves a LLaVA-NeXT with random weights; a tile has four embeddings."""
    import transformers

    make_llava(folder, text, size=TILE, **fields)
    config = transformers.LlavaNextConfig(
        **{name: json.loads((folder / "config.json").read_text())[name] for name in ("vision_config", "text_config")},
        image_token_index=IMAGE_TOKEN,
        image_grid_pinpoints=NEXT_RESOLUTIONS,
    )
    torch.manual_seed(zlib.crc32(folder.name.encode()))
    model = transformers.LlavaNextForConditionalGeneration(config)
    known = transformers.LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).state_dict()
    left = model.load_state_dict(known, strict=False)
    assert left.missing_keys == ["model.image_newline"] and not left.unexpected_keys
    torch.nn.init.normal_(model.model.image_newline, 0.0, 0.5)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | {"image_grid_pinpoints": NEXT_RESOLUTIONS}))
    return folder


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def with_tokenizer(folder: Path, tokenizer_files: Path) -> Path:
    """A LLaVA with a tokenizer and a chat template, to be asked over HTTP."""
    tokenizer = Tokenizer.from_file(str(tokenizer_files / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    size = tokenizer.get_vocab_size()
    make_llava(folder, vocab_size=size, image_token=size - 1, max_position_embeddings=1024)
    shutil.copy(tokenizer_files / "tokenizer_config.json", folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


GEMMA_SIZE, GEMMA_TOKENS = 24, 9
BEGIN_TOKEN, END_TOKEN = 251, 252


def make_gemma3(folder: Path, image_token: int = IMAGE_TOKEN, begin: int = BEGIN_TOKEN, end: int = END_TOKEN, **fields) -> Path:
    """Saves a Gemma 3 with random weights, whose images are longer than its windows."""
    import transformers

    text = {"vocab_size": VOCAB, "max_position_embeddings": LONGEST, "eos_token_id": None, "bos_token_id": None, "head_dim": 16}
    sizes = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4, "initializer_range": 0.2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 7, "sliding_window_pattern": 2}
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=3, image_size=GEMMA_SIZE, patch_size=4
        ),
        text_config=transformers.Gemma3TextConfig(**text | sizes | heads | fields),
        mm_tokens_per_image=GEMMA_TOKENS,
        image_token_index=image_token,
        boi_token_index=begin,
        eoi_token_index=end,
    )
    torch.manual_seed(zlib.crc32(folder.name.encode()))
    model = transformers.Gemma3ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
        elif "vision_tower" in name or "projector" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
        elif "embed_tokens" in name:  # small, so that answers depend on more than the last token
            torch.nn.init.normal_(parameter, 0.0, 0.05)
    model.save_pretrained(folder)
    processor = {"size": {"height": GEMMA_SIZE, "width": GEMMA_SIZE}, "image_seq_length": GEMMA_TOKENS, "do_pan_and_scan": None}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


QWEN_PATCH = 4


def make_qwen(folder: Path, image_token: int = IMAGE_TOKEN, vision: dict | None = None, **fields) -> Path:
    """Saves a Qwen2.5-VL with random weights; each embedding stands for 8 x 8 pixels."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "initializer_range": 0.2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = {"vocab_size": VOCAB, "max_position_embeddings": LONGEST, "eos_token_id": None, "bos_token_id": None}
    shape = {"hidden_size": 48, "intermediate_size": 80, "depth": 3, "num_heads": 3, "patch_size": QWEN_PATCH}
    windows = {"window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 64}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text | sizes | heads | {"rope_parameters": rope} | fields,
        vision_config=shape | windows | (vision or {}),
        image_token_id=image_token,
    )
    torch.manual_seed(zlib.crc32(folder.name.encode()))
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name or "ln_q" in name:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
        elif "visual" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder)
    processor = {"min_pixels": 256, "max_pixels": 1280, "patch_size": QWEN_PATCH, "merge_size": 2, "temporal_patch_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def make_qwen3(folder: Path, image_token: int = IMAGE_TOKEN, vision: dict | None = None, kind: str = "Qwen3VL", **fields) -> Path:
    """Saves a Qwen3-VL with random weights; each embedding stands for 8 x 8 pixels."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "initializer_range": 0.2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
    rope = {"rope_type": "default", "mrope_section": [6, 3, 3], "mrope_interleaved": True, "rope_theta": 10000.0}
    text = {"vocab_size": VOCAB, "max_position_embeddings": LONGEST, "eos_token_id": None, "bos_token_id": None}
    shape = {"hidden_size": 48, "intermediate_size": 80, "depth": 3, "num_heads": 3, "patch_size": QWEN_PATCH}
    own = {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1], "out_hidden_size": 64}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text | sizes | heads | {"rope_parameters": rope} | fields,
        vision_config=shape | own | (vision or {}),
        image_token_id=image_token,
        tie_word_embeddings=bool(fields.get("tie_word_embeddings")),
    )
    torch.manual_seed(zlib.crc32(folder.name.encode()))
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
        elif "visual" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder)
    processor = {"min_pixels": 256, "max_pixels": 1280, "patch_size": QWEN_PATCH, "merge_size": 2, "temporal_patch_size": 2}
    processor |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def make_qwen3_moe(folder: Path, **fields) -> Path:
    """Saves a Qwen3-VL with experts and random weights."""
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    return make_qwen3(folder, kind="Qwen3VLMoe", **experts | fields)


class Seeing(NamedTuple):
    """A family, and what it is compared with."""

    make: Callable[..., Path]
    model: str
    """transformers' class."""
    image_processor: tuple[str, str]
    """transformers' module and class."""
    tokens: int
    """Of an image; 0: that depends on its size."""

    def picture(self, seed: int) -> Image.Image:
        """An image of noise, of a size of its own where that makes a difference."""
        return picture(seed) if self.tokens else picture(seed, 17 + 10 * (seed % 3), 60 - 12 * (seed % 4))

    def reference(self, path: Path) -> Any:
        """transformers' model, in float32."""
        import transformers

        return getattr(transformers, self.model).from_pretrained(path, dtype=torch.float32).eval()

    def processor(self, path: Path) -> Any:
        """transformers' image processor by Pillow."""
        module, name = self.image_processor
        return getattr(import_module(f"transformers.models.{module}"), name).from_pretrained(path)

    def inputs(self, processor: Any, images: list[Image.Image], token_ids: list[int], image_token: int = IMAGE_TOKEN) -> dict:
        """What transformers' model takes for a prompt with its images."""
        ids = torch.tensor([token_ids])
        text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # token 0 is no padding
        if not images:
            return text
        found = dict(processor(images, return_tensors="pt"))
        found.pop("num_crops", None)
        if self.make is make_gemma3:
            found["token_type_ids"] = (ids == image_token).long()
        if self.make in (make_qwen, make_qwen3, make_qwen3_moe):
            found["mm_token_type_ids"] = (ids == image_token).long()
        return text | found


SEEING = {
    "llava": Seeing(
        make_llava, "LlavaForConditionalGeneration", ("clip.image_processing_pil_clip", "CLIPImageProcessorPil"), TOKENS
    ),
    "llava_next": Seeing(
        make_llava_next,
        "LlavaNextForConditionalGeneration",
        ("llava_next.image_processing_pil_llava_next", "LlavaNextImageProcessorPil"),
        0,
    ),
    "gemma3": Seeing(
        make_gemma3,
        "Gemma3ForConditionalGeneration",
        ("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil"),
        GEMMA_TOKENS,
    ),
    "qwen2_5_vl": Seeing(
        make_qwen,
        "Qwen2_5_VLForConditionalGeneration",
        ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
        0,
    ),
    "qwen3_vl": Seeing(
        make_qwen3,
        "Qwen3VLForConditionalGeneration",
        ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
        0,
    ),
}


QWEN3_MOE = SEEING["qwen3_vl"]._replace(make=make_qwen3_moe, model="Qwen3VLMoeForConditionalGeneration")


def data_url(image: Image.Image) -> str:
    """As a client sends it."""
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def picture(seed: int, width: int = 40, height: int = 50) -> Image.Image:
    """An image of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))
