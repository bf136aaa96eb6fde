"""A model's files, and its configuration. No torch: the frontend reads the configuration too.

Weights are read from safetensors only: a pickle file can run code when it is opened.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from penstock.engine.config import ConfigError, DType, GenerationDefaults, KVDType, LoadFormat, ModelConfig, RunnerType
from penstock.engine.loading.generation_config import read_defaults, read_eos_token_ids
from penstock.engine.loading.images import read_image_settings
from penstock.engine.loading.json_files import read_object
from penstock.engine.loading.pooling import read_max_length, read_pooling
from penstock.engine.models.config import parse_decoder_config
from penstock.engine.models.cost import model_cost
from penstock.engine.models.nested import text_fields
from penstock.engine.models.vision.cost import tower_cost
from penstock.engine.quant.parse.config import parse_quantization
from penstock.engine.quant.scheme import CheckpointQuantization, QuantizationName, StoredMethod
from penstock.sources import SourceError, local_folder

DTYPES: tuple[DType, ...] = ("bfloat16", "float16", "float32")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def resolve(uri: str, revision: str | None = None, *, what: str = "model") -> Path:
    """Returns the local folder of a model or an adapter, which is downloaded unless it is there (see `penstock.sources`).

    Args:
        uri: A path, `file://` and a path, `hf://org/name` or `s3://bucket/path`. Relative paths begin at the working directory.
        revision: Branch, tag or commit on the Hub.
        what: What is looked for, in messages.

    Raises:
        ConfigError: There is no such folder, the server does not give it, or the scheme is unknown.
    """
    try:
        return local_folder(uri, revision)
    except SourceError as error:
        raise ConfigError(f"{what} {error}") from error


def weight_files(path: Path) -> list[Path]:
    """The folder's safetensors files by name; ConfigError where there are none, naming files of other formats."""
    files = sorted(path.glob("*.safetensors"))
    if files:
        return files
    _refuse_gguf(path)
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES)
    hint = f"; {', '.join(pickles)} would have to be unpickled, which can run code: convert to safetensors" if pickles else ""
    raise ConfigError(f"{path} has no *.safetensors file{hint}")


def _refuse_gguf(path: Path) -> None:
    """ConfigError where weights lie in llama.cpp's format: its quantizations are other ones."""
    if found := sorted(file.name for file in path.glob("*.gguf")):
        raise ConfigError(f"{path}: {', '.join(found)} is in GGUF, which is not supported: use the model's safetensors files")


