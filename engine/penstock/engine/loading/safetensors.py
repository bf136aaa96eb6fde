"""Fills a model from safetensors files, one or several, and accounts for every tensor before the first is loaded."""

import re
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import safetensors
import torch

from penstock.engine.config import ConfigError
from penstock.engine.loading.checkpoint import weight_files
from penstock.engine.loading.json_files import read_object
from penstock.engine.loading.progress import Progress
from penstock.engine.models.layers.weight import Weights

INDEX = "model.safetensors.index.json"
DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}
"""Dtypes by safetensors' names. Each tensor accepts some of them."""
BODY = "model."
"""Before the names of all tensors but the LM head's; a decoder that was saved without one may lack it (`Qwen3-Embedding`)."""
_OLD_NAMES = {
    "vision_tower.vision_model.": "vision_tower.",
    "model.language_model.": "model.",
    "model.visual.": "visual.",
}
"""What stands before the names of a part's tensors in some checkpoints, and what does in ours."""
_SHOWN = 5
_ALL_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")


class Loadable(Protocol):
    """A model that says which tensors it takes."""

    def weights(self) -> Weights:
        """Every tensor that must be there."""
        ...

    def ignores(self, name: str) -> bool:
        """Whether a tensor that may be there is not needed."""
        ...


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, as its file's header has it."""

    name: str
    """Name of the tensor in the model."""
    shape: tuple[int, ...]
    dtype: str
    """Safetensors' name of the dtype: `BF16`."""
    file: Path
    offset: int
    """Offset of its first byte in the file."""
    size: int
    """Bytes."""
    key: str
    """What its file calls it."""
    rows: tuple[int, int, int] | None = None
    """Of a tensor that the file holds for all experts of a layer: the expert, and its first row and the one after the last."""


def load_mapped(model: Loadable, tensors: Sequence[StoredTensor], progress: Progress | None = None) -> None:
    """Loads tensors into a model in the host's memory, from files that are mapped.

    Args:
        model: Takes each tensor by its name.
        tensors: As `check_weights` has found them.
        progress: Told of each tensor's bytes.
    """
    wanted = model.weights()
    for file, members in groupby(tensors, key=attrgetter("file")):
        with safetensors.safe_open(file, framework="pt") as mapped:
            for tensor in members:
                wanted[tensor.name].load(_mapped(mapped, tensor))
                if progress is not None:
                    progress.add(tensor.size)


def _mapped(mapped: Any, tensor: StoredTensor) -> torch.Tensor:
    """Its values; of a tensor of all experts, nothing else is read."""
    if tensor.rows is None:
        return mapped.get_tensor(tensor.key)
    expert, first, end = tensor.rows
    return mapped.get_slice(tensor.key)[expert : expert + 1, first:end][0]


def check_weights(model: Loadable, path: Path) -> list[StoredTensor]:
    """Compares a folder in Hugging Face's format with a model; reads the headers of its files alone.

    Returns:
        The tensors that the model takes, file by file, in the order of their bytes.

    Raises:
        ConfigError: A file is missing or damaged, or a tensor is missing, unexpected, or of a shape or dtype that the model does
            not take; the message names it.
    """
    wanted = model.weights()
    stored = _with_body([_renamed(tensor) for file in _files(path) for tensor in _header(file)], model, wanted)
    stored = [part for tensor in stored for part in _by_expert(tensor, wanted)]
    found = [tensor for tensor in stored if tensor.name in wanted]
    unexpected = [tensor.name for tensor in stored if tensor.name not in wanted and not model.ignores(tensor.name)]
    for tensor in found:
        _check(tensor, wanted)
    _check_complete(path, sorted(wanted.keys() - {tensor.name for tensor in found}), sorted(unexpected))
    return found


def _renamed(tensor: StoredTensor) -> StoredTensor:
    """The tensor by its name of today."""
    for old, name in _OLD_NAMES.items():
        if tensor.name.startswith(old):
            return tensor._replace(name=name + tensor.name.removeprefix(old))
    return tensor


def _with_body(stored: list[StoredTensor], model: Loadable, wanted: Weights) -> list[StoredTensor]:
    """The tensors by the model's names, where the checkpoint lacks what goes before them; those of other pipeline stages too."""
    if any(tensor.name.startswith(BODY) for tensor in stored):
        return stored
    names = {tensor.name: BODY + tensor.name for tensor in stored}
    known = {name for name, whole in names.items() if whole in wanted or model.ignores(whole)}
    return [tensor._replace(name=names[tensor.name]) if tensor.name in known else tensor for tensor in stored]


def _by_expert(tensor: StoredTensor, wanted: Weights) -> list[StoredTensor]:
    """Its parts, if the file has one tensor for all experts of a layer, [experts, outputs, inputs], and the model wants each by
    itself; otherwise the tensor."""
    found = _ALL_EXPERTS.fullmatch(tensor.name)
    if found is None or tensor.name in wanted or len(tensor.shape) != 3:
        return [tensor]
    (experts, rows, columns), names = tensor.shape, ("gate_proj", "up_proj") if found[2] == "gate_up_proj" else ("down_proj",)
    own, size = rows // len(names), tensor.size // (experts * len(names))
    if own * len(names) != rows:
        return [tensor]
    return [
        tensor._replace(
            name=f"{found[1]}.{expert}.{name}.weight",
            shape=(own, columns),
            offset=tensor.offset + (expert * len(names) + at) * size,
            size=size,
            rows=(expert, at * own, (at + 1) * own),
        )
        for expert in range(experts)
        for at, name in enumerate(names)
    ]


def _header(file: Path) -> list[StoredTensor]:
    """The file's tensors in the order of their bytes."""
    try:
        with safetensors.safe_open(file, framework="pt"):
            pass  # its header agrees with itself and with the file's length
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = msgspec.json.decode(stream.read(length))
    tensors: list[StoredTensor] = []
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            place = (file, 8 + length + begin, end - begin)
            tensors.append(StoredTensor(name, tuple(entry["shape"]), entry["dtype"], *place, key=name))
    return sorted(tensors, key=attrgetter("offset"))


def _files(path: Path) -> list[Path]:
    """The index's files where there is one, else all."""
    if not (path / INDEX).is_file():
        return weight_files(path)
    weight_map = read_object(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{path / INDEX}: weight_map is missing")
    files = [path / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}, which {INDEX} names")
    return files


def _check(tensor: StoredTensor, wanted: Weights) -> None:
    expected = wanted[tensor.name].shape
    if wanted[tensor.name].turns and tensor.shape == (*expected[:-2], expected[-1], expected[-2]):
        expected = tensor.shape
    if tensor.shape != expected and {tensor.shape, expected} != {(), (1,)}:  # one scale is spelled in both ways
        raise ConfigError(f"tensor {tensor.name}: shape {list(tensor.shape)}, expected {list(expected)}")
    accepted = [name for name, dtype in DTYPES.items() if dtype in wanted[tensor.name].dtypes]
    if tensor.dtype not in accepted:
        raise ConfigError(f"tensor {tensor.name}: dtype {tensor.dtype}, expected {' or '.join(accepted)}")


def _check_complete(path: Path, missing: list[str], unexpected: list[str]) -> None:
    problems = [
        f"{what} {', '.join(names[:_SHOWN])}" + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        for what, names in (("lacks the tensors", missing), ("has the unexpected tensors", unexpected))
        if names
    ]
    if problems:
        raise ConfigError(f"{path} {' and '.join(problems)}")
