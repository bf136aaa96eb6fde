"""Where a model's files are and what they say about it. No torch: the frontend reads the configuration too.

Weights are read from safetensors alone: a pickle file can run code when it is opened.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import msgspec

from penstock.engine.config import ConfigError, DType, ModelConfig
from penstock.engine.models.config import parse_decoder_config
from penstock.engine.models.cost import model_cost

DTYPES: tuple[DType, ...] = ("bfloat16", "float16", "float32")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# What serving reads; pickled weights and other frameworks' copies are not even fetched.
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]


def resolve(uri: str, revision: str | None = None) -> Path:
    """Returns the local folder of a model.

    Args:
        uri: A path, `file://` and a path, or `hf://org/name`, which is downloaded into Hugging Face's cache unless it is
            there. Relative paths begin at the working directory.
        revision: Branch, tag or commit on the Hub.

    Raises:
        ConfigError: There is no such folder, the Hub does not give it, or the scheme is unknown.
    """
    scheme, separator, rest = uri.partition("://")
    if separator and scheme == "hf":
        return _download(rest, revision)
    if separator and scheme != "file":
        raise ConfigError(f"model {uri!r}: unknown scheme {scheme!r} (known: a path, file://, hf://)")
    if revision is not None:
        raise ConfigError(f"model {uri!r}: a revision ({revision!r}) belongs to hf:// alone; a folder has none")
    path = _path(uri) if separator else Path(uri)
    if not path.is_dir():
        raise ConfigError(f"model {uri!r}: {path.absolute()} {'is not a folder' if path.exists() else 'does not exist'}")
    return path.resolve()


def _path(uri: str) -> Path:
    """Of `file:///absolute` or, as people write it, `file://relative/to/the/working/directory`."""
    parts = urlsplit(uri)
    return Path(unquote(parts.path if parts.netloc in ("", "localhost") else parts.netloc + parts.path))


def _download(repo: str, revision: str | None) -> Path:
    # Here, since local models need not pay its 0.3 s.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if repo.count("/") != 1:
        raise ConfigError(f"model 'hf://{repo}': expected hf://organisation/name")
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(f"model 'hf://{repo}' at revision {revision or 'main'}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; ConfigError where the file holds something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from error


def weight_files(path: Path) -> list[Path]:
    """The folder's safetensors files by name; ConfigError where there are none, naming pickle files that are never opened."""
    files = sorted(path.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES)
    hint = f"; {', '.join(pickles)} would have to be unpickled, which can run code: convert to safetensors" if pickles else ""
    raise ConfigError(f"{path} has no *.safetensors file{hint}")


def read_model_config(
    path: Path, *, served_names: Sequence[str], dtype: DType | Literal["auto"] = "auto", max_model_len: int | None = None
) -> ModelConfig:
    """Reads what serving must know before any weight is loaded.

    Args:
        path: Folder in Hugging Face's format.
        served_names: What clients may put in `model`; the path where it is empty.
        dtype: Of weights, activations and KV cache; `auto` is the checkpoint's.
        max_model_len: Tokens of prompt and output together; None is the checkpoint's.

    Raises:
        ConfigError: Something is missing, or not supported; the message says what.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json: it is not a model in Hugging Face's format")
    raw = read_json(path / "config.json")
    decoder = parse_decoder_config(raw)
    longest = decoder.max_position_embeddings
    weight_files(path)
    if max_model_len is not None and not 2 <= max_model_len <= longest:
        raise ConfigError(f"--max-model-len {max_model_len}: the checkpoint is made for 2 to {longest} tokens")
    chosen = _dtype(raw) if dtype == "auto" else dtype
    return ModelConfig(
        path=path,
        served_names=tuple(served_names) or (str(path),),
        architecture=raw["architectures"][0],
        dtype=chosen,
        max_model_len=max_model_len or longest,
        eos_token_ids=_eos_token_ids(path, raw),
        cost=model_cost(decoder, chosen),
    )


def _dtype(raw: dict[str, Any]) -> DType:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    for dtype in DTYPES:
        if name == dtype:
            return dtype
    raise ConfigError(f"config.json: dtype {name!r} is not supported (supported: {', '.join(DTYPES)}); choose one with --dtype")


def _eos_token_ids(path: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json's, which chat models extend by their end-of-turn tokens, else config.json's."""
    generation = path / "generation_config.json"
    ids = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if ids is None:
        ids = raw.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)