def tensor_dtypes(path: Path) -> dict[str, str]:
    """Dtypes, as safetensors spells them, of all tensors in a folder's safetensors files, by name.

    Raises:
        ConfigError: There are none, or a file's header is damaged.
    """
    found: dict[str, str] = {}
    for file in weight_files(path):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            try:
                header: dict[str, Any] = msgspec.json.decode(stream.read(min(length, file.stat().st_size)))
            except msgspec.DecodeError as error:
                raise ConfigError(f"{file} is damaged: {error}") from error
        found |= {name: entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    return found


def packed_modules(path: Path) -> frozenset[str]:
    """Modules whose weight a checkpoint holds in few bits."""
    packed = [name for name, dtype in tensor_dtypes(path).items() if dtype not in ("BF16", "F16", "F32", "F64")]
    by_layer = {name.rpartition(".")[0] for name in packed if name.rpartition(".")[2] in ("weight", "weight_packed", "qweight")}
    # gpt-oss has a tensor for all experts of a layer.
    return frozenset(by_layer | {name.removesuffix("_blocks") for name in packed if name.endswith("_blocks")})


def read_model_config(
    path: Path,
    *,
    served_names: Sequence[str],
    dtype: DType | Literal["auto"] = "auto",
    kv_dtype: KVDType | Literal["auto"] = "auto",
    max_model_len: int | None = None,
    load_format: LoadFormat = "auto",
    quantization: QuantizationName | StoredMethod | None = None,
    runner: RunnerType = "auto",
    generation_config: str = "auto",
    override_generation_config: Mapping[str, Any] | None = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Reads what serving must know before any weight is loaded.

    Args:
        path: Folder in Hugging Face's format.
        served_names: What clients may put in `model`; the path where it is empty.
        dtype: Of weights and activations; `auto` is the checkpoint's.
        kv_dtype: Of keys and values; `auto` is the same.
        max_model_len: Tokens of prompt and output together; None is the checkpoint's, which for a model that embeds may be less
            than its positions.
        load_format: `dummy` needs no file of weights.
        quantization: How weights are stored; None is as the checkpoint has them, and so is the method of a quantized one.
        runner: Whether it generates or embeds; `auto` is what the checkpoint is made for.
        generation_config: Whose sampling is the default: `auto` is the checkpoint's, `vllm` OpenAI's; else a folder.
        override_generation_config: Fields that win over it.
        mm_processor_kwargs: Fields that win over those of `preprocessor_config.json`.

    Raises:
        ConfigError: Something is missing, or not supported; the message says what.
    """
    if not (path / "config.json").is_file():
        _refuse_gguf(path)
        raise ConfigError(f"{path} has no config.json: it is not a model in Hugging Face's format")
    raw = read_object(path / "config.json")
    decoder, stored = parse_decoder_config(raw), parse_quantization(raw)
    online = _online(quantization, stored)
    if stored is not None and load_format == "dummy":
        raise ConfigError(f"--load-format dummy makes no quantized weights, and the checkpoint's are ({stored.method})")
    longest = decoder.max_position_embeddings
    if load_format != "dummy":
        weight_files(path)
    if max_model_len is not None and not 2 <= max_model_len <= longest:
        raise ConfigError(f"--max-model-len {max_model_len}: the checkpoint is made for 2 to {longest} tokens")
    chosen = stored_dtype(raw) if dtype == "auto" else dtype
    cached = chosen if kv_dtype == "auto" else kv_dtype
    pooling = read_pooling(path, raw, decoder.hidden_size, runner)
    cost = model_cost(decoder, chosen, cached, online if stored is None else stored)
    if pooling is not None:
        cost = msgspec.structs.replace(cost, lm_head_flops_per_row=0, lm_head_bytes=0)
        defaults = GenerationDefaults()
        longest = min(longest, read_max_length(path) or longest)
    else:
        defaults = read_defaults(path, generation_config, override_generation_config or {})
    images = read_image_settings(path, decoder.vision, mm_processor_kwargs or {}) if pooling is None else None
    if images is not None and decoder.vision is not None:
        images = msgspec.structs.replace(images, cost=tower_cost(decoder.vision, cost.linear_flops_per_token))
    return ModelConfig(
        path=path,
        served_names=tuple(served_names) or (str(path),),
        architecture=raw["architectures"][0],
        dtype=chosen,
        kv_dtype=cached,
        max_model_len=max_model_len or longest,
        eos_token_ids=read_eos_token_ids(path, generation_config, raw if decoder.vision is None else text_fields(raw)),
        generation_defaults=defaults,
        cost=cost,
        load_format=load_format,
        quantization=online,
        stored_quantization=stored,
        pooling=pooling,
        images=images,
        vocab_size=decoder.vocab_size,
    )


def _online(asked: QuantizationName | StoredMethod | None, stored: CheckpointQuantization | None) -> QuantizationName | None:
    """The scheme by which weights are quantized while they are loaded."""
    if stored is not None:
        if asked in (None, stored.method):
            return None
        raise ConfigError(f"--quantization {asked}: the checkpoint is quantized already ({stored.method}); leave it out")
    for scheme in get_args(QuantizationName):
        if asked == scheme:
            return scheme
    if asked is not None:
        raise ConfigError(
            f"--quantization {asked}: the checkpoint is not quantized; {', '.join(get_args(QuantizationName))} quantize it"
        )
    return None


def stored_dtype(raw: dict[str, Any]) -> DType:
    """The type of a checkpoint's weights, from its config.json's object; `ConfigError` where it cannot be served."""
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    for dtype in DTYPES:
        if name == dtype:
            return dtype
    raise ConfigError(f"config.json: dtype {name!r} is not supported (supported: {', '.join(DTYPES)}); choose one with --dtype")
