"""Fills a model from safetensors files, one or several, and accounts for every tensor."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import safetensors
import torch

from penstock.engine.config import ConfigError
from penstock.engine.loading.checkpoint import read_json, weight_files
from penstock.engine.models.layers.weight import Weights

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
_HEADER_FLOATS: dict[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_FLOATS = tuple(_HEADER_FLOATS.values())
_SHOWN = 5


class Loadable(Protocol):
    """A model that says which tensors it takes."""

    def weights(self) -> Weights:
        """Every tensor that must be there."""
        ...

    def ignores(self, name: str) -> bool:
        """Whether a tensor that may be there is not needed."""
        ...


def load_weights(model: Loadable, path: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Loads a folder's tensors into a model.

    Args:
        model: Takes each tensor by its name.
        path: Folder in Hugging Face's format.
        progress: Called after each tensor with the bytes read and the bytes of all files.

    Raises:
        ConfigError: A file is missing or damaged, or a tensor is missing, unexpected, of another shape or not of floating point;
            the message names it.
    """
    start = time.monotonic()
    files = _files(path)
    total = sum(file.stat().st_size for file in files)
    wanted = model.weights()
    loaded: set[str] = set()
    unexpected: list[str] = []
    done = 0
    for file in files:
        try:
            with safetensors.safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    if name not in wanted:
                        unexpected += [] if model.ignores(name) else [name]
                        continue
                    done += _load(name, tensors.get_tensor(name), wanted)
                    loaded.add(name)
                    if progress is not None:
                        progress(done, total)
        except safetensors.SafetensorError as error:
            raise ConfigError(f"{file} is damaged: {error}") from error
    _check_complete(path, sorted(wanted.keys() - loaded), sorted(unexpected))
    seconds = time.monotonic() - start
    log.info("loaded %d tensors, %.1f MB in %d files, in %.2f s", len(loaded), done / 1e6, len(files), seconds)


def check_weights(model: Loadable, path: Path) -> None:
    """Raises what `load_weights` would, for names, shapes and dtypes, having read the files' headers alone."""
    wanted = model.weights()
    found: set[str] = set()
    unexpected: list[str] = []
    for file in _files(path):
        try:
            with safetensors.safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    if name in wanted:
                        header = tensors.get_slice(name)
                        dtype: str = header.get_dtype()
                        _check(name, tuple(header.get_shape()), _HEADER_FLOATS.get(dtype) or dtype, wanted)
                        found.add(name)
                    elif not model.ignores(name):
                        unexpected.append(name)
        except safetensors.SafetensorError as error:
            raise ConfigError(f"{file} is damaged: {error}") from error
    _check_complete(path, sorted(wanted.keys() - found), sorted(unexpected))


def _files(path: Path) -> list[Path]:
    """The index's files where there is one, else all."""
    if not (path / INDEX).is_file():
        return weight_files(path)
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{path / INDEX}: weight_map is missing")
    files = [path / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}, which {INDEX} names")
    return files


def _load(name: str, value: torch.Tensor, wanted: Weights) -> int:
    _check(name, tuple(value.shape), value.dtype, wanted)
    wanted[name].load(value)
    return value.nbytes


def _check(name: str, shape: tuple[int, ...], dtype: torch.dtype | str, wanted: Weights) -> None:
    expected = wanted[name].shape
    if shape != expected:
        raise ConfigError(f"tensor {name}: shape {list(shape)}, expected {list(expected)}")
    if dtype not in _FLOATS:
        raise ConfigError(f"tensor {name}: dtype {dtype} is not supported (supported: bfloat16, float16, float32)")


def _check_complete(path: Path, missing: list[str], unexpected: list[str]) -> None:
    problems = [
        f"{what} {', '.join(names[:_SHOWN])}" + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        for what, names in (("lacks the tensors", missing), ("has the unexpected tensors", unexpected))
        if names
    ]
    if problems:
        raise ConfigError(f"{path} {' and '.join(problems)}")
