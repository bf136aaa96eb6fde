"""Makes tiny quantized checkpoints: by compressed-tensors itself, or packed by hand from the formats' descriptions."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LATENT_LAYERS = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", *LAYERS[3:])
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, torch.Tensor]


def rewritten(
    source: Path,
    target: Path,
    config: dict,
    pack: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]],
    layers: Sequence[str] = LAYERS,
) -> Path:
    """Packs a checkpoint's layers.

    Args:
        source: A folder in float32.
        target: Where the quantized one goes; the same weights in float32 go beside it, as `NAME-float`.
        config: `quantization_config`.
        layers: Last parts of the names of what is quantized.
        pack: A weight → its stored tensors by the last part of their names, and what they stand for.

    Returns:
        The folder with the weights in float32.
    """
    plain = target.with_name(f"{target.name}-float")
    for folder in (target, plain):
        shutil.copytree(source, folder)
    stored, floats = Tensors(), Tensors()
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith(tuple(f".{layer}.weight" for layer in layers)):
            packed, floats[name] = pack(tensor)
            stored |= {f"{name.removesuffix('weight')}{kind}": value.contiguous() for kind, value in packed.items()}
        else:
            stored[name] = floats[name] = tensor
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    save_file(floats, plain / "model.safetensors", {"format": "pt"})
    set_quantization(target, config)
    return plain


def one_by_one(source: Path, target: Path) -> None:
    """Copies a Mixtral that has one tensor for all experts; in the copy each has its own `w1`, `w2` and `w3`."""
    shutil.copytree(source, target)
    tensors = Tensors()
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".experts." not in name or tensor.ndim != 3:
            tensors[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            stem = f"{name.rpartition('.')[0]}.{expert}"
            if name.endswith("gate_up_proj"):
                tensors[f"{stem}.w1.weight"], tensors[f"{stem}.w3.weight"] = weight.chunk(2)
            else:
                tensors[f"{stem}.w2.weight"] = weight
    assert sum(name.endswith(".w1.weight") for name in tensors) > 2, "stored one by one"
    save_file({name: value.contiguous() for name, value in tensors.items()}, target / "model.safetensors", {"format": "pt"})


def set_quantization(folder: Path, config: dict) -> None:
    """Writes `quantization_config` into a folder's config.json."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))


