"""The weights of an adapter: read, checked against the model, and scaled, in the host's memory."""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import safetensors
import torch

from penstock.engine.config import ConfigError
from penstock.engine.loading.checkpoint import PICKLE_SUFFIXES
from penstock.engine.lora.peft import PeftConfig, read_peft_config

WEIGHTS_FILE: Final = "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")
_DECODER: Final = "model.language_model."
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Target(NamedTuple):
    """A weight that adapters may be on, without the weight: adapters are read while there is none, too."""

    shape: tuple[int, ...]
    """[out, in] of the whole model's."""
    narrow: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """Cuts factors to the rank's part, as `LinearPart.narrow` does."""
    here: bool = True
    """Whether the rank has a part: another pipeline stage has the layer else, and an adapter is checked against it all the
    same."""


class Factors(NamedTuple):
    """Of one module, the rank's part, float32."""

    a: torch.Tensor
    """[rank, in]."""
    b: torch.Tensor
    """[out, rank], with the scale in it."""


HostAdapter = dict[str, Factors]
"""By module, such as `model.layers.0.self_attn.q_proj`; missing are those that the adapter leaves alone or another stage has."""


def read_adapter(path: Path, targets: Mapping[str, Target], max_rank: int) -> HostAdapter:
    """Reads an adapter's folder.

    Args:
        path: In PEFT's format.
        targets: The model's weights that can be adapted, by module.
        max_rank: Of the shelves.

    Raises:
        ConfigError: The adapter is damaged, not supported, or not made for this model; the message names what is wrong.
    """
    config = read_peft_config(path)
    found = _tensors(path)
    adapter: HostAdapter = {}
    for module in sorted({module for module, _ in found}):
        pair = found.get((module, "A")), found.get((module, "B"))
        if pair[0] is None or pair[1] is None:
            raise ConfigError(f"{WEIGHTS_FILE}: {module} has lora_{'B' if pair[0] is None else 'A'} alone")
        target = next((name for name in _spellings(module) if name in targets), None)
        if target is None:
            raise ConfigError(f"{WEIGHTS_FILE}: the model has no {module}, or none that an adapter may be on")
        factors = _factors(module, pair[0], pair[1], targets[target], config, max_rank)
        if targets[target].here:
            adapter[target] = factors
    if not found:
        raise ConfigError(f"{WEIGHTS_FILE} holds no LoRA weights")
    return adapter


def _spellings(module: str) -> tuple[str, ...]:
    """A module's possible names in the model: transformers has the decoder of a model that reads images by another one."""
    inner = module.removeprefix(_DECODER)
    return (module,) if inner == module else (module, f"model.{inner}", f"language_model.model.{inner}")


def digest(adapter: HostAdapter) -> bytes:
    """The same for the same weights, and for no others."""
    state = hashlib.sha256()
    for module, factors in adapter.items():
        for factor in factors:
            state.update(f"{module}{list(factor.shape)}".encode())
            state.update(factor.contiguous().numpy().data)
    return state.digest()


def _tensors(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    """(module, A or B) → the tensor as it is in the file."""
    file = path / WEIGHTS_FILE
    if not file.is_file():
        pickles = sorted(other.name for other in path.iterdir() if other.suffix in PICKLE_SUFFIXES)
        hint = f"; {', '.join(pickles)} would have to be unpickled, which can run code: convert to safetensors" if pickles else ""
        raise ConfigError(f"{path} has no {WEIGHTS_FILE}{hint}")
    found: dict[tuple[str, str], torch.Tensor] = {}
    try:
        with safetensors.safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                match = _NAME.fullmatch(name)
                if match is None:
                    raise ConfigError(f"{WEIGHTS_FILE}: {name} is not supported (supported: lora_A and lora_B of linear layers)")
                found[match["module"], match["factor"]] = tensors.get_tensor(name)
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
    return found


def _factors(module: str, a: torch.Tensor, b: torch.Tensor, target: Target, config: PeftConfig, max_rank: int) -> Factors:
    for name, value in (("A", a), ("B", b)):
        if value.ndim != 2 or value.dtype not in _FLOATS:
            raise ConfigError(f"{module}.lora_{name}: expected a matrix in floating point, got {list(value.shape)} {value.dtype}")
    rank, (out_features, in_features) = a.shape[0], target.shape
    if (a.shape[1], *b.shape) != (in_features, out_features, rank):
        shapes = f"A {list(a.shape)} and B {list(b.shape)}"
        raise ConfigError(f"{module}: {shapes} do not fit the model's weight of {[out_features, in_features]}")
    if rank > max_rank:
        raise ConfigError(f"{module}: rank {rank} is above --max-lora-rank {max_rank}")
    a, b = target.narrow(a.float(), b.float() * config.scale(module, rank))
    if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
        raise ConfigError(f"{module}: the weights are not finite")
    return Factors(a, b)
