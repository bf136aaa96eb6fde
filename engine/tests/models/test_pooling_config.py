"""What a folder in sentence-transformers' layout asks for is understood, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from embedding_models import MODES, write_modules

from penstock.engine.config import ConfigError, PoolingConfig
from penstock.engine.loading.pooling import read_max_length, read_pooling
from penstock.engine.models.config import parse_decoder_config

RAW: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"]}


@pytest.mark.parametrize("tokens", MODES)
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_and_normalisation_are_what_the_folder_says(tmp_path: Path, tokens: Any, normalize: bool) -> None:
    write_modules(tmp_path, MODES[tokens], 64, normalize)
    assert read_pooling(tmp_path, RAW, 64, "auto") == PoolingConfig(tokens=tokens, normalize=normalize, size=64)
    assert read_pooling(tmp_path, RAW, 64, "generate") is None


@pytest.mark.parametrize(
    ("fields", "dimensions"),
    [
        ({}, None),
        ({"is_matryoshka": False}, None),
        ({"is_matryoshka": True}, ()),
        ({"matryoshka_dimensions": [8, 64]}, (8, 64)),
        ({"is_matryoshka": True, "matryoshka_dimensions": [8]}, (8,)),
    ],
)
def test_sizes_are_what_the_configuration_says(tmp_path: Path, fields: dict[str, Any], dimensions: Any) -> None:
    pooling = read_pooling(write_modules(tmp_path, MODES["last"], 64), RAW | fields, 64, "auto")
    assert pooling is not None and pooling.dimensions == dimensions


@pytest.mark.parametrize(
    "kinds", [["Transformer", "Pooling", "Dense", "Normalize"], ["Transformer"], ["WordEmbeddings", "Pooling"]]
)
def test_other_modules_are_refused(tmp_path: Path, kinds: list[str]) -> None:
    write_modules(tmp_path, MODES["last"], 64)
    modules = [
        {"path": f"{at}_{kind}" if at else "", "type": f"sentence_transformers.models.{kind}"} for at, kind in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match=kinds[-2] if len(kinds) > 1 else "Transformer"):
        read_pooling(tmp_path, RAW, 64, "auto")


@pytest.mark.parametrize(
    ("mode", "fields", "named"),
    [
        ("pooling_mode_max_tokens", {}, "pooling_mode_max_tokens"),
        ("pooling_mode_lasttoken", {"pooling_mode_mean_tokens": True}, "pooling_mode_mean_tokens with pooling_mode_lasttoken"),
        ("none", {}, "the pooling is none"),
        ("pooling_mode_lasttoken", {"include_prompt": False}, "include_prompt"),
        ("pooling_mode_lasttoken", {"word_embedding_dimension": 32}, "word_embedding_dimension is 32"),
    ],
)
def test_other_poolings_are_refused(tmp_path: Path, mode: str, fields: dict[str, Any], named: str) -> None:
    write_modules(tmp_path, mode, 64, **fields)
    with pytest.raises(ConfigError) as refused:
        read_pooling(tmp_path, RAW, 64, "auto")
    assert all(word in str(refused.value) for word in named.split(" with "))


@pytest.mark.parametrize("given", [[0], [65], ["8"], 8])
def test_sizes_that_make_no_sense_are_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ConfigError, match="matryoshka_dimensions"):
        read_pooling(tmp_path, RAW | {"matryoshka_dimensions": given}, 64, "pooling")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write_modules(tmp_path, MODES["last"], 64)
    (tmp_path / "1_Pooling/config.json").unlink()
    with pytest.raises(ConfigError, match="1_Pooling"):
        read_pooling(tmp_path, RAW, 64, "auto")
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"modules\.json"):
        read_pooling(tmp_path, RAW, 64, "pooling")


def test_a_model_that_looks_both_ways_is_refused() -> None:
    with pytest.raises(ConfigError, match="is_causal"):
        parse_decoder_config(RAW | {"is_causal": False})


@pytest.mark.parametrize(
    ("config", "length"),
    [(None, None), ({}, None), ({"max_seq_length": None, "do_lower_case": False}, None), ({"max_seq_length": 512}, 512)],
)
def test_how_long_a_text_may_be_is_read(tmp_path: Path, config: Any, length: int | None) -> None:
    if config is not None:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps(config))
    assert read_max_length(tmp_path) == length


@pytest.mark.parametrize(
    "config", [{"max_seq_length": 0}, {"max_seq_length": "8"}, {"max_seq_length": True}, {"do_lower_case": True}]
)
def test_lengths_that_are_none_and_lower_case_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=next(iter(config))):
        read_max_length(tmp_path)
