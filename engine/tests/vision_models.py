"""Tiny random checkpoints that read images, and images for them."""

import base64
import io
import json
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image

IMAGE_TOKEN = 250
VOCAB = 257
SIZE, PATCH = 30, 6
TOKENS = (SIZE // PATCH) ** 2
"""Of an image."""
LONGEST = 320


def make_llava(
    folder: Path, text: str = "Llama", strategy: str = "default", layer: int = -2, image_token: int = IMAGE_TOKEN, **fields
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
        hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=3, image_size=SIZE, patch_size=PATCH
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=language,
        image_token_index=image_token,
        image_seq_length=TOKENS + (strategy == "full"),
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
    processor = {"size": {"shortest_edge": SIZE}, "crop_size": {"height": SIZE, "width": SIZE}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def data_url(image: Image.Image) -> str:
    """As a client sends it."""
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def picture(seed: int, width: int = 40, height: int = 50) -> Image.Image:
    """An image of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))