def whole_numbers(weight: torch.Tensor, bits: int, group: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers from 0 [out, in], zero points and float16 scales [out, groups] of a weight."""
    grouped = weight.numpy().astype(np.float64).reshape(len(weight), -1, group)
    top = 2**bits - 1
    low, high = np.minimum(grouped.min(2), 0), np.maximum(grouped.max(2), 0)
    if symmetric:
        high = np.abs(grouped).max(2)
        low = -high
    scales = ((high - low) / top).astype(np.float16)
    zeros = np.full(scales.shape, 2 ** (bits - 1)) if symmetric else np.clip(np.round(-low / scales), 0, top)
    numbers = np.clip(np.round(grouped / scales[..., None]) + zeros[..., None], 0, top)
    return numbers.reshape(weight.shape).astype(np.uint32), zeros.astype(np.uint32), scales


def words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[a, b] → int32 [a, b / numbers of a word]; `order`: which number stands in the lowest bits, the next, …"""
    each = 32 // bits
    parts = numbers.reshape(len(numbers), -1, each)
    packed = np.zeros(parts.shape[:2], np.uint32)
    for place, column in enumerate(order or range(each)):
        packed |= parts[:, :, column] << np.uint32(bits * place)
    return torch.from_numpy(packed.view(np.int32))


def stands_for(numbers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: int) -> torch.Tensor:
    """The weight [out, in] in float32."""
    spread = [np.repeat(part.astype(np.float64), group, 1) for part in (zeros, scales)]
    return torch.from_numpy(((numbers - spread[0]) * spread[1]).astype(np.float32))


def awq(source: Path, target: Path, group: int = 32, zero_point: bool = True, layers: Sequence[str] = LAYERS) -> Path:
    """AutoAWQ's gemm version; see `rewritten`."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numbers, zeros, scales = whole_numbers(weight, 4, group, symmetric=not zero_point)
        stored = {"qweight": words(numbers.T, 4, AWQ_COLUMNS), "scales": torch.from_numpy(scales.T.copy())}
        if zero_point:
            stored["qzeros"] = words(zeros.T, 4, AWQ_COLUMNS)
        return stored, stands_for(numbers, zeros, scales, group)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": zero_point, "version": "gemm"}
    return rewritten(source, target, config | {"modules_to_not_convert": None}, pack, layers)


def gptq(
    source: Path,
    target: Path,
    bits: int = 4,
    group: int = 32,
    form: str = "gptq",
    symmetric: bool = True,
    layers: Sequence[str] = LAYERS,
) -> Path:
    """AutoGPTQ's and GPTQModel's; see `rewritten`."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        numbers, zeros, scales = whole_numbers(weight, bits, size, symmetric)
        kept = (zeros - (form == "gptq")) % 2**bits
        stored = {
            "qweight": words(numbers, bits).T,
            "qzeros": words(kept.T.astype(np.uint32), bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.arange(inputs, dtype=torch.int32) // size,
        }
        return stored, stands_for(numbers, zeros, scales, size)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": symmetric}
    return rewritten(source, target, config | {"checkpoint_format": form}, pack, layers)


def four_bits(source: Path, target: Path, layers: Sequence[str], ignore: Sequence[str] = ()) -> Path:
    """W4A16 of compressed-tensors, symmetric in groups of 32, as Kimi K2 has its experts; see `rewritten`."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numbers, zeros, scales = whole_numbers(weight, 4, 32, symmetric=True)
        shape = torch.tensor(weight.shape)
        stored = {"weight_packed": words(numbers, 4), "weight_scale": torch.from_numpy(scales), "weight_shape": shape}
        return stored, stands_for(numbers, zeros, scales, 32)

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", *ignore],
    }
    return rewritten(source, target, config, pack, layers)


def w8a8(source: Path, target: Path, layers: Sequence[str] = LAYERS) -> Path:
    """W8A8 of compressed-tensors, with a scale for each output and each token; activations stay as they are in the float
    checkpoint. See `rewritten`."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
        numbers = (weight / scales.float()).round().clamp(-128, 127)
        return {"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales.float()

    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    inputs = eight | {"strategy": "token", "dynamic": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": eight | {"strategy": "channel"}, "input_activations": inputs}
        },
        "ignore": ["lm_head"],
    }
    return rewritten(source, target, config, pack, layers)


def fp8(source: Path, target: Path, block: int | None = 128, layers: Sequence[str] = LAYERS) -> Path:
    """DeepSeek's blocks, or one scale for a tensor; activations stay as they are in the float checkpoint. See `rewritten`."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        down, right = (block, block) if block else (rows, columns)
        scales = torch.empty(-(-rows // down), -(-columns // right))
        values, stands = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                part = slice(i * down, (i + 1) * down), slice(j * right, (j + 1) * right)
                scales[i, j] = weight[part].abs().max() / 448
                values[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
                stands[part] = values[part].float() * scales[i, j]
        named = {"weight_scale_inv": scales} if block else {"weight_scale": scales.view(1)}
        return {"weight": values} | named, stands

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    return rewritten(source, target, config if block else config | {"weight_block_size": None}, pack, layers)


def compressed(source: Path, target: Path, preset: str, change: Callable[[dict], None] | None = None) -> None:
    """Quantizes a checkpoint with compressed-tensors, as its users do.

    Args:
        source: A folder in float32.
        target: Where the quantized one goes.
        preset: Name of a scheme, such as `W4A16`.
        change: Of the scheme, as a dictionary, before it is applied.
    """
    import transformers
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme(preset, ["Linear"]).model_dump()
    if change is not None:
        change(scheme)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = QuantizationConfig(config_groups={"group_0": QuantizationScheme(**scheme)}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        found = getattr(module, "quantization_scheme", None)
        if found is None or found.weights is None:
            continue
        low, high = _extremes(module.weight.detach(), found.weights, module.weight_scale.shape)
        scale, zero = calculate_qparams(low, high, found.weights)
        module.weight_scale.data.copy_(scale.view(module.weight_scale.shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.view(module.weight_zero_point.shape))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.01)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(target)
    compressor.update_config(target)


def _extremes(weight: torch.Tensor, args, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest weight for each scale."""
    if len(shape) < 2:
        return weight.min().view(1), weight.max().view(1)
    (rows, columns), (down, right) = weight.shape, shape
    blocks = weight.view(down, rows // down, right, columns // right)
    return blocks.amin((1, 3)), blocks.amax((1, 3))
